/* Communication hooks: the order of their stages, their thread, and their arguments. */
#include <stdlib.h>

#include "recording_hook.h"

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
    recording_hook recorder = {.stages = 3, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &recorder, 0);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, step == 1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        recorder.events[0] = '\0';
        for (size_t n = 5; n-- > 0;) {
            mark(reducer, n, n == 0);
        }
        /* Bytes 20 | 16 12 | 8 4 after the rebuild. */
        CHECK_TEXT(recorder.events, step == 0 ? "0.0 " : "0.0 0.1 0.2 ");
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_TEXT(recorder.events,
                   step == 0 ? "0.0 1.0 2.0 " : "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
        CHECK_INT(recorder.iteration, step);
        CHECK_INT(recorder.layout, step > 0);
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, 2 * (step + (double)i + (world_size - 1) / 2.0));
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(one_rank_runs_all_stages, 1, 30)
{
    stages(rank, world_size, port);
}

MULTI_TEST(three_ranks_run_all_stages, 3, 40)
{
    stages(rank, world_size, port);
}

MULTI_TEST(a_wait_that_ends_early_continues_at_its_stage, 2, 60)
{
    setenv("TDDP_FAKE", "delay_ms=60", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 3, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &recorder, 0);
    int early = 0;
    for (int step = 0; step < 2; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        recorder.events[0] = '\0';
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
    CHECK_TEXT(recorder.events, "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
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

/* The host interrupts the hook: backward continues, and the next call runs that stage again, before
 * any later bucket. The other rank isn't affected. */
static void interrupt_at(tddp_group *group, int stage, int interrupts, const char *expected)
{
    int rank = tddp_group_rank(group);
    recording_hook recorder = {.stages = 3, .fail_at = -1, .interrupt_at = stage, .interrupts = 0};
    tddp_reducer *reducer = make_hooked(group, 5, &recorder, 1);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        recorder.events[0] = '\0';
        recorder.interrupts = rank == 0 && step == 1 ? interrupts : 0;
        for (size_t n = 5; n-- > 0;) {
            int all = 0;
            mark(reducer, n, n == 0);
            CHECK_OK(tddp_reducer_hand_over(reducer, &all));
        }
        while (recorder.interrupts > 0) {
            CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_CANCELED);
            CHECK_CONTAINS(tddp_error_message(), "interrupted at stage");
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_TEXT(recorder.events, step == 0 ? "0.0 1.0 2.0 "
                                    : rank == 0 && step == 1
                                        ? expected
                                        : "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, 2 * (step + (double)i + 0.5));
        }
    }
    tddp_reducer_free(reducer);
}

MULTI_TEST(an_interrupted_hook_continues_at_its_stage, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    interrupt_at(group, 0, 7, "0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2 ");
    interrupt_at(group, 1, 2, "0.0 0.1 0.2 1.0 1.0 1.0 1.1 1.2 2.0 2.1 2.2 ");
    leave(group);
}

MULTI_TEST(an_on_caller_hook_runs_only_on_the_callers_thread, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 2, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &recorder, 1);
    for (int step = 0; step < 3; step++) {
        int rebuilt = 0;
        pthread_t other;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_OK(tddp_reducer_prepare(reducer));
        fill_all(reducer, 5, rank, step);
        recorder.events[0] = '\0';
        CHECK_OK(tddp_thread_start(&other, "test", mark_all, reducer));
        pthread_join(other, NULL);
        CHECK_TEXT(recorder.events, "");
        int all = 7;
        if (step < 2) { /* else finish launches them */
            CHECK_OK(tddp_reducer_hand_over(reducer, &all));
            CHECK_INT(all, 1);
            CHECK_OK(tddp_reducer_hand_over(reducer, &all));
            CHECK_TEXT(recorder.events, step == 0 ? "0.0 " : "0.0 0.1 0.2 ");
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_TEXT(recorder.events, step == 0 ? "0.0 1.0 " : "0.0 0.1 0.2 1.0 1.1 1.2 ");
        CHECK(pthread_equal(recorder.thread, pthread_self()));
        for (size_t i = 0; i < 5; i++) {
            check_all(reducer, i, step + (double)i + 0.5);
        }
    }
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(ready_buckets_are_launched_without_the_lock)
{
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 2, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 5, &recorder, 1);
    int all = 7;
    run_iteration(reducer, (const size_t[]){4, 3, 2, 1, 0}, 5, 1);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &all));
    CHECK_OK(tddp_reducer_hand_over(reducer, &all)); /* outside an iteration: does nothing */
    CHECK_INT(all, 0);
    CHECK_OK(tddp_reducer_prepare(reducer));
    recorder.events[0] = '\0';
    recorder.reducer = reducer;
    recorder.inner = 2;
    mark(reducer, 3, 0);
    CHECK_OK(tddp_reducer_hand_over(reducer, &all));
    CHECK_TEXT(recorder.events, "");
    mark(reducer, 4, 0);
    CHECK_OK(tddp_reducer_hand_over(reducer, &all)); /* bucket 0, which completes bucket 1 */
    CHECK_TEXT(recorder.events, "0.0 0.1 ");
    CHECK_INT(all, 0);
    mark(reducer, 1, 0);
    mark(reducer, 0, 1);
    CHECK_OK(tddp_reducer_prepare(reducer)); /* finishes the interrupted backward */
    CHECK_TEXT(recorder.events, "0.0 0.1 0.2 1.0 1.1 1.2 ");
    CHECK_INT(tddp_reducer_rounds(reducer), 2);
    tddp_reducer_free(reducer);
    leave(group);
}

/* --- arguments of a hook --------------------------------------------------------------------- */

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

TEST(a_hook_gets_the_buckets_gradients)
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

TEST(an_iteration_with_a_hook_allocates_nothing)
{
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 2, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 3, &recorder, 0);
    int rebuilt = 0;
    run_iteration(reducer, (const size_t[]){2, 1, 0}, 3, 1);
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    recorder.quiet = true;
    tddp_fail_allocation(1);
    run_iteration(reducer, (const size_t[]){2, 1, 0}, 3, 1);
    tddp_fail_allocation(0);
    tddp_reducer_free(reducer);
    leave(group);
}
