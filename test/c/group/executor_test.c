/* Which thread executes operations: one that waits, or else the engine's; in order, one at a time,
 * and completed once. */
#include <stdlib.h>
#include <string.h>

#include "group/recorder/recorder.h"
#include "recorded.h"
#include "resumer.h"

enum { CALLER }; /* an event */

static void *trigger_soon(void *cancel)
{
    await_runs(1);
    tddp_cancel_trigger(cancel);
    return NULL;
}

static void *unhold_soon(void *group)
{
    CHECK_UNTIL(recorded(group, "\"last_enqueued_collective\": 2") > 0);
    CHECK_AWAIT_BLOCKED(CALLER);
    atomic_store(&resumer.held, 0);
    return NULL;
}

TEST(a_waiting_caller_executes_its_operation)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    float gathered[2];
    for (int i = 0; i < 5; i++) {
        CHECK_OK(tddp_all_reduce(group, floats(0, 3), TDDP_REDUCE_SUM, 0, NULL));
        CHECK_INT(ran_here(i), 1);
        CHECK_INT(resumer.runs[i].sequence, i + 1);
        CHECK_INT(resumer.runs[i].awaited, 1);
        CHECK_INT(resumer.runs[i].cancelable, 0);
    }
    CHECK_DOUBLE(numbers[2], 5, 0);
    const tddp_op_args with_parts = {.size = sizeof with_parts,
                                     .kind = TDDP_OP_ALL_GATHER,
                                     .input = floats(0, 2),
                                     .output = buffer_of(gathered, 2, TDDP_FLOAT32),
                                     .description = "with parts"};
    CHECK_OK(tddp_submit(group, &with_parts, NULL));
    CHECK_INT(ran_here(5), 1);
    CHECK_INT(tddp_group_on_progress_thread(group), 0);
    drop(group, store);
}

TEST(an_inline_operation_is_done_when_its_call_returns)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    for (int i = 0; i < 20; i++) {
        tddp_work *work = begin_inline(group, i % 2 ? -1 : 1000 * 1000, NULL);
        CHECK(!work);
        CHECK_INT(ran_here(i), 1);
        CHECK_INT(resumer.runs[i].awaited, 1);
        CHECK_INT(resumer.runs[i].cancelable, i % 2 == 0);
    }
    drop(group, store);
}

TEST(without_options_the_progress_thread_executes)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_work *work = begin(group);
    await_runs(1);
    CHECK_INT(ran_here(0), 0);
    CHECK_INT(resumer.runs[0].awaited, 0);
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    drop(group, store);
}

TEST(works_are_executed_in_order_by_any_thread)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_work *works[4];
    for (int i = 0; i < 4; i++) {
        works[i] = begin(group);
    }
    CHECK_OK(tddp_work_wait(works[2], NULL));
    CHECK_OK(tddp_barrier(group, NULL));
    for (int i = 0; i < 4; i++) {
        CHECK_INT(tddp_work_completed(works[i]), 1);
        CHECK_INT(resumer.runs[i].sequence, i + 1);
        tddp_work_release(works[i]);
    }
    drop(group, store);
}

TEST(a_waiting_caller_executes_what_is_ahead_of_its_own)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.held, 1);
    tddp_work *first = begin(group);
    await_runs(1);
    pthread_t thread = aside(unhold_soon, group);
    check_will_block(CALLER);
    CHECK_OK(tddp_all_reduce(group, floats(0, 2), TDDP_REDUCE_SUM, 0, NULL));
    CHECK_INT(tddp_work_completed(first), 1);
    CHECK_INT(resumer.runs[0].awaited, 0);
    for (int i = 1; i <= 2; i++) {
        CHECK_INT(ran_here(i), 1);
        CHECK_INT(resumer.runs[i].sequence, i);
        CHECK_INT(resumer.runs[i].awaited, 1);
    }
    CHECK_INT(pthread_join(thread, NULL), 0);
    tddp_work_release(first);
    drop(group, store);
}

static void count_up(void *count)
{
    atomic_fetch_add((atomic_int *)count, 1);
}

TEST(operations_without_a_waiter_are_executed)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_int called = 0;
    tddp_work_release(begin(group));
    await_runs(1);
    tddp_work *work = begin(group);
    CHECK_OK(tddp_work_on_done(work, count_up, &called));
    await_runs(2);
    CHECK_UNTIL(atomic_load(&called) > 0);
    CHECK_INT(atomic_load(&called), 1);
    tddp_work_release(work);
    work = begin(group);
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_INT(tddp_work_completed(work), 1);
    tddp_work_release(work);
    work = begin(group);
    tddp_wait poll = {0, NULL};
    tddp_status status = tddp_work_wait(work, &poll);
    CHECK(status == TDDP_OK || status == TDDP_TIMEOUT);
    await_runs(4);
    tddp_work_release(work);
    work = begin(group);
    tddp_group_shutdown(group, 1000);
    CHECK_OK(tddp_work_status(work));
    CHECK_INT(tddp_work_completed(work), 1);
    tddp_work_release(work);
    for (int i = 0; i < 5; i++) {
        CHECK_INT(ran_here(i), 0);
    }
    drop(group, store);
}

