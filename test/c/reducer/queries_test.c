/* Getters, and parameters with sparse gradients. */
#include <stdlib.h>

#include <tddp/backend.h>

#include "world.h"

TEST(buckets_list_their_parameters_and_the_ready_order_is_kept)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(12, 24);
    tddp_reducer *reducer = make_vectors(group, 5, &opts);
    const size_t order[] = {4, 2, 3, 0, 1};
    size_t found[5] = {9, 9, 9, 9, 9};
    int rebuilt = 0;
    CHECK_INT(tddp_reducer_order(reducer, found, 5), 0);
    CHECK_INT(tddp_reducer_bucket_params(reducer, 0, found, 5), 5);
    for (size_t i = 0; i < 5; i++) {
        CHECK_INT(found[i], i);
    }
    run_iteration(reducer, order, 5, 1);
    CHECK_INT(tddp_reducer_rebuilt(reducer), 0);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(tddp_reducer_rebuilt(reducer), 1);
    CHECK_OK(tddp_reducer_prepare(reducer)); /* the order is the previous iteration's */
    CHECK_INT(tddp_reducer_order(reducer, found, 5), 5);
    CHECK(memcmp(found, order, sizeof order) == 0);
    /* Bytes 20 | 12 16 | 4 8 */
    found[2] = 77;
    CHECK_INT(tddp_reducer_bucket_params(reducer, 0, found, 5), 1);
    CHECK_INT(found[0], 4);
    CHECK_INT(tddp_reducer_bucket_params(reducer, 1, found, 5), 2);
    CHECK_INT(found[0], 2);
    CHECK_INT(found[1], 3);
    CHECK_INT(tddp_reducer_bucket_params(reducer, 2, found, 1), 2); /* room for one */
    CHECK_INT(found[0], 0);
    CHECK_INT(found[1], 3);
    CHECK_INT(found[2], 77);
    CHECK_INT(tddp_reducer_bucket_params(reducer, 3, found, 5), 0);
    CHECK_INT(tddp_reducer_order(reducer, NULL, 0), 5);
    CHECK_INT(tddp_reducer_used(reducer, 0), 1);
    CHECK_INT(tddp_reducer_used(reducer, 99), 1);
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(times_of_an_iteration_increase, 2, 30)
{
    const tddp_backend_v1 *gloo; /* over shared memory buckets may wait for the last */
    if (tddp_backend_find("gloo", &gloo)) {
        check_skip(tddp_error_message());
    }
    setenv("TDDP_FAKE", "over=gloo", 1);
    setenv("TDDP_SHM", "0", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(12, 24);
    tddp_reducer *reducer = make_vectors(group, 4, &opts);
    tddp_reducer_times times;
    tddp_reducer_times_of(reducer, &times);
    CHECK(times.iterations == 0 && times.prepared_ns == 0 && times.finished_ns == 0);
    int64_t last = tddp_now_ns();
    for (uint64_t iteration = 1; iteration <= 3; iteration++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        run_iteration(reducer, (const size_t[]){3, 2, 1, 0}, 4, 1);
        tddp_reducer_times_of(reducer, &times);
        CHECK_INT(times.iterations, iteration);
        CHECK(times.prepared_ns >= last);
        CHECK(times.first_ready_ns >= times.prepared_ns);
        CHECK(times.first_launch_ns >= times.first_ready_ns);
        CHECK(times.last_ready_ns >= times.first_ready_ns);
        /* After the rebuild the first bucket is launched before the last gradient is ready. */
        CHECK(iteration == 1 ? times.first_launch_ns >= times.last_ready_ns
                             : times.first_launch_ns <= times.last_ready_ns);
        CHECK(times.finished_ns >= times.last_ready_ns);
        last = times.finished_ns;
    }
    CHECK_OK(tddp_reducer_prepare(reducer)); /* the times are still the finished iteration's */
    tddp_reducer_times now;
    tddp_reducer_times_of(reducer, &now);
    CHECK(memcmp(&now, &times, sizeof now) == 0);
    CHECK_OK(tddp_reducer_shadow(reducer, NULL));
    tddp_reducer_times_of(reducer, &now);
    CHECK_INT(now.iterations, 4);
    CHECK_INT(now.first_ready_ns, 0);
    CHECK(now.first_launch_ns >= now.prepared_ns && now.finished_ns >= now.first_launch_ns);
    tddp_reducer_free(reducer);
    leave(group);
}

/* --- sparse ---------------------------------------------------------------------------------- */

/* Vectors of 1, 2, ... elements; `sparse` is a bit set of the sparse ones. */
static tddp_reducer *make_partly_sparse(tddp_group *group, size_t count, unsigned sparse,
                                        const tddp_reducer_opts *opts)
{
    int64_t dims[16];
    tddp_param params[16];
    tddp_reducer *reducer = NULL;
    for (size_t i = 0; i < count; i++) {
        dims[i] = (int64_t)i + 1;
        params[i] = vector_param(i, &dims[i], TDDP_FLOAT32);
        params[i].sparse = sparse >> i & 1;
    }
    CHECK_OK(tddp_reducer_create(group, params, count, opts, NULL, &reducer));
    return reducer;
}

static void sparse_rounds(int rank, int world_size, int port, unsigned sparse, bool find_unused)
{
    const size_t order[] = {1, 3, 4, 2, 0};
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(12, 24);
    opts.find_unused = find_unused;
    tddp_reducer *reducer = make_partly_sparse(group, 5, sparse, &opts);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, step == 1 && !find_unused);
        CHECK_OK(tddp_reducer_prepare(reducer));
        if (find_unused) { /* number 1, on rank 1 */
            CHECK_OK(tddp_reducer_set_unused(reducer, order, (size_t)rank, NULL));
        }
        for (size_t n = 0; n < 5; n++) {
            if (!(sparse >> n & 1)) {
                fill_with(reducer, n, (float)(rank + step) + (float)n);
            }
        }
        for (size_t n = find_unused ? (size_t)rank : 0; n < 5; n++) {
            mark(reducer, order[n], n == 4);
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        for (size_t i = 0; i < 5; i++) {
            bool here = sparse >> i & 1;
            CHECK((tddp_reducer_gradient(reducer, i) == NULL) == here);
            CHECK((tddp_reducer_bucket_of(reducer, i) == (size_t)-1) == here);
            CHECK_INT(tddp_reducer_used(reducer, i), 1);
            if (!here) {
                check_all(reducer, i, step + (double)i + (world_size - 1) / 2.0);
            }
        }
        size_t found[5];
        CHECK_INT(tddp_reducer_order(reducer, found, 5), 5);
        CHECK_INT(found[4], 0);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(sparse_parameters_are_in_no_bucket, 2, 30)
{
    sparse_rounds(rank, world_size, port, 1u << 1 | 1u << 2, false);
}

MULTI_TEST(a_sparse_parameter_may_be_the_last, 2, 30)
{
    sparse_rounds(rank, world_size, port, 1u << 0, false);
}

MULTI_TEST(a_model_may_be_all_sparse, 2, 30)
{
    sparse_rounds(rank, world_size, port, 0x1f, false);
}

MULTI_TEST(a_sparse_parameter_may_be_unused, 2, 30)
{
    sparse_rounds(rank, world_size, port, 1u << 1 | 1u << 4, true);
}

MULTI_TEST(a_sparse_gradient_on_one_rank_is_a_mismatch, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t dims[] = {10, 4};
    tddp_reducer *reducer = NULL;
    tddp_param param = {"table", 40, TDDP_FLOAT32, TDDP_CPU, 0, dims, 2, rank};
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, NULL, NULL, &reducer), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(),
                   "parameter \"table\" (number 0) is float32 [10, 4] on rank "
                   "0, but sparse float32 [10, 4] on rank 1");
    leave(group);
}
