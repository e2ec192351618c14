/* Joined ranks: they run out of data one after the other, and shadow the other ranks. */
#include <stdlib.h>

#include "recording_hook.h"

enum { COUNT = 5 };

typedef struct join_mode {
    int find_unused;
    int static_graph;
    int skip_unused;
    bool by_active; /* divide by the number of ranks with data */
    int on_caller;  /* -1: no hook */
} join_mode;

/* Steps with data: the last rank has the most, rank 0 has `least`. */
static int steps_of(int rank, int least)
{
    return least + rank;
}

static bool uses(const join_mode *mode, size_t param)
{
    return param != 3 || !(mode->find_unused || mode->static_graph);
}

static float gradient_of(int rank, int step, size_t param)
{
    return (float)(rank * rank + step) + (float)param;
}

static void run_with_data(tddp_reducer *reducer, const join_mode *mode, int rank, int step,
                          bool counting)
{
    const size_t unused[] = {3};
    if (mode->find_unused) {
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
    }
    for (size_t n = COUNT; n-- > 0;) {
        fill_with(reducer, n, uses(mode, n) ? gradient_of(rank, step, n) : 0);
    }
    for (size_t n = COUNT; n-- > 0;) {
        if (uses(mode, n)) {
            mark(reducer, n, n == 0 && !counting);
        }
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
}

static void check_step(tddp_reducer *reducer, const join_mode *mode, int world_size, int step,
                       int least)
{
    int active = 0;
    for (int r = 0; r < world_size; r++) {
        active += step < steps_of(r, least);
    }
    for (size_t i = 0; i < COUNT; i++) {
        double sum = 0;
        for (int r = 0; r < world_size; r++) {
            sum += step < steps_of(r, least) ? gradient_of(r, step, i) : 0;
        }
        check_all(reducer, i, uses(mode, i) ? sum / (mode->by_active ? active : world_size) : 0);
        CHECK_INT(tddp_reducer_used(reducer, i), uses(mode, i));
    }
}

static void join_epoch(tddp_reducer *reducer, int rank, int world_size, const join_mode *mode,
                       int least)
{
    for (int step = 0; step < steps_of(world_size - 1, least); step++) {
        uint64_t iterations = tddp_reducer_rounds(reducer);
        size_t first = 0;
        bool seen = tddp_reducer_order(reducer, &first, 1) > 0;
        int active = 0;
        int rebuilt = 7;
        for (int r = 0; r < world_size; r++) {
            active += step < steps_of(r, least);
        }
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, iterations == 1 && !mode->find_unused);
        if (mode->by_active) {
            CHECK_OK(tddp_reducer_set_divisor(reducer, active));
        }
        CHECK_OK(tddp_reducer_prepare(reducer));
        if (step < steps_of(rank, least)) {
            run_with_data(reducer, mode, rank, step, mode->static_graph && !seen);
        } else {
            CHECK_OK(tddp_reducer_shadow(reducer, NULL));
        }
        check_step(reducer, mode, world_size, step, least);
        CHECK_INT(tddp_reducer_rounds(reducer), iterations + 1);
    }
}

static void join_unevenly(int rank, int world_size, int port, const join_mode *mode, int least)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(12, 24);
    recording_hook recorder = {.stages = 2, .fail_at = -1, .world_size = world_size};
    opts.find_unused = mode->find_unused;
    opts.static_graph = mode->static_graph;
    opts.skip_unused = mode->skip_unused;
    tddp_reducer *reducer = make_vectors(group, COUNT, &opts);
    if (mode->on_caller >= 0) {
        tddp_comm_hook *hook = make_hook(&recorder, "recording", mode->on_caller);
        CHECK_OK(tddp_reducer_set_hook(reducer, hook));
        tddp_comm_hook_release(hook);
    }
    /* In the second epoch all ranks have one step more, so joined ranks have data again. */
    join_epoch(reducer, rank, world_size, mode, least);
    size_t order[COUNT];
    CHECK_INT(tddp_reducer_order(reducer, order, COUNT), steps_of(rank, least) > 0 ? COUNT : 0);
    join_epoch(reducer, rank, world_size, mode, least + 1);
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(sums_are_divided_by_the_world_size, 3, 40)
{
    const join_mode mode = {.on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 1);
}