/* Checks that the recorder has so many entries, the last in this state. */
static void check_recorded(tddp_group *group, size_t entries, tddp_record_state state)
{
    tddp_record *records;
    size_t count;
    CHECK_OK(tddp_recorder_copy(group->recorder, &records, &count));
    CHECK_INT(count, entries);
    CHECK_INT(records[count - 1].state, state);
    free(records);
}

TEST(an_unfinished_inline_operation_is_the_progress_threads)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    atomic_store(&resumer.held, 1);
    tddp_wait wait = {-1, cancel};
    pthread_t thread = aside(trigger_soon, cancel);
    tddp_work *work = begin_inline(group, -1, cancel);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_INT(tddp_work_completed(work), 0);
    CHECK_INT(ran_here(0), 1);
    CHECK_INT(resumer.runs[0].cancelable, 1);
    await_runs(2);
    CHECK_INT(ran_here(1), 0);
    CHECK_INT(resumer.runs[1].cancelable, 1);
    CHECK_INT(resumer.runs[1].awaited, 0);
    CHECK_INT(resumer.runs[0].sequence, 1);
    CHECK_INT(resumer.runs[1].sequence, 1);
    check_recorded(group, 1, TDDP_RECORD_STARTED);
    CHECK_STATUS(tddp_work_wait(work, &wait), TDDP_CANCELED);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce 1 was interrupted; it goes on");
    atomic_store(&resumer.held, 0);
    tddp_cancel_reset(cancel);
    CHECK_OK(tddp_work_wait(work, &wait));
    CHECK_DOUBLE(numbers[0], 1, 0);
    check_recorded(group, 1, TDDP_RECORD_COMPLETED);
    tddp_work_release(work);
    tddp_cancel_free(cancel);
    drop(group, store);
}

/* The interrupted caller does not start the operation; the progress thread executes it, though no
 * thread waits. */
TEST(an_interrupt_before_the_call_leaves_the_operation_queued)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    atomic_store(&resumer.held, 1);
    tddp_wait wait = {-1, cancel};
    tddp_work *work = begin_inline(group, -1, cancel);
    CHECK_STATUS(tddp_work_wait(work, &wait), TDDP_CANCELED);
    await_runs(1);
    CHECK_INT(ran_here(0), 0);
    atomic_store(&resumer.held, 0);
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_INT(tddp_work_completed(work), 1);
    tddp_work_release(work);
    tddp_cancel_free(cancel);
    drop(group, store);
}

TEST(a_wait_ends_at_its_timeout)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    await_runs(1);
    tddp_wait wait = {40, NULL};
    CHECK_STATUS(tddp_work_wait(work, &wait), TDDP_TIMEOUT);
    const char *waited = strstr(tddp_error_message(), "is not done after waiting ");
    CHECK(waited != NULL);
    CHECK(atoi(waited + strlen("is not done after waiting ")) >= 40);
    atomic_store(&resumer.held, 0);
    CHECK_OK(tddp_work_wait(work, NULL));
    CHECK_INT(atomic_load(&resumer.reduced), 2);
    tddp_work_release(work);
    drop(group, store);
}

TEST(inline_execution_ends_at_its_limit)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_work *work = begin_inline(group, 0, NULL);
    await_runs(1);
    CHECK_INT(ran_here(0), 0);
    tddp_work_release(work);
    CHECK_OK(tddp_group_drain(group, NULL));
    atomic_store(&resumer.held, 1);
    work = begin_inline(group, 2000, NULL);
    CHECK_INT(tddp_work_completed(work), 0);
    CHECK_INT(ran_here(1), 1);
    tddp_work_release(work);
    await_runs(3); /* without a waiter */
    CHECK_INT(ran_here(2), 0);
    atomic_store(&resumer.held, 0);
    work = begin_inline(group, INT64_MAX, NULL);
    CHECK_INT(ran_here(3), 1);
    tddp_work_release(work);
    drop(group, store);
}

TEST(under_a_limit_large_operations_are_not_inline)
{
    enum { MOST = (4 << 20) / sizeof(float) };
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    float *large = calloc(MOST + 1, sizeof *large);
    for (size_t i = 0; i < 4; i++) {
        tddp_work *work;
        tddp_buffer buffer = buffer_of(large, MOST + i % 2, TDDP_FLOAT32);
        CHECK_OK(tddp_group_drain(group, NULL));
        CHECK_OK(inline_sum(group, buffer, i < 2 ? 100 : -1, NULL, &work));
        await_runs((int)i + 1);
        CHECK_INT(ran_here((int)i), i != 1);
        CHECK_OK(tddp_work_wait(work, NULL));
        tddp_work_release(work);
    }
    free(large);
    drop(group, store);
}

