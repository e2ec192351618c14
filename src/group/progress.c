/*
 * A group's queue of operations on the host. Any thread queues operations; executor.c decides which
 * thread executes them, failure.c handles failures. What no caller and no engine executes, and what
 * has failed, is left to a thread that is lent to the queue until that is empty
 * (backend/blocking.h).
 *
 * Invariants: `sequence` grows with each operation that is queued, in the order of the queue, by
 * the steps that it has (coalesce.c), so that equal calls have equal numbers on all ranks. Once
 * something is queued that no engine executes, a thread is reserved for it or runs (`executor`).
 * The lock is never held while a callback runs, or the backend does what may take a while: with it
 * held, only resumes() is called.
 */
#include <stdlib.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

enum { POLL_HERE_MS = 1 };

tddp_status tddp_group_check_runnable(tddp_group *group, const tddp_op *op)
{
    if (group->failure) {
        return tddp_group_fail_unstarted(group, tddp_op_name(op->kind));
    }
    return group->state >= TDDP_GROUP_ENDING ? tddp_group_fail_destroyed(group) : TDDP_OK;
}

/* Executes what is queued, and completes what has failed, until nothing is left, not even what a
 * caller executes, which may put it back. With the lock held, which is released meanwhile. */
static void run_queue(tddp_group *group)
{
    while (group->failed || group->head || group->running) {
        if (tddp_group_p2p_complete_failed(group)) {
            continue;
        }
        if (group->running) {
            pthread_cond_wait(&group->idle, &group->mutex);
        } else {
            tddp_group_execute_next(group);
        }
    }
}

/* On a lent thread. */
static void execute(void *data, void *nothing)
{
    tddp_group *group = data;
    (void)nothing;
    tddp_group_enter_thread(group);
    pthread_mutex_lock(&group->mutex);
    run_queue(group);
    tddp_group_enter_thread(NULL);
    group->executor = TDDP_GROUP_NO_EXECUTOR;
    pthread_cond_broadcast(&group->idle);
    pthread_mutex_unlock(&group->mutex);
}

tddp_status tddp_group_reserve_executor(tddp_group *group)
{
    tddp_status status =
        group->executor == TDDP_GROUP_NO_EXECUTOR ? tddp_blocking_reserve() : TDDP_OK;
    if (status == TDDP_OK && group->executor == TDDP_GROUP_NO_EXECUTOR) {
        group->executor = TDDP_GROUP_EXECUTOR_RESERVED;
    }
    return status;
}

void tddp_group_wake_progress(tddp_group *group)
{
    const bool some = group->failed || (group->head && !group->running);
    const bool reserved = group->executor == TDDP_GROUP_EXECUTOR_RESERVED;
    if (reserved && some) {
        group->executor = TDDP_GROUP_EXECUTOR_RUNS;
        group->execute = (tddp_blocking_call){.run = execute, .context = group};
        tddp_blocking_start(&group->execute);
    } else if (reserved && !group->head && !group->running) {
        group->executor = TDDP_GROUP_NO_EXECUTOR;
        tddp_blocking_release();
    } else if (!group->running &&
               (group->executor == TDDP_GROUP_EXECUTOR_RUNS || group->state >= TDDP_GROUP_ENDING)) {
        pthread_cond_broadcast(&group->idle);
    } else if (some && tddp_group_queue_is_polled(group)) {
        tddp_engine_wake(group->engine);
    }
}

/* With the lock held. */
static tddp_status start_executor(tddp_group *group)
{
    return tddp_group_queue_is_polled(group) && group->executor == TDDP_GROUP_NO_EXECUTOR
               ? tddp_engine_start(group->engine)
               : tddp_group_reserve_executor(group);
}

/* Appends the work to the queue. */
static tddp_status enqueue(tddp_group *group, tddp_work *work)
{
    work->group = group->resumes ? group : NULL;
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, tddp_op_name(work->op.kind));
    status = status ? status : start_executor(group);
    if (status == TDDP_OK) {
        work->op.sequence = group->sequence + 1;
        group->sequence += work->steps;
        tddp_recorder_queued(group, work);
        tddp_group_span_queued(work);
        if (group->tail) {
            group->tail->next = work;
        } else {
            group->head = work;
        }
        group->tail = work;
        tddp_group_provide_executor(group); /* a shutdown executes what is left by itself */
    }
    tddp_group_wake_progress(group);
    pthread_mutex_unlock(&group->mutex);
    return status;
}

