/* Iterations of one rank: mark_ready, launching, memory, invalid calls. */
#include <pthread.h>

#include "world.h"

static const size_t backwards[] = {7, 6, 5, 4, 3, 2, 1, 0};

TEST(gradients_are_disjoint_aligned_and_zeroed)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 8, NULL);
    CHECK_INT(tddp_reducer_bucket_count(reducer), 1);
    CHECK_INT(tddp_reducer_bucket_bytes(reducer, 0), 4 * 36);
    CHECK_INT(tddp_reducer_bucket_bytes(reducer, 1), 0);
    for (size_t i = 0; i < 8; i++) {
        CHECK_INT((uintptr_t)tddp_reducer_gradient(reducer, i) % 64, 0);
        CHECK_INT(tddp_reducer_bucket_of(reducer, i), 0);
        for (size_t k = 0; k <= i; k++) {
            CHECK(((float *)tddp_reducer_gradient(reducer, i))[k] == 0.0f);
        }
        fill(reducer, i, 100.0f * (float)i);
    }
    for (size_t i = 0; i < 8; i++) {
        check_filled(reducer, i, 100.0f * (float)i);
    }
    CHECK(tddp_reducer_gradient(reducer, 8) == NULL);
    CHECK(tddp_reducer_bucket_of(reducer, 8) == (size_t)-1);
    tddp_reducer_free(reducer);
    leave(group);
}

/* Calls `body` with every order of 0 .. count - 1. */
static void each_order(size_t *order, size_t fixed, size_t count,
                       void (*body)(const size_t *order, tddp_reducer *reducer),
                       tddp_reducer *reducer)
{
    if (fixed == count) {
        body(order, reducer);
        return;
    }
    for (size_t k = fixed; k < count; k++) {
        size_t first = order[k];
        order[k] = order[fixed];
        order[fixed] = first;
        each_order(order, fixed + 1, count, body, reducer);
        order[fixed] = order[k];
        order[k] = first;
    }
}

/* Buckets of the rebuilt layout: {3} {2} {1 0}. finish launches the last one. */
static void check_launching(const size_t *order, tddp_reducer *reducer)
{
    bool ready[4] = {false};
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t k = 0; k < 4; k++) {
        int all = -1;
        CHECK_OK(tddp_reducer_mark_ready(reducer, order[k], &all));
        ready[order[k]] = true;
        size_t expected = !ready[3] ? 0 : !ready[2] ? 1 : 2;
        CHECK_INT(reducer->launched, expected);
        CHECK_INT(all, k == 3);
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_INT(reducer->launched, 3);
}

TEST(buckets_launch_in_order_for_every_ready_order)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(12, 12);
    tddp_reducer *reducer = make_vectors(group, 4, &opts);
    int rebuilt = 0;
    run_iteration(reducer, backwards + 4, 4, 1.0f);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 1);
    CHECK_INT(tddp_reducer_bucket_count(reducer), 3);
    size_t order[] = {0, 1, 2, 3};
    each_order(order, 0, 4, check_launching, reducer);
    tddp_reducer_free(reducer);
    leave(group);
}

typedef struct marker {
    tddp_reducer *reducer;
    size_t first;
    int last;
} marker;

static void *mark_every_fourth(void *data)
{
    marker *mine = data;
    for (size_t i = mine->first; i < 16; i += 4) {
        int all = 0;
        fill(mine->reducer, i, (float)i);
        CHECK_OK(tddp_reducer_mark_ready(mine->reducer, i, &all));
        mine->last += all;
    }
    return NULL;
}

TEST(several_threads_mark_ready_and_one_gets_all_ready)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(32, 32);
    tddp_reducer *reducer = make_vectors(group, 16, &opts);
    for (int iteration = 0; iteration < 50; iteration++) {
        int rebuilt = 0;
        pthread_t threads[4];
        marker markers[4];
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, iteration == 1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        for (size_t t = 0; t < 4; t++) {
            markers[t] = (marker){reducer, t, 0};
            CHECK_OK(tddp_thread_start(&threads[t], "test", mark_every_fourth, &markers[t]));
        }
        int all = 0;
        for (size_t t = 0; t < 4; t++) {
            pthread_join(threads[t], NULL);
            all += markers[t].last;
        }
        CHECK_INT(all, 1);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        for (size_t i = 0; i < 16; i++) {
            check_filled(reducer, i, (float)i);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(a_rebuild_follows_the_ready_order_and_copies_gradients)
{
    const size_t order[] = {7, 6, 4, 5, 3, 2, 1, 0};
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(50, 60);
    tddp_reducer *reducer = make_vectors(group, 8, &opts);
    int rebuilt = -1;
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 0); /* no iteration is finished yet */
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 0);
    run_iteration(reducer, order, 8, 1.0f);
    tddp_flat_memory *memory = tddp_flat_memory_retain(tddp_reducer_memory(reducer));
    float *before = tddp_reducer_gradient(reducer, 7);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 1);
    /* Bytes 32 28 | 20 24 16 | 12 8 4 */
    const size_t buckets[] = {2, 2, 2, 1, 1, 1, 0, 0};
    const size_t bytes[] = {60, 60, 24};
    CHECK_INT(tddp_reducer_bucket_count(reducer), 3);
    for (size_t i = 0; i < 8; i++) {
        CHECK_INT(tddp_reducer_bucket_of(reducer, i), buckets[i]);
        check_filled(reducer, i, 1.0f + 10.0f * (float)i);
    }
    for (size_t b = 0; b < 3; b++) {
        CHECK_INT(tddp_reducer_bucket_bytes(reducer, b), bytes[b]);
    }
    CHECK(tddp_reducer_gradient(reducer, 7) != before);
    CHECK_DOUBLE(before[0], 71.0, 0); /* the old memory is still held */
    tddp_flat_memory_release(memory);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 0);
    run_iteration(reducer, backwards, 8, 2.0f);
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(memory_outlives_the_reducer)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 2, NULL);
    tddp_flat_memory *memory = tddp_flat_memory_retain(tddp_reducer_memory(reducer));
    float *gradient = tddp_reducer_gradient(reducer, 1);
    fill(reducer, 1, 5.0f);
    tddp_reducer_free(reducer);
    leave(group);
    CHECK_DOUBLE(gradient[0], 5.0, 0);
    CHECK_DOUBLE(gradient[1], 6.0, 0);
    tddp_flat_memory_release(memory);
    tddp_flat_memory_release(NULL);
    tddp_reducer_free(NULL);
}