MULTI_TEST(sums_are_divided_by_the_ranks_with_data, 4, 60)
{
    const join_mode mode = {.by_active = true, .on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 1);
}

MULTI_TEST(rank_0_may_have_no_data, 2, 30)
{
    const join_mode mode = {.on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 0);
}

MULTI_TEST(joined_ranks_use_no_parameter, 3, 40)
{
    const join_mode mode = {.find_unused = 1, .by_active = true, .on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 1);
}

MULTI_TEST(joined_ranks_skip_the_same_buckets, 3, 40)
{
    const join_mode mode = {.find_unused = 1, .skip_unused = 1, .on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 1);
}

MULTI_TEST(joined_ranks_with_a_static_graph, 2, 40)
{
    const join_mode mode = {.static_graph = 1, .skip_unused = 1, .on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 1);
}

MULTI_TEST(joined_from_the_first_iteration_of_a_static_graph, 2, 40)
{
    const join_mode mode = {.static_graph = 1, .on_caller = -1};
    join_unevenly(rank, world_size, port, &mode, 0);
}

MULTI_TEST(joined_ranks_run_all_stages_of_a_hook, 3, 40)
{
    const join_mode mode = {.on_caller = 0};
    join_unevenly(rank, world_size, port, &mode, 1);
}

MULTI_TEST(joined_ranks_run_on_caller_hooks, 2, 40)
{
    const join_mode mode = {.on_caller = 1, .find_unused = 1, .skip_unused = 1};
    join_unevenly(rank, world_size, port, &mode, 0);
}

MULTI_TEST(a_joined_ranks_wait_that_ends_early_is_continued, 2, 60)
{
    setenv("TDDP_FAKE", "delay_ms=150", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(1, 1);
    opts.find_unused = opts.skip_unused = 1;
    tddp_reducer *reducer = make_vectors(group, 2, &opts);
    const size_t unused[] = {0};
    const tddp_wait soon = {20, NULL};
    for (int iteration = 0; iteration < 3; iteration++) {
        CHECK_OK(tddp_reducer_prepare(reducer)); /* finishes the previous iteration */
        if (rank == 0) {
            fill_with(reducer, 1, 6);
            CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
            mark(reducer, 1, 1);
            CHECK_OK(tddp_reducer_finish(reducer, NULL));
        } else {
            CHECK_STATUS(tddp_reducer_shadow(reducer, &soon), TDDP_TIMEOUT);
            CHECK_STATUS(tddp_reducer_finish(reducer, &soon), TDDP_TIMEOUT);
        }
        if (rank == 1 && iteration == 1) {
            CHECK_OK(tddp_reducer_shadow(reducer, NULL));
        } else if (rank == 1 && iteration == 2) {
            CHECK_OK(tddp_reducer_finish(reducer, NULL));
        }
        if (rank == 0 || iteration > 0) {
            check_all(reducer, 1, 3);
            CHECK_INT(tddp_reducer_used(reducer, 0), 0);
            CHECK_INT(tddp_reducer_rounds(reducer), iteration + 1);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(invalid_joins_fail, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 2, NULL);
    recording_hook recorder = {.stages = 1, .fail_at = -1};
    CHECK_STATUS(tddp_reducer_set_divisor(reducer, 0), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reducer_set_divisor(reducer, 3), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "divided by 3: expected 1 to 2");
    CHECK_OK(tddp_reducer_set_divisor(reducer, 1));
    tddp_comm_hook *hook = make_hook(&recorder, "recording", 0);
    CHECK_STATUS(tddp_reducer_set_hook(reducer, hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "divided by 1 of 2 ranks");
    tddp_comm_hook_release(hook);
    CHECK_STATUS(tddp_reducer_shadow(reducer, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "outside an iteration");
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 0, 0);
    CHECK_STATUS(tddp_reducer_shadow(reducer, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "ready already");
    tddp_reducer_free(reducer);
    leave(group);
}
