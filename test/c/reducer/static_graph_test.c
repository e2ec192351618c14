/* Static graphs: the first iteration records the counts, and later ones must match them. */
#include <stdlib.h>

#include "world.h"

static tddp_reducer *make_static(tddp_group *group, size_t count, int skip)
{
    tddp_reducer_opts opts = buckets_of(12, 24);
    opts.static_graph = 1;
    opts.skip_unused = skip;
    return make_vectors(group, count, &opts);
}

/* Calls of an iteration: 5 once, 3 three times, 1 twice; 4 only on rank 0; 0 and 2 never. */
static const size_t calls[] = {5, 3, 1, 3, 4, 3, 1};
enum { COUNT = 6, CALLS = sizeof calls / sizeof *calls };

static bool calls_it(int rank, size_t param)
{
    return param == 5 || param == 3 || param == 1 || (param == 4 && rank == 0);
}

static void check_averages(tddp_reducer *reducer, int world_size, float step)
{
    for (size_t i = 0; i < COUNT; i++) {
        double sum = 0;
        for (int r = 0; r < world_size; r++) {
            sum += calls_it(r, i) ? (double)(step + (float)r + (float)i) : 0;
        }
        check_all(reducer, i, sum / world_size);
        CHECK_INT(tddp_reducer_used(reducer, i), i != 0 && i != 2);
    }
}

static void run_step(tddp_reducer *reducer, int rank, int world_size, int step, bool first)
{
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t i = 0; i < COUNT; i++) {
        fill_with(reducer, i, calls_it(rank, i) ? (float)(step + rank) + (float)i : 0);
    }
    for (size_t n = 0; n < CALLS; n++) {
        if (calls[n] != 4 || rank == 0) {
            mark(reducer, calls[n], !first && n + 1 == CALLS);
            CHECK(!first || reducer->launched == 0);
        }
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    check_averages(reducer, world_size, (float)step);
}

