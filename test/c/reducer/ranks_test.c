/* Several ranks: averages, comparison, failures. Over the fake backend, which is exact. */
#include <stdlib.h>
#include <unistd.h>

#include "backend/half.h"
#include "world.h"

/* --- averages -------------------------------------------------------------------------------- */

enum { KINDS = 6 };
static const tddp_dtype kinds[KINDS] = {TDDP_FLOAT32,  TDDP_FLOAT64,   TDDP_FLOAT16,
                                        TDDP_BFLOAT16, TDDP_COMPLEX64, TDDP_COMPLEX128};
static const int64_t odd_sizes[] = {1, 7, 33, 129, 1021};

static void put(void *data, tddp_dtype dtype, size_t k, double value)
{
    switch (dtype) {
    case TDDP_FLOAT32:
        ((float *)data)[k] = (float)value;
        break;
    case TDDP_FLOAT64:
        ((double *)data)[k] = value;
        break;
    case TDDP_FLOAT16:
        ((uint16_t *)data)[k] = tddp_backend_to_float16((float)value);
        break;
    case TDDP_BFLOAT16:
        ((uint16_t *)data)[k] = tddp_backend_to_bfloat16((float)value);
        break;
    case TDDP_COMPLEX64:
        ((float *)data)[2 * k] = (float)value;
        ((float *)data)[2 * k + 1] = (float)-value;
        break;
    default:
        ((double *)data)[2 * k] = value;
        ((double *)data)[2 * k + 1] = -value;
    }
}

static void check_value(const void *data, tddp_dtype dtype, size_t k, double value)
{
    switch (dtype) {
    case TDDP_FLOAT32:
        CHECK_DOUBLE(((const float *)data)[k], value, 1e-5);
        break;
    case TDDP_FLOAT64:
        CHECK_DOUBLE(((const double *)data)[k], value, 1e-13);
        break;
    case TDDP_FLOAT16:
        CHECK_DOUBLE(tddp_backend_from_float16(((const uint16_t *)data)[k]), value, 0.02);
        break;
    case TDDP_BFLOAT16:
        CHECK_DOUBLE(tddp_backend_from_bfloat16(((const uint16_t *)data)[k]), value, 0.15);
        break;
    case TDDP_COMPLEX64:
        CHECK_DOUBLE(((const float *)data)[2 * k], value, 1e-5);
        CHECK_DOUBLE(((const float *)data)[2 * k + 1], -value, 1e-5);
        break;
    default:
        CHECK_DOUBLE(((const double *)data)[2 * k], value, 1e-13);
        CHECK_DOUBLE(((const double *)data)[2 * k + 1], -value, 1e-13);
    }
}

static double gradient_of(int rank, int step, size_t param, size_t k)
{
    return rank + 2 * step + (double)((param + k) % 5);
}

