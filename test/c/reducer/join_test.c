/* Ranks that run out of data one after the other: they shadow the rounds of those that have some.
 */
#include <stdlib.h>

#include "teller.h"

enum { COUNT = 5 };

typedef struct form {
    int find_unused;
    int static_graph;
    int skip_unused;
    bool by_active; /* divide by the ranks that have data */
    int on_caller;  /* -1: no hook */
} form;

/* Steps with data: the last rank has the most, rank 0 has `least`. */
static int steps_of(int rank, int least)
{
    return least + rank;
}

static bool uses(const form *how, size_t param)
{
    return param != 3 || !(how->find_unused || how->static_graph);
}

static float gradient_of(int rank, int step, size_t param)
{
    return (float)(rank * rank + step) + (float)param;
}

static void work_on(tddp_reducer *reducer, const form *how, int rank, int step, bool counting)
{
    const size_t unused[] = {3};
    if (how->find_unused) {
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
    }
    for (size_t n = COUNT; n-- > 0;) {
        fill_with(reducer, n, uses(how, n) ? gradient_of(rank, step, n) : 0);
    }
    for (size_t n = COUNT; n-- > 0;) {
        if (uses(how, n)) {
            mark(reducer, n, n == 0 && !counting);
        }
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
}

static void check_step(tddp_reducer *reducer, const form *how, int world_size, int step, int least)
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
        check_all(reducer, i, uses(how, i) ? sum / (how->by_active ? active : world_size) : 0);
        CHECK_INT(tddp_reducer_used(reducer, i), uses(how, i));
    }
}

static void join_epoch(tddp_reducer *reducer, int rank, int world_size, const form *how, int least)
{
    for (int step = 0; step < steps_of(world_size - 1, least); step++) {
        uint64_t rounds = tddp_reducer_rounds(reducer);
        size_t told = 0;
        bool seen = tddp_reducer_order(reducer, &told, 1) > 0;
        int active = 0;
        int rebuilt = 7;
        for (int r = 0; r < world_size; r++) {
            active += step < steps_of(r, least);
        }
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, rounds == 1 && !how->find_unused);
        if (how->by_active) {
            CHECK_OK(tddp_reducer_set_divisor(reducer, active));
        }
        CHECK_OK(tddp_reducer_prepare(reducer));
        if (step < steps_of(rank, least)) {
            work_on(reducer, how, rank, step, how->static_graph && !seen);
        } else {
            CHECK_OK(tddp_reducer_shadow(reducer, NULL));
        }
        check_step(reducer, how, world_size, step, least);
        CHECK_INT(tddp_reducer_rounds(reducer), rounds + 1);
    }
}

static void join_unevenly(int rank, int world_size, int port, const form *how, int least)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(12, 24);
    teller told = {.stages = 2, .fail_at = -1, .world_size = world_size};
    opts.find_unused = how->find_unused;
    opts.static_graph = how->static_graph;
    opts.skip_unused = how->skip_unused;
    tddp_reducer *reducer = make_vectors(group, COUNT, &opts);
    if (how->on_caller >= 0) {
        tddp_comm_hook *hook = make_hook(&told, "teller", how->on_caller);
        CHECK_OK(tddp_reducer_set_hook(reducer, hook));
        tddp_comm_hook_release(hook);
    }
    /* The second time all have one step more, and those who shadowed have data again. */
    join_epoch(reducer, rank, world_size, how, least);
    size_t order[COUNT];
    CHECK_INT(tddp_reducer_order(reducer, order, COUNT), steps_of(rank, least) > 0 ? COUNT : 0);
    join_epoch(reducer, rank, world_size, how, least + 1);
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(sums_are_divided_by_the_world, 3, 40)
{
    const form how = {.on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 1);
}

MULTI_TEST(sums_are_divided_by_the_ranks_with_data, 4, 60)
{
    const form how = {.by_active = true, .on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 1);
}

MULTI_TEST(rank_0_may_have_no_data_at_all, 2, 30)
{
    const form how = {.on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 0);
}

MULTI_TEST(shadows_use_nothing, 3, 40)
{
    const form how = {.find_unused = 1, .by_active = true, .on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 1);
}

MULTI_TEST(shadows_agree_on_what_is_skipped, 3, 40)
{
    const form how = {.find_unused = 1, .skip_unused = 1, .on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 1);
}

MULTI_TEST(shadows_of_static_graphs, 2, 40)
{
    const form how = {.static_graph = 1, .skip_unused = 1, .on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 1);
}

MULTI_TEST(a_shadow_from_the_first_round_of_a_static_graph_on, 2, 40)
{
    const form how = {.static_graph = 1, .on_caller = -1};
    join_unevenly(rank, world_size, port, &how, 0);
}

MULTI_TEST(shadows_go_through_all_stages_of_a_hook, 3, 40)
{
    const form how = {.on_caller = 0};
    join_unevenly(rank, world_size, port, &how, 1);
}

MULTI_TEST(shadows_run_hooks_of_the_caller, 2, 40)
{
    const form how = {.on_caller = 1, .find_unused = 1, .skip_unused = 1};
    join_unevenly(rank, world_size, port, &how, 0);
}

MULTI_TEST(a_shadow_whose_wait_ends_early_is_taken_up_again, 2, 60)
{
    setenv("TDDP_FAKE", "delay_ms=150", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(1, 1);
    opts.find_unused = opts.skip_unused = 1;
    tddp_reducer *reducer = make_vectors(group, 2, &opts);
    const size_t unused[] = {0};
    const tddp_wait soon = {20, NULL};
    for (int round = 0; round < 3; round++) {
        CHECK_OK(tddp_reducer_prepare(reducer)); /* the second time this finishes what was left */
        if (rank == 0) {
            fill_with(reducer, 1, 6);
            CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
            mark(reducer, 1, 1);
            CHECK_OK(tddp_reducer_finish(reducer, NULL));
        } else {
            CHECK_STATUS(tddp_reducer_shadow(reducer, &soon), TDDP_TIMEOUT);
            CHECK_STATUS(tddp_reducer_finish(reducer, &soon), TDDP_TIMEOUT);
        }
        if (rank == 1 && round == 1) {
            CHECK_OK(tddp_reducer_shadow(reducer, NULL));
        } else if (rank == 1 && round == 2) {
            CHECK_OK(tddp_reducer_finish(reducer, NULL));
        }
        if (rank == 0 || round > 0) {
            check_all(reducer, 1, 3);
            CHECK_INT(tddp_reducer_used(reducer, 0), 0);
            CHECK_INT(tddp_reducer_rounds(reducer), round + 1);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(mistakes_of_a_join_are_refused, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 2, NULL);
    teller told = {.stages = 1, .fail_at = -1};
    CHECK_STATUS(tddp_reducer_set_divisor(reducer, 0), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reducer_set_divisor(reducer, 3), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "divided by 3: expected 1 to 2");
    CHECK_OK(tddp_reducer_set_divisor(reducer, 1));
    tddp_comm_hook *hook = make_hook(&told, "teller", 0);
    CHECK_STATUS(tddp_reducer_set_hook(reducer, hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "divided by 1 of 2 ranks");
    tddp_comm_hook_release(hook);
    CHECK_STATUS(tddp_reducer_shadow(reducer, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "outside a round");
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 0, 0);
    CHECK_STATUS(tddp_reducer_shadow(reducer, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "ready already");
    tddp_reducer_free(reducer);
    leave(group);
}