typedef struct callback_facts {
    tddp_group *group;
    pthread_t thread;
    int inside;
} callback_facts;

static void look_round(void *data)
{
    callback_facts *facts = data;
    facts->thread = pthread_self();
    facts->inside = tddp_group_on_progress_thread(facts->group);
    tddp_group_shutdown(facts->group, 0); /* refused, with a line in the log */
}

TEST(callbacks_may_run_on_a_waiting_thread)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    callback_facts facts = {.group = group};
    atomic_store(&resumer.held, 1);
    tddp_work *first = begin(group);
    await_runs(1);
    tddp_work *second = begin(group);
    tddp_work *third = begin(group);
    CHECK_OK(tddp_work_on_done(third, look_round, &facts));
    atomic_store(&resumer.held, 0);
    CHECK_OK(tddp_work_wait(third, NULL));
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_INT(facts.inside, 1);
    CHECK_INT(tddp_group_closed(group), 0);
    CHECK_INT(tddp_group_on_progress_thread(group), 0);
    tddp_work_release(first);
    tddp_work_release(second);
    tddp_work_release(third);
    drop(group, store);
}

TEST(a_coalesced_operation_resumes_at_its_step)
{
    enum { LARGE = (1 << 20) / sizeof(float) };
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    float *large = calloc(2 * LARGE, sizeof *large);
    tddp_buffer buffers[4] = {floats(0, 3), floats(10, 3),
                              buffer_of(large, 2 * LARGE, TDDP_FLOAT32), floats(20, 5)};
    tddp_work *work;
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    atomic_store(&resumer.held, 1);
    pthread_t thread = aside(trigger_soon, cancel);
    const tddp_op_args args = {.size = sizeof args,
                               .kind = TDDP_OP_ALL_REDUCE,
                               .outputs = buffers,
                               .output_count = 4,
                               .inline_us = -1,
                               .cancel = cancel};
    CHECK_OK(tddp_submit(group, &args, &work));
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_INT(ran_here(0), 1);
    await_runs(2);
    atomic_store(&resumer.held, 0);
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_OK(tddp_work_status(work));
    CHECK_INT(atomic_load(&resumer.count), 4); /* three steps, the first twice */
    CHECK(resumer.runs[0].op == resumer.runs[1].op);
    for (int i = 1; i < 4; i++) {
        CHECK_INT(resumer.runs[i].sequence, i);
    }
    CHECK_DOUBLE(numbers[2] + numbers[12] + numbers[24] + large[2 * LARGE - 1], 4, 0);
    CHECK_DOUBLE(numbers[3] + numbers[13], 0, 0);
    CHECK_INT(atomic_load(&resumer.reduced), 3 + 3 + 2 * LARGE + 5);
    tddp_work_release(work);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_INT(resumer.runs[4].sequence, 4);
    free(large);
    tddp_cancel_free(cancel);
    drop(group, store);
}

static void *use_it_all(void *data)
{
    tddp_group *group = data;
    float own[2] = {0, 0};
    tddp_buffer buffer = buffer_of(own, 2, TDDP_FLOAT32);
    tddp_work *works[3];
    tddp_wait brief = {1, NULL};
    for (int i = 0; i < 60; i++) {
        CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        for (int k = 0; k < 3; k++) {
            CHECK_OK(inline_sum(group, buffer, (i + k) % 3 - 1, NULL, &works[k]));
        }
        if (i % 2) {
            tddp_status status = tddp_work_wait(works[1], &brief);
            CHECK(status == TDDP_OK || status == TDDP_TIMEOUT);
        }
        CHECK_OK(tddp_work_wait(works[i % 3], NULL));
        CHECK_OK(tddp_work_wait(works[2], NULL));
        for (int k = 0; k < 3; k++) {
            tddp_work_release(works[k]);
        }
    }
    CHECK_DOUBLE(own[1], 240, 0);
    return NULL;
}

TEST(several_threads_may_queue_and_wait)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        threads[i] = aside(use_it_all, group);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    CHECK_OK(tddp_group_drain(group, NULL));
    uint64_t before = 0;
    for (int i = 0; i < atomic_load(&resumer.count); i++) {
        CHECK(resumer.runs[i].sequence >= before && resumer.runs[i].sequence <= before + 1);
        before = resumer.runs[i].sequence;
    }
    CHECK_INT(before, 4 * 240);
    drop(group, store);
}