/* Each rank marks gradients ready in a different order; the averages must be the same. */
static void average(int rank, int world_size, int port)
{
    enum { COUNT = 12 };
    tddp_param params[COUNT];
    tddp_reducer *reducer = NULL;
    tddp_reducer_opts opts = buckets_of(64, 2000);
    tddp_group *group = join("fake", rank, world_size, port);
    for (size_t i = 0; i < COUNT; i++) {
        params[i] = vector_param(i, &odd_sizes[i % 5], kinds[i % KINDS]);
    }
    CHECK_OK(tddp_reducer_create(group, params, COUNT, &opts, NULL, &reducer));
    CHECK_INT(tddp_reducer_bucket_count(reducer), KINDS);
    CHECK_INT(tddp_reducer_bucket_of(reducer, 0), KINDS - 1); /* the last parameters come first */
    for (int step = 0; step < 4; step++) {
        int rebuilt = 0;
        int all = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, step == 1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        for (size_t n = 0; n < COUNT; n++) {
            /* 5 and 7 are coprime to 12, so this visits all parameters, in different orders. */
            size_t i = (n * (rank % 2 ? 5 : 7) + (size_t)(step + rank)) % COUNT;
            for (size_t k = 0; k < params[i].count; k++) {
                put(tddp_reducer_gradient(reducer, i), params[i].dtype, k,
                    gradient_of(rank, step, i, k));
            }
            CHECK_OK(tddp_reducer_mark_ready(reducer, i, &all));
        }
        CHECK_INT(all, 1);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        for (size_t i = 0; i < COUNT; i++) {
            for (size_t k = 0; k < params[i].count; k++) {
                check_value(tddp_reducer_gradient(reducer, i), params[i].dtype, k,
                            gradient_of(0, step, i, k) + (world_size - 1) / 2.0);
            }
        }
    }
    CHECK(tddp_reducer_bucket_count(reducer) > KINDS);
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(one_rank_keeps_its_gradients, 1, 30)
{
    average(rank, world_size, port);
}

MULTI_TEST(two_ranks_average, 2, 30)
{
    average(rank, world_size, port);
}

MULTI_TEST(three_ranks_average, 3, 40)
{
    average(rank, world_size, port);
}

MULTI_TEST(four_ranks_average, 4, 60)
{
    average(rank, world_size, port);
}

MULTI_TEST(every_rank_rebuilds_in_the_order_of_rank_0, 2, 30)
{
    const size_t orders[2][4] = {{3, 1, 2, 0}, {0, 1, 2, 3}};
    tddp_reducer_opts opts = buckets_of(1, 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 4, &opts);
    int rebuilt = 0;
    run_iteration(reducer, orders[rank], 4, (float)rank);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 1);
    for (size_t n = 0; n < 4; n++) {
        CHECK_INT(tddp_reducer_bucket_of(reducer, orders[0][n]), n);
        check_filled(reducer, n, 0.5f + 10.0f * (float)n);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

/* --- comparison ------------------------------------------------------------------------------ */

static void check_mismatch(tddp_group *group, const tddp_param *params, size_t count,
                           const tddp_reducer_opts *opts, const char *text)
{
    tddp_reducer *reducer = NULL;
    CHECK_STATUS(tddp_reducer_create(group, params, count, opts, NULL, &reducer), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), text);
    CHECK(reducer == NULL);
}

MULTI_TEST(different_shapes_are_a_mismatch_on_every_rank, 3, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t wide[] = {128, rank == 2 ? 392 : 784};
    const int64_t one = 10;
    tddp_param params[3] = {
        vector_param(0, &one, TDDP_FLOAT32),
        {"fc1.weight", (size_t)(wide[0] * wide[1]), TDDP_FLOAT32, TDDP_CPU, 0, wide, 2, 0},
        vector_param(2, &one, TDDP_FLOAT32)};
    check_mismatch(group, params, 3, NULL,
                   "parameter \"fc1.weight\" (number 1) is float32 [128, 784] on rank 0, but "
                   "float32 [128, 392] on rank 2: every rank must build the same model");
    leave(group);
}

MULTI_TEST(different_dtypes_and_names_are_a_mismatch_on_every_rank, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t one = 10;
    tddp_param params[2] = {vector_param(0, &one, TDDP_FLOAT32),
                            vector_param(1, &one, rank ? TDDP_FLOAT64 : TDDP_FLOAT32)};
    params[1].name = rank ? "y" : "x";
    check_mismatch(group, params, 2, NULL,
                   "parameter \"x\" (number 1) is float32 [10] on rank 0, but float64 [10] on "
                   "rank 1 (\"y\" there)");
    leave(group);
}

MULTI_TEST(an_extra_parameter_is_a_mismatch_on_every_rank, 3, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t one = 10;
    tddp_param params[3] = {vector_param(0, &one, TDDP_FLOAT32),
                            vector_param(1, &one, TDDP_FLOAT32),
                            vector_param(2, &one, TDDP_FLOAT32)};
    check_mismatch(group, params, rank == 1 ? 3 : 2, NULL,
                   "rank 0 has 2 parameters, rank 1 has 3: \"c\" (number 2) is the first that only "
                   "rank 1 has");
    leave(group);
}

MULTI_TEST(different_bucket_sizes_are_a_mismatch_on_every_rank, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t one = 10;
    tddp_reducer_opts opts = buckets_of(500, rank ? 1000 : 2000);
    tddp_param param = vector_param(0, &one, TDDP_FLOAT32);
    check_mismatch(
        group, &param, 1, &opts,
        "rank 0 has buckets of [500, 2000] bytes, find_unused off, static_graph off, skip_unused "
        "off; rank 1 has buckets of [500, 1000] bytes, find_unused off, static_graph off, "
        "skip_unused off: every rank must give the same options");
    leave(group);
}

MULTI_TEST(names_may_differ, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t one = 10;
    tddp_reducer *reducer = NULL;
    tddp_param param = vector_param((size_t)rank, &one, TDDP_FLOAT32);
    CHECK_OK(tddp_reducer_create(group, &param, 1, NULL, NULL, &reducer));
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(described_buckets_are_compared, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t one = 10;
    tddp_reducer_opts opts = TDDP_REDUCER_OPTS_INIT;
    opts.describe = 1;
    tddp_reducer *reducer = make_vectors(group, 4, &opts);
    run_iteration(reducer, (const size_t[]){0, 1, 2, 3}, 4, (float)rank);
    tddp_reducer_free(reducer);
    tddp_param param = vector_param((size_t)rank, &one, TDDP_FLOAT32);
    param.name = rank ? "y" : "x";
    int all = 0;
    CHECK_OK(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer));
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_mark_ready(reducer, 0, &all));
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "\"bucket 1 of 1: x [10]\"");
    CHECK_CONTAINS(tddp_error_message(), "\"bucket 1 of 1: y [10]\"");
    tddp_reducer_free(reducer);
    tddp_group_release(group);
}

