/*
 * A group's queue and its progress thread, which carries out one operation after the other. Any
 * thread queues; what becomes of operations that fail is failure.c's.
 *
 * Invariant: `sequence` grows by one with each operation that is queued, in the order of the queue,
 * so that equal calls have equal numbers on all ranks. The lock is never held while the backend or
 * a callback runs.
 */
#include <stdlib.h>
#include <unistd.h>

#include "group/recorder/recorder.h"

enum { DRAIN_LOOK_MS = 20 };

static tddp_status closed(const tddp_group *group)
{
    return tddp_fail(TDDP_GROUP_CLOSED, "group \"%s\" is destroyed", group->name);
}

static void carry_out(tddp_group *group, tddp_work *work)
{
    const tddp_op *op = &work->op;
    atomic_store(&work->expiry, tddp_deadline_after_ms(op->timeout_ms));
    tddp_recorder_started(group, work);
    tddp_group_span_started(work);
    tddp_group_conclude(group, work, tddp_group_run(group, work));
}

/* What a queued operation is told instead of being run; TDDP_OK: run it. With the lock held. */
static tddp_status refusal(tddp_group *group)
{
    if (group->failure) {
        return tddp_group_failed(group);
    }
    return group->state >= TDDP_GROUP_ENDING ? closed(group) : TDDP_OK;
}

/* The group whose thread this is; NULL on all other threads. */
static _Thread_local const tddp_group *progressing;

bool tddp_group_on_progress_thread(const tddp_group *group)
{
    return progressing == group;
}

void tddp_group_enter_thread(const tddp_group *group)
{
    progressing = group;
}

static void *progress(void *data)
{
    tddp_group *group = data;
    tddp_group_enter_thread(group);
    pthread_mutex_lock(&group->mutex);
    for (;;) {
        while (!group->head && group->state < TDDP_GROUP_ENDING) {
            pthread_cond_wait(&group->wake, &group->mutex);
        }
        tddp_work *work = group->head;
        if (!work) {
            break;
        }
        group->head = work->next;
        if (!group->head) {
            group->tail = NULL;
        }
        group->running = true;
        tddp_status status = refusal(group);
        pthread_mutex_unlock(&group->mutex);
        if (status) {
            tddp_recorder_finished(group, work, status, tddp_error_message());
            tddp_group_work_finish(work, status, tddp_error_message());
        } else {
            carry_out(group, work);
        }
        tddp_work_release(work);
        pthread_mutex_lock(&group->mutex);
        group->running = false;
        if (!group->head) {
            pthread_cond_broadcast(&group->idle);
        }
    }
    pthread_mutex_unlock(&group->mutex);
    return NULL;
}

tddp_status tddp_group_progress_start(tddp_group *group)
{
    return tddp_thread_start(&group->thread, "tddp-progress", progress, group);
}

static tddp_status enqueue(tddp_group *group, tddp_work *work)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = refusal(group);
    if (status == TDDP_OK && group->state != TDDP_GROUP_OPEN) {
        status = closed(group);
    }
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
        pthread_cond_signal(&group->wake);
    }
    pthread_mutex_unlock(&group->mutex);
    return status;
}

tddp_status tddp_group_hand_out(tddp_work *work, tddp_work **out)
{
    if (out) {
        *out = work;
        return TDDP_OK;
    }
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

tddp_status tddp_group_queue(tddp_group *group, tddp_work *work, tddp_work **out)
{
    tddp_status status = enqueue(group, work);
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    return tddp_group_hand_out(work, out);
}

tddp_status tddp_group_submit(tddp_group *group, tddp_op *op, tddp_work **out)
{
    tddp_work *work;
    tddp_status status = tddp_group_prepare(group, op, &work);
    return status ? status : tddp_group_queue(group, work, out);
}

tddp_status tddp_group_admit(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = refusal(group);
    if (status == TDDP_OK && group->state != TDDP_GROUP_OPEN) {
        status = closed(group);
    }
    group->in_flight += status == TDDP_OK;
    pthread_mutex_unlock(&group->mutex);
    return status;
}

void tddp_group_let_go(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    if (--group->in_flight == 0) {
        pthread_cond_broadcast(&group->idle);
    }
    pthread_mutex_unlock(&group->mutex);
}

static bool busy(const tddp_group *group)
{
    return group->head || group->running || group->in_flight > 0;
}

bool tddp_group_await_idle(tddp_group *group, int64_t deadline, const tddp_cancel *cancel)
{
    while (busy(group) && tddp_now_ns() < deadline && !(cancel && tddp_cancel_triggered(cancel))) {
        /* Nothing wakes this when the token is triggered: it looks now and then. */
        int64_t look = cancel ? tddp_deadline_after_ms(DRAIN_LOOK_MS) : deadline;
        (void)tddp_cond_wait_until(&group->idle, &group->mutex, look < deadline ? look : deadline);
    }
    return !busy(group);
}

tddp_status tddp_group_drain(tddp_group *group, const tddp_wait *wait)
{
    if (!group) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "group is NULL");
    }
    if (group->pid != getpid()) {
        return tddp_fail(TDDP_FORKED, "group \"%s\" was made by process %d, not by its child %d",
                         group->name, (int)group->pid, (int)getpid());
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
    bool aborts = !tddp_group_await_idle(group, deadline, NULL);
    group->state = TDDP_GROUP_ENDING;
    pthread_cond_signal(&group->wake);
    pthread_mutex_unlock(&group->mutex);
    if (aborts) {
        group->backend->abort(group->context);
    }
    pthread_join(group->thread, NULL);
    tddp_group_p2p_stop(group);
}