static void steps(int rank, int world_size, int port, int skip)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_static(group, COUNT, skip);
    size_t order[COUNT + 1] = {0};
    CHECK_INT(tddp_reducer_bucket_count(reducer), 1);
    CHECK_INT(tddp_reducer_order(reducer, order, COUNT), 0);
    for (int step = 0; step < 4; step++) {
        int rebuilt = 7;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, step == 1);
        run_step(reducer, rank, world_size, step, step == 0);
        if (step == 0 && rank == 0) { /* by the last call, then those without, last one first */
            const size_t expected[] = {5, 4, 3, 1, 2, 0};
            CHECK_INT(tddp_reducer_order(reducer, order, COUNT), COUNT);
            CHECK(memcmp(order, expected, sizeof expected) == 0);
        }
    }
    /* Bytes 24 | 20 16 | 8 12 4: in the order of rank 0. */
    const size_t buckets[] = {2, 2, 2, 1, 1, 0};
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(tddp_reducer_bucket_of(reducer, i), buckets[i]);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(one_rank_with_a_static_graph, 1, 30)
{
    steps(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks_with_a_static_graph, 2, 30)
{
    steps(rank, world_size, port, 0);
}

MULTI_TEST(four_ranks_with_a_static_graph_skip_unused_buckets, 4, 60)
{
    steps(rank, world_size, port, 1);
}

MULTI_TEST(buckets_that_no_rank_uses_are_skipped, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_static(group, 6, 1);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        for (size_t i = 0; i < 6; i++) {
            fill_with(reducer, i, (float)rank);
        }
        /* 3 4 5 never. After the rebuild bytes are 12 | 8 4 24 | 20 16: a bucket of 4 and 3. */
        mark(reducer, 2, 0);
        mark(reducer, 1, 0);
        mark(reducer, 0, step > 0);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        for (size_t i = 0; i < 6; i++) {
            check_all(reducer, i, step > 0 && (i == 3 || i == 4) ? rank : 0.5);
            CHECK_INT(tddp_reducer_used(reducer, i), i < 3);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

/* Rank 1's loss never depends on the model. */
MULTI_TEST(a_rank_without_mark_ready_participates, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_static(group, 3, 0);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        CHECK_OK(tddp_reducer_set_unused(reducer, NULL, 0, NULL)); /* allowed, has no effect */
        for (size_t i = 0; i < 3; i++) {
            fill_with(reducer, i, rank == 0 ? 3.0f : 0.0f);
        }
        for (size_t i = 0; i < 3 && rank == 0; i++) {
            mark(reducer, i, step > 0 && i == 2);
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        for (size_t i = 0; i < 3; i++) {
            check_all(reducer, i, 1.5);
            CHECK_INT(tddp_reducer_used(reducer, i), 1);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

static tddp_reducer *after_first_iteration(tddp_group *group)
{
    tddp_reducer *reducer = make_static(group, 3, 0);
    int rebuilt = 0;
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 1, 0);
    mark(reducer, 2, 0);
    mark(reducer, 1, 0);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, 1);
    CHECK_OK(tddp_reducer_prepare(reducer));
    return reducer;
}

TEST(more_calls_than_in_the_first_iteration_fail)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = after_first_iteration(group);
    int all = 7;
    mark(reducer, 2, 0);
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 2, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 0: static_graph is set, but the graph has changed: \"c\" got 2 "
                   "gradients in this backward, and 1 in the first one");
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 0, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"a\" got 1 gradients in this backward, and 0 in the");
    CHECK_INT(all, 7);
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(fewer_calls_than_in_the_first_iteration_fail)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = after_first_iteration(group);
    mark(reducer, 1, 0);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 0: static_graph is set, but the graph has changed: 2 of 3 "
                   "parameters got fewer gradients in the previous backward than in the first one, "
                   "\"b\" got 1 instead of 2");
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(an_unfinished_first_iteration_fails_the_next)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_static(group, 2, 0);
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 1, 0);
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "first backward with static_graph was not completed");
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_OK(tddp_reducer_prepare(reducer));
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(a_first_iteration_whose_wait_ends_early_is_continued, 2, 40)
{
    setenv("TDDP_FAKE", "delay_ms=200", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_static(group, 2, 0);
    const tddp_wait soon = {20, NULL};
    CHECK_OK(tddp_reducer_prepare(reducer));
    fill_with(reducer, 0, (float)rank);
    mark(reducer, 0, 0);
    CHECK_STATUS(tddp_reducer_finish(reducer, &soon), TDDP_TIMEOUT);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_INT(tddp_reducer_rounds(reducer), 1);
    CHECK_INT(tddp_reducer_used(reducer, 1), 0);
    check_all(reducer, 0, 0.5);
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(a_later_iteration_with_a_static_graph_allocates_nothing)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = after_first_iteration(group);
    tddp_fail_allocation(1);
    for (int iteration = 0; iteration < 2; iteration++) {
        CHECK_OK(tddp_reducer_prepare(reducer));
        mark(reducer, 1, 0);
        mark(reducer, 1, 0);
        mark(reducer, 2, 1);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
    }
    tddp_fail_allocation(0);
    tddp_reducer_free(reducer);
    leave(group);
}

/* Including the allocations of unused parameters and static graphs. */
TEST(failed_allocations_leak_nothing)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t dim = 3;
    tddp_param param = vector_param(0, &dim, TDDP_FLOAT32);
    for (int which = 0; which < 2; which++) {
        tddp_reducer_opts opts = buckets_of(12, 24);
        tddp_reducer *reducer = NULL;
        tddp_status status = TDDP_OUT_OF_MEMORY;
        long nth = 1;
        opts.static_graph = which;
        opts.find_unused = !which;
        for (; status != TDDP_OK && nth < 100; nth++) {
            tddp_fail_allocation(nth);
            status = tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer);
            CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
        }
        tddp_fail_allocation(0);
        CHECK(nth > 12 && nth < 100);
        tddp_reducer_free(reducer);
    }
    leave(group);
}