/* --- failures -------------------------------------------------------------------------------- */

/* Operation 1 compares the ranks, 2 is the first bucket. */
static tddp_reducer *start_iteration(tddp_group *group)
{
    tddp_reducer *reducer = make_vectors(group, 2, NULL);
    int all = 0;
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_mark_ready(reducer, 1, &all));
    CHECK_OK(tddp_reducer_mark_ready(reducer, 0, &all));
    CHECK_INT(all, 1);
    return reducer;
}

MULTI_TEST(a_failed_all_reduce_fails_finish_and_all_later_calls, 2, 40)
{
    setenv("TDDP_FAKE", "fail_at=2", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = start_iteration(group);
    int number = 0;
    tddp_status failed = tddp_reducer_finish(reducer, NULL);
    /* This rank's failure, or the other's if that was reported first. */
    CHECK(failed == TDDP_NETWORK || failed == TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "asked to fail by TDDP_FAKE");
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), failed);
    CHECK_STATUS(tddp_reducer_rebuild(reducer, NULL, &number), failed);
    CHECK_STATUS(tddp_reducer_prepare(reducer), failed);
    CHECK_CONTAINS(tddp_error_message(), "the gradients of an earlier step were not averaged (");
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 0, &number), failed);
    tddp_reducer_free(reducer);
    tddp_group_release(group);
}

MULTI_TEST(a_wait_that_ends_early_can_be_continued, 2, 40)
{
    setenv("TDDP_FAKE", "delay_ms=300", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = start_iteration(group);
    const tddp_wait soon = {20, NULL};
    CHECK_STATUS(tddp_reducer_finish(reducer, &soon), TDDP_TIMEOUT);
    CHECK_INT(reducer->finished, 0);
    tddp_cancel *cancel = NULL;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    const tddp_wait interrupted = {-1, cancel};
    CHECK_STATUS(tddp_reducer_finish(reducer, &interrupted), TDDP_CANCELED);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_INT(reducer->finished, 1);
    /* A rebuild can be continued too. */
    int rebuilt = 0;
    CHECK_STATUS(tddp_reducer_rebuild(reducer, &interrupted, &rebuilt), TDDP_CANCELED);
    CHECK_INT(rebuilt, 0);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 1);
    tddp_cancel_free(cancel);
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(freeing_with_pending_buckets_does_not_wait, 2, 40)
{
    setenv("TDDP_FAKE", "delay_ms=300", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = start_iteration(group);
    int64_t before = tddp_now_ns();
    tddp_reducer_free(reducer);
    CHECK(tddp_now_ns() - before < 200 * TDDP_NS_PER_MS);
    leave(group);
}

MULTI_TEST(an_interrupted_comparison_frees_everything, 2, 40)
{
    setenv("TDDP_FAKE", "delay_ms=300", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t one = 10;
    tddp_param param = vector_param(0, &one, TDDP_FLOAT32);
    tddp_reducer *reducer = NULL;
    const tddp_wait soon = {20, NULL};
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, NULL, &soon, &reducer), TDDP_TIMEOUT);
    leave(group);
}
