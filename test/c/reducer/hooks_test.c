/* Communication hooks: their stages in order, on which thread, with what, and what goes wrong. */
#include <stdlib.h>

#include "teller.h"

/* --- stages ---------------------------------------------------------------------------------- */

static void fill_all(tddp_reducer *reducer, size_t count, int rank, int step)
{
    for (size_t i = 0; i < count; i++) {
        fill_with(reducer, i, (float)(rank + step) + (float)i);
    }
}

static void stages(int rank, int world_size, int port)
{
    tddp_group *group = join("fake", rank, world_size, port);
    teller told = {.stages = 3, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &told, 0);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, step == 1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        told.events[0] = '\0';
        for (size_t n = 5; n-- > 0;) {
            mark(reducer, n, n == 0);
        }
        /* Bytes 20 | 16 12 | 8 4 once they are rebuilt. */
        CHECK_TEXT(told.events, step == 0 ? "0.0 " : "0.0 0.1 0.2 ");
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_TEXT(told.events,
                   step == 0 ? "0.0 1.0 2.0 " : "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
        CHECK_INT(told.round, step);
        CHECK_INT(told.layout, step > 0);
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, 2 * (step + (double)i + (world_size - 1) / 2.0));
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(one_rank_goes_through_all_stages, 1, 30)
{
    stages(rank, world_size, port);
}

MULTI_TEST(three_ranks_go_through_all_stages, 3, 40)
{
    stages(rank, world_size, port);
}

MULTI_TEST(a_wait_that_ends_early_goes_on_at_its_stage, 2, 60)
{
    setenv("TDDP_FAKE", "delay_ms=60", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    teller told = {.stages = 3, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &told, 0);
    int early = 0;
    for (int step = 0; step < 2; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        told.events[0] = '\0';
        for (size_t n = 5; n-- > 0;) {
            mark(reducer, n, n == 0);
        }
        const tddp_wait soon = {7, NULL};
        tddp_status status = TDDP_TIMEOUT;
        while (status == TDDP_TIMEOUT) {
            status = tddp_reducer_finish(reducer, &soon);
            early += status == TDDP_TIMEOUT;
        }
        CHECK_OK(status);
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, 2 * (step + (double)i + 0.5));
        }
    }
    CHECK_TEXT(told.events, "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
    CHECK(early > 10);
    tddp_reducer_free(reducer);
    leave(group);
}

/* --- on the caller's thread ------------------------------------------------------------------ */

static void *mark_all(void *data)
{
    for (size_t n = 5; n-- > 0;) {
        mark(data, n, n == 0);
    }
    return NULL;
}

/* The host's code was interrupted: backward goes on, and what comes next goes on with that stage,
 * before any later bucket. The other rank sees nothing of it. */
static void interrupt_at(tddp_group *group, int stage, int interrupts, const char *expected)
{
    int rank = tddp_group_rank(group);
    teller told = {.stages = 3, .fail_at = -1, .interrupt_at = stage, .interrupts = 0};
    tddp_reducer *reducer = make_hooked(group, 5, &told, 1);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        told.events[0] = '\0';
        told.interrupts = rank == 0 && step == 1 ? interrupts : 0;
        for (size_t n = 5; n-- > 0;) {
            int all = 0;
            mark(reducer, n, n == 0);
            CHECK_OK(tddp_reducer_hand_over(reducer, &all));
        }
        while (told.interrupts > 0) {
            CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_CANCELED);
            CHECK_CONTAINS(tddp_error_message(), "interrupted at stage");
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_TEXT(told.events, step == 0                ? "0.0 1.0 2.0 "
                                : rank == 0 && step == 1 ? expected
                                                         : "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, 2 * (step + (double)i + 0.5));
        }
    }
    tddp_reducer_free(reducer);
}