tddp_status tddp_group_return_or_wait(tddp_work *work, tddp_work **out)
{
    if (out) {
        *out = work;
        return TDDP_OK;
    }
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

/* Queues what its caller has not executed, or launches it on its device. */
static tddp_status queue(tddp_group *group, tddp_work *here, const tddp_op_args *args,
                         tddp_work **out)
{
    tddp_work *work;
    tddp_status status = tddp_group_work_move(here, &work);
    if (status) {
        return status;
    }
    if (tddp_group_is_launched(group, &work->op)) {
        return tddp_group_launch_one(group, work, args, out);
    }
    status = enqueue(group, work);
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    return tddp_group_return_or_wait(work, out);
}

tddp_status tddp_group_start(tddp_group *group, tddp_work *here, const tddp_op_args *args,
                             tddp_work **out)
{
    tddp_status status;
    if (!tddp_group_try_here(group, here, args, out, &status)) {
        status = queue(group, here, args, out);
    }
    tddp_group_work_clear(here);
    return status;
}

tddp_status tddp_group_submit(tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                              tddp_work **out)
{
    tddp_work here;
    tddp_status status = tddp_group_prepare(group, op, args, &here);
    if (status) {
        tddp_group_work_clear(&here);
        return status;
    }
    return tddp_group_start(group, &here, args, out);
}

/* Whether an operation has no outcome yet. A caller that has waited for the last operation may shut
 * the group down while the thread that completed it still delivers the outcome. */
static bool has_incomplete(const tddp_group *group)
{
    return group->head || (group->running && !atomic_load(&group->completing)) ||
           group->in_flight > atomic_load(&group->in_flight_completing);
}

static bool queue_busy(const tddp_group *group)
{
    return group->head || group->running || group->device.launching;
}

static bool busy(const tddp_group *group)
{
    return queue_busy(group) || group->in_flight > 0;
}

static bool await_while(tddp_group *group, bool (*is_busy)(const tddp_group *group),
                        int64_t deadline, const tddp_cancel *cancel)
{
    const bool on_engine = tddp_engine_on_thread(group->engine);
    const bool polls = on_engine || tddp_watchdog_on_thread();
    while (is_busy(group) && tddp_now_ns() < deadline &&
           !(cancel && tddp_cancel_triggered(cancel))) {
        int64_t check = deadline;
        if (polls) {
            /* In a callback of another group. */
            pthread_mutex_unlock(&group->mutex);
            (void)(on_engine ? tddp_engine_poll(group) : tddp_group_device_test(group));
            pthread_mutex_lock(&group->mutex);
            check = tddp_deadline_after_ms(POLL_HERE_MS);
        } else if (cancel) {
            check = tddp_deadline_after_ms(TDDP_GROUP_TOKEN_CHECK_MS);
        }
        if (!is_busy(group)) {
            break;
        }
        (void)tddp_cond_wait_until(&group->idle, &group->mutex,
                                   check < deadline ? check : deadline);
    }
    return !is_busy(group);
}

bool tddp_group_await_idle(tddp_group *group, int64_t deadline, const tddp_cancel *cancel)
{
    return await_while(group, busy, deadline, cancel);
}

bool tddp_group_await_queue(tddp_group *group, int64_t deadline, const tddp_cancel *cancel)
{
    return await_while(group, queue_busy, deadline, cancel);
}

tddp_status tddp_group_drain(tddp_group *group, const tddp_wait *wait)
{
    tddp_status status = tddp_group_check_usable(group, "drain");
    if (status) {
        return status;
    }
    int64_t deadline = tddp_wait_deadline(wait, atomic_load(&group->timeout_ms));
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    pthread_mutex_lock(&group->mutex);
    bool done = tddp_group_await_idle(group, deadline, cancel);
    pthread_mutex_unlock(&group->mutex);
    if (done) {
        return TDDP_OK;
    }
    if (cancel && tddp_cancel_triggered(cancel)) {
        return tddp_fail(TDDP_CANCELED, "interrupted while operations of group \"%s\" finish",
                         group->name);
    }
    return tddp_fail(TDDP_TIMEOUT, "operations of group \"%s\" are still under way", group->name);
}

void tddp_group_progress_stop(tddp_group *group, int64_t deadline)
{
    pthread_mutex_lock(&group->mutex);
    bool aborts = !tddp_group_await_idle(group, deadline, NULL) && has_incomplete(group);
    group->state = TDDP_GROUP_ENDING;
    pthread_mutex_unlock(&group->mutex);
    if (aborts) {
        tddp_group_backends_abort(group);
    }
    tddp_engine_remove(group);
    tddp_watchdog_remove(group);
    const tddp_group *before = tddp_group_set_current(group);
    pthread_mutex_lock(&group->mutex);
    run_queue(group);
    tddp_group_wake_progress(group); /* gives back a thread that is reserved */
    while (group->executor != TDDP_GROUP_NO_EXECUTOR) {
        pthread_cond_wait(&group->idle, &group->mutex);
    }
    pthread_mutex_unlock(&group->mutex);
    (void)tddp_group_set_current(before);
    tddp_group_p2p_stop(group);
    pthread_mutex_lock(&group->mutex);
    while (group->poll_waiters > 0 || atomic_load(&group->holders) > 0) {
        pthread_cond_wait(&group->idle, &group->mutex);
    }
    pthread_mutex_unlock(&group->mutex);
}