TEST(parameters_without_a_gradient_are_named)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 16, NULL);
    int all = 0;
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_prepare(reducer)); /* forward twice, no backward: fine */
    CHECK_OK(tddp_reducer_mark_ready(reducer, 1, &all));
    CHECK_INT(all, 0);
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "rank 0: 15 of 16 parameters got no gradient");
    CHECK_CONTAINS(tddp_error_message(), ": \"a\", \"c\", \"d\"");
    CHECK_CONTAINS(tddp_error_message(), "\"j\", \"k\" and 5 more. ");
    CHECK_CONTAINS(tddp_error_message(), "requires_grad");
    for (size_t i = 0; i < 16; i++) {
        if (i != 1 && i != 6) {
            CHECK_OK(tddp_reducer_mark_ready(reducer, i, &all));
        }
    }
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "1 of 16 parameters got no gradient");
    CHECK_CONTAINS(tddp_error_message(), ": \"g\". ");
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(invalid_calls_fail)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 2, NULL);
    int all = 7;
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 0, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"a\" became ready outside an iteration");
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 2, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "parameter number 2: expected 0 to 1");
    CHECK_OK(tddp_reducer_mark_ready(reducer, 1, &all));
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 1, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"b\" was marked ready twice");
    CHECK_INT(all, 0);
    CHECK_OK(tddp_reducer_mark_ready(reducer, 0, &all));
    CHECK_INT(all, 1);
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 0, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"a\" was marked ready twice");
    CHECK_OK(tddp_reducer_prepare(reducer)); /* finishes the interrupted backward */
    CHECK_INT(reducer->finished, 1);
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(integer_parameters_are_refused)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = NULL;
    const int64_t dim = 3;
    tddp_param params[2] = {vector_param(0, &dim, TDDP_FLOAT32), vector_param(1, &dim, TDDP_INT64)};
    CHECK_STATUS(tddp_reducer_create(group, params, 2, NULL, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"b\" (number 1) is int64");
    params[1] = vector_param(1, &dim, TDDP_FLOAT32);
    params[1].device_type = TDDP_CUDA;
    CHECK_STATUS(tddp_reducer_create(group, params, 2, NULL, NULL, &reducer), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "\"b\" (number 1) is on cuda");
    CHECK_STATUS(tddp_reducer_create(group, NULL, 2, NULL, NULL, &reducer), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reducer_create(NULL, params, 1, NULL, NULL, &reducer), TDDP_INVALID_ARGUMENT);
    CHECK(reducer == NULL);
    leave(group);
}

/* As while all are frozen. */
TEST(without_parameters_nothing_is_done)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer;
    CHECK_OK(tddp_reducer_create(group, NULL, 0, NULL, NULL, &reducer));
    CHECK_INT(tddp_reducer_bucket_count(reducer), 0);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tddp_reducer_prepare(reducer));
    }
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(a_destroyed_group_fails_the_iteration)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 1, NULL);
    tddp_group_shutdown(group, 0);
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 0, 1);
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_GROUP_CLOSED);
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_GROUP_CLOSED);
    CHECK_CONTAINS(tddp_error_message(), "the gradients of an earlier step were not averaged");
    tddp_reducer_free(reducer);
    tddp_group_release(group);
}

TEST(failed_allocations_leak_nothing)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t dim = 3;
    tddp_param params[2] = {vector_param(0, &dim, TDDP_FLOAT32),
                            vector_param(1, &dim, TDDP_FLOAT64)};
    tddp_reducer *reducer = NULL;
    tddp_status status = TDDP_OUT_OF_MEMORY;
    long nth = 1;
    for (; status != TDDP_OK && nth < 100; nth++) {
        tddp_fail_allocation(nth);
        status = tddp_reducer_create(group, params, 2, NULL, NULL, &reducer);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
    }
    tddp_fail_allocation(0);
    CHECK(nth > 10 && nth < 100);
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t i = 0; i < 2; i++) {
        int all = 0;
        CHECK_OK(tddp_reducer_mark_ready(reducer, i, &all));
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    /* After a failed allocation the next call continues the rebuild. */
    int rebuilt = 0;
    for (nth = 1; !rebuilt && nth < 100; nth++) {
        tddp_fail_allocation(nth);
        status = tddp_reducer_rebuild(reducer, NULL, &rebuilt);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
    }
    tddp_fail_allocation(0);
    CHECK(nth > 4 && rebuilt);
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(an_iteration_after_the_rebuild_allocates_nothing)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(32, 32);
    tddp_reducer *reducer = make_vectors(group, 8, &opts);
    int rebuilt = 0;
    run_iteration(reducer, backwards, 8, 1.0f);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    tddp_fail_allocation(1);
    run_iteration(reducer, backwards, 8, 2.0f);
    tddp_fail_allocation(0);
    tddp_reducer_free(reducer);
    leave(group);
}
