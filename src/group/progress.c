/*
 * A group's queue and its progress thread, which executes one operation after the other. Any thread
 * queues operations; executor.c decides which thread executes them, failure.c handles failures. A
 * polled group (engine.c) has a thread of its own only for its failures.
 *
 * Invariant: `sequence` grows with each operation that is queued, in the order of the queue, by the
 * steps that it has (coalesce.c), so that equal calls have equal numbers on all ranks. The lock is
 * never held while a callback runs, or the backend does what may take a while: with it held are
 * called resumes(), reserve() and launches_at_once().
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

/* Returns once the group ends and no thread executes anything. */
static void run_queue(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    for (;;) {
        while (!group->failed &&
               (group->running || (!group->head && group->state < TDDP_GROUP_ENDING))) {
            pthread_cond_wait(&group->wake, &group->mutex);
        }
        if (tddp_group_p2p_complete_failed(group)) {
            continue;
        }
        if (!group->head) {
            break;
        }
        tddp_group_execute_next(group);
    }
    pthread_mutex_unlock(&group->mutex);
}

static void *progress(void *data)
{
    tddp_group_enter_thread(data);
    run_queue(data);
    return NULL;
}

tddp_status tddp_group_start_thread(tddp_group *group)
{
    if (group->has_thread) {
        return TDDP_OK;
    }
    tddp_status status = tddp_thread_start(&group->thread, "tddp-progress", progress, group);
    group->has_thread = status == TDDP_OK;
    return status;
}

/* With the lock held. */
static tddp_status start_executor(tddp_group *group)
{
    return tddp_group_queue_is_polled(group) && !group->has_thread
               ? tddp_engine_start(group->engine)
               : tddp_group_start_thread(group);
}

tddp_status tddp_group_progress_start(tddp_group *group)
{
    tddp_status status = group->backend->events ? tddp_engine_add(group) : TDDP_OK;
    if (status || tddp_group_resumes(group)) {
        return status; /* the thread starts once an operation is left to it */
    }
    pthread_mutex_lock(&group->mutex);
    status = tddp_group_start_thread(group);
    pthread_mutex_unlock(&group->mutex);
    if (status) {
        tddp_engine_remove(group);
    }
    return status;
}

/* Appends the work to the queue, and executes it inline if its options allow that. */
static tddp_status enqueue(tddp_group *group, tddp_work *work, int64_t inline_us,
                           tddp_cancel *cancel)
{
    work->group = tddp_group_resumes(group) ? group : NULL;
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, tddp_op_name(work->op.kind));
    bool run_inline = tddp_group_may_run_inline(group, work, inline_us, cancel);
    if (status == TDDP_OK && !run_inline) {
        status = start_executor(group);
    }
    status = status ? status : tddp_group_reserve_turn(group, work);
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
        if (group->head == work && !group->running && tddp_group_launches_at_once(group, work)) {
            tddp_group_launch_inline(group);
        } else if (run_inline) {
            tddp_group_run_inline(group, work, inline_us, cancel);
        }
        /* A shutdown executes what is left by itself. */
        if (group->head && group->state < TDDP_GROUP_ENDING && start_executor(group)) {
            tddp_log(TDDP_LOG_WARN, "group",
                     "operations of \"%s\" go on only while they are waited for: %s", group->name,
                     tddp_error_message());
        }
        tddp_group_wake_progress(group);
    }
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

/* Posts the work to the device first, if one executes it. */
static tddp_status post_and_enqueue(tddp_group *group, tddp_work *work, int64_t inline_us,
                                    tddp_cancel *cancel)
{
    bool queues = tddp_group_queues(group, &work->op);
    tddp_status status = queues ? tddp_group_device_post(group, work) : TDDP_OK;
    if (status) {
        return status;
    }
    status = enqueue(group, work, inline_us, cancel);
    if (status && queues) {
        tddp_group_device_drop(group, work);
    }
    return status;
}

tddp_status tddp_group_queue(tddp_group *group, tddp_work *work, const tddp_op_args *args,
                             tddp_work **out)
{
    tddp_status status = out ? post_and_enqueue(group, work, args->inline_us, args->cancel)
                             : post_and_enqueue(group, work, -1, NULL);
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    return tddp_group_return_or_wait(work, out);
}

/* For a caller that waits without a work: false if others are queued or running. */
static bool run_unqueued(tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                         tddp_status *status)
{
    tddp_work work;
    *status = tddp_group_prepare_here(group, op, args, &work);
    bool ran = *status != TDDP_OK || tddp_group_run_unqueued(group, &work, status);
    tddp_group_work_clear(&work);
    return ran;
}

tddp_status tddp_group_submit(tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                              tddp_work **out)
{
    tddp_work *work;
    tddp_status status;
    if (!out && tddp_group_resumes(group) && !tddp_group_queues(group, op) &&
        run_unqueued(group, op, args, &status)) {
        return status;
    }
    status = tddp_group_prepare(group, op, args, &work);
    return status ? status : tddp_group_queue(group, work, args, out);
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
    return group->head || group->running;
}

static bool busy(const tddp_group *group)
{
    return queue_busy(group) || group->in_flight > 0;
}

static bool await_while(tddp_group *group, bool (*is_busy)(const tddp_group *group),
                        int64_t deadline, const tddp_cancel *cancel)
{
    const bool polls = tddp_engine_on_thread(group->engine);
    while (is_busy(group) && tddp_now_ns() < deadline &&
           !(cancel && tddp_cancel_triggered(cancel))) {
        int64_t check = deadline;
        if (polls) {
            /* On the engine's thread, in a callback of another group. */
            pthread_mutex_unlock(&group->mutex);
            (void)tddp_engine_poll(group);
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
    bool has_thread = group->has_thread;
    pthread_cond_signal(&group->wake);
    pthread_mutex_unlock(&group->mutex);
    if (aborts) {
        tddp_group_abort(group);
    }
    tddp_engine_remove(group);
    if (has_thread) {
        pthread_join(group->thread, NULL);
    } else {
        run_queue(group);
    }
    tddp_group_p2p_stop(group);
    tddp_group_device_stop(group);
    pthread_mutex_lock(&group->mutex);
    while (group->poll_waiters > 0 || atomic_load(&group->holders) > 0) {
        pthread_cond_wait(&group->idle, &group->mutex);
    }
    pthread_mutex_unlock(&group->mutex);
}