MULTI_TEST(an_interrupted_hook_goes_on_where_it_was, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    interrupt_at(group, 0, 7, "0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
    interrupt_at(group, 1, 2, "0.0 0.1 0.2 1.0 1.0 1.0 1.1 1.2 2.0 2.1 2.2 ");
    leave(group);
}

MULTI_TEST(a_hook_of_the_caller_runs_on_its_thread_only, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    teller told = {.stages = 2, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &told, 1);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        pthread_t other;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        told.events[0] = '\0';
        CHECK_OK(tddp_thread_start(&other, "test", mark_all, reducer));
        pthread_join(other, NULL);
        CHECK_TEXT(told.events, "");
        int all = 7;
        if (step < 2) { /* else finish does it */
            CHECK_OK(tddp_reducer_hand_over(reducer, &all));
            CHECK_INT(all, 1);
            CHECK_OK(tddp_reducer_hand_over(reducer, &all));
            CHECK_TEXT(told.events, step == 0 ? "0.0 " : "0.0 0.1 0.2 ");
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_TEXT(told.events, step == 0 ? "0.0 1.0 " : "0.0 0.1 0.2 1.0 1.1 1.2 ");
        CHECK(pthread_equal(told.thread, pthread_self()));
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, step + (double)i + 0.5);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(buckets_are_handed_over_as_they_are_complete_and_without_the_lock)
{
    tddp_group *group = join("fake", rank, world_size, port);
    teller told = {.stages = 2, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &told, 1);
    int all = 7;
    run_round(reducer, (const size_t[]){4, 3, 2, 1, 0}, 5, 1);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &all));
    CHECK_OK(tddp_reducer_hand_over(reducer, &all)); /* outside a round: nothing to do */
    CHECK_INT(all, 0);
    CHECK_OK(tddp_reducer_prepare(reducer));
    told.events[0] = '\0';
    told.reducer = reducer;
    told.inner = 2;
    mark(reducer, 3, 0);
    CHECK_OK(tddp_reducer_hand_over(reducer, &all));
    CHECK_TEXT(told.events, "");
    mark(reducer, 4, 0);
    CHECK_OK(tddp_reducer_hand_over(reducer, &all)); /* bucket 0, which completes bucket 1 */
    CHECK_TEXT(told.events, "0.0 0.1 ");
    CHECK_INT(all, 0);
    mark(reducer, 1, 0);
    mark(reducer, 0, 1);
    CHECK_OK(tddp_reducer_prepare(reducer)); /* backward was left: it is finished here */
    CHECK_TEXT(told.events, "0.0 0.1 0.2 1.0 1.1 1.2 ");
    CHECK_INT(tddp_reducer_rounds(reducer), 2);
    tddp_reducer_free(reducer);
    leave(group);
}

/* --- what a hook is given -------------------------------------------------------------------- */

static tddp_status look(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                        tddp_work **work, int *again)
{
    (void)group;
    (void)work;
    (void)again;
    CHECK_INT(stage, 0);
    CHECK_INT(bucket->index, *(size_t *)state);
    CHECK_INT(bucket->count, 2);
    *(size_t *)state += 1;
    if (bucket->index == 1) {
        CHECK_INT(bucket->gradient_count, 1);
        CHECK_INT(bucket->gradients[0].param, 0);
        return TDDP_OK;
    }
    CHECK_INT(bucket->gradient_count, 2);
    CHECK_INT(bucket->buffer.dtype, TDDP_FLOAT64);
    CHECK_INT(bucket->buffer.count, 16 + 8); /* each padded to 64 bytes */
    CHECK_INT(bucket->gradients[0].param, 1);
    CHECK_INT(bucket->gradients[0].offset, 0);
    CHECK_INT(bucket->gradients[0].count, 10);
    CHECK_INT(bucket->gradients[0].ndim, 1);
    CHECK_INT(bucket->gradients[0].dims[0], 5);
    CHECK_INT(bucket->gradients[1].param, 2);
    CHECK_INT(bucket->gradients[1].offset, 16);
    CHECK_INT(bucket->gradients[1].count, 6);
    return TDDP_OK;
}

TEST(a_bucket_shows_its_gradients)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t dims[] = {7, 5, 3};
    tddp_param params[3] = {vector_param(0, &dims[0], TDDP_FLOAT32),
                            vector_param(1, &dims[1], TDDP_COMPLEX128),
                            vector_param(2, &dims[2], TDDP_COMPLEX128)};
    const tddp_comm_hook_ops ops = {sizeof ops, "look", 0, look, NULL, NULL, 0};
    tddp_comm_hook *hook = NULL;
    tddp_reducer *reducer = NULL;
    size_t looked = 0;
    CHECK_OK(tddp_comm_hook_make(&ops, &looked, &hook));
    CHECK_OK(tddp_reducer_create(group, params, 3, NULL, NULL, &reducer));
    CHECK_OK(tddp_reducer_set_hook(reducer, hook));
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t i = 0; i < 3; i++) {
        mark(reducer, i, i == 2);
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_INT(looked, 2);
    tddp_reducer_free(reducer);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(a_round_with_a_hook_allocates_nothing_of_its_own)
{
    tddp_group *group = join("fake", rank, world_size, port);
    teller told = {.stages = 2, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 3, &told, 0);
    int rebuilt = 0;
    run_round(reducer, (const size_t[]){2, 1, 0}, 3, 1);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    told.quiet = true;
    tddp_fail_allocation(1);
    run_round(reducer, (const size_t[]){2, 1, 0}, 3, 1);
    tddp_fail_allocation(0);
    tddp_reducer_free(reducer);
    leave(group);
}
