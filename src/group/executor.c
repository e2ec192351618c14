/*
 * Decides which thread executes a group's queued operations: one lent to the queue (progress.c), or
 * the engine's (engine.c); or, with a backend that supports it (TDDP_BACKEND_RESUMES), a thread
 * that submits or waits for one of them. The last saves two thread switches, which take longer than
 * small operations do. Entered by all of them.
 *
 * Invariants: one thread at a time has acquired the queue (`running`), and operations are executed
 * in the order of the queue by whichever thread. The group is not destroyed while the queue is
 * acquired or a queued work is not done: its shutdown waits for both. The lent thread, or the
 * engine's, executes all queued operations that no other thread executes before it: a thread that
 * queues an operation or releases the queue wakes it, so that an early end of a wait never leaves
 * an operation behind. Failed operations are completed by lent threads, since that may take a
 * while, or by a caller whose operation no other thread knows of.
 *
 * Locks are taken in the order work, group.
 */
#include <stdlib.h>

#include <tddp/cuda.h>

#include "group/recorder/recorder.h"

/* How many queued works are checked for a waiting thread. */
enum { WORKS_CHECKED = 32 };

/* The memory that moves in a microsecond. */
enum { BYTES_EACH_US = 4096 };

/* Whether it may be left unfinished by one thread, and finished by another. */
static bool op_resumes(const tddp_group *group, const tddp_op *op)
{
    const tddp_inner *own = tddp_group_backend_for(group, op);
    return group->resumes && (own->backend->traits & TDDP_BACKEND_RESUMES) &&
           (!own->backend->resumes || own->backend->resumes(own->context, op));
}

bool tddp_group_queue_is_polled(const tddp_group *group)
{
    return group->polled && group->resumes &&
           !tddp_group_backend_on(group, TDDP_CPU)->backend->resumes &&
           !tddp_group_backend_on(group, TDDP_CUDA)->backend->resumes;
}

/* The group whose thread this is, or whose callbacks it runs; NULL on all other threads. */
static _Thread_local const tddp_group *current_group;

bool tddp_group_on_progress_thread(const tddp_group *group)
{
    return current_group == group;
}

const tddp_group *tddp_group_set_current(const tddp_group *group)
{
    const tddp_group *before = current_group;
    current_group = group;
    return before;
}

void tddp_group_enter_thread(const tddp_group *group)
{
    current_group = group;
    tddp_cuda_keep_device();
}

/* Whether a thread waits for this work or one behind it, and so leaves its core to the executing
 * thread. With the lock held. */
static int awaited(const tddp_work *work)
{
    for (int i = 0; work && i < WORKS_CHECKED; i++, work = work->next) {
        if (atomic_load_explicit(&work->waiters, memory_order_relaxed) > 0) {
            return 1;
        }
    }
    return 0;
}

static void start(tddp_group *group, tddp_work *work)
{
    if (!work->started) {
        int64_t now = tddp_now_ns();
        atomic_store(&work->expiry, tddp_deadline_from(now, work->op.timeout_ms));
        tddp_recorder_started(group, work, now);
        tddp_group_span_started(work);
        work->started = true;
    }
}

void tddp_group_keep_failure(tddp_work *work, tddp_status status)
{
    work->pending_status = status;
    work->pending_text = tddp_copy_string(tddp_error_message());
}

tddp_status tddp_group_kept_failure(const tddp_work *work)
{
    return tddp_fail(work->pending_status, "%s",
                     work->pending_text ? work->pending_text
                                        : tddp_status_text(work->pending_status));
}

/* On a thread of the group's; drops the queue's reference to the work. */
static void execute(tddp_group *group, tddp_work *work)
{
    start(group, work);
    tddp_status status =
        work->pending_status ? tddp_group_kept_failure(work) : tddp_group_run(group, work);
    tddp_group_complete(group, work, status);
    tddp_work_release(work);
}

/* The engine has tried the first operation: threads that wait for it may look again. With the lock
 * held. */
static void end_poll(tddp_group *group)
{
    if (group->polling) {
        group->polling = false;
        if (group->poll_waiters > 0) {
            pthread_cond_broadcast(&group->idle);
        }
    }
}

/* On a waiting thread, or the engine's: false if the work is not completed, since the token was
 * triggered or the operation failed. */
static bool execute_on_caller(tddp_group *group, tddp_work *work, tddp_cancel *cancel)
{
    start(group, work);
    work->op.cancel = cancel;
    tddp_status status = tddp_group_run(group, work);
    work->op.cancel = NULL;
    if (status) {
        if (status != TDDP_CANCELED || !cancel || !tddp_cancel_triggered(cancel)) {
            tddp_group_keep_failure(work, status);
        }
        return false;
    }
    if (group->polling) { /* only the thread that has acquired the queue sets it */
        pthread_mutex_lock(&group->mutex);
        end_poll(group);
        pthread_mutex_unlock(&group->mutex);
    }
    const tddp_group *before = tddp_group_set_current(group);
    tddp_group_complete(group, work, TDDP_OK);
    (void)tddp_group_set_current(before);
    return true;
}

/* Acquires the queue for its first work, which is removed. With the lock held. */
static tddp_work *acquire_queue(tddp_group *group)
{
    tddp_work *work = group->head;
    group->head = work->next;
    if (!group->head) {
        group->tail = NULL;
    }
    group->running = true;
    return work;
}

static void put_back(tddp_group *group, tddp_work *work)
{
    work->next = group->head;
    group->head = work;
    if (!group->tail) {
        group->tail = work;
    }
}

static void release_queue(tddp_group *group)
{
    group->running = false;
    end_poll(group); /* an operation that is unfinished: it is in the queue again */
    atomic_store(&group->completing, false);
    if (!group->head) {
        pthread_cond_broadcast(&group->idle);
    }
}

void tddp_group_execute_next(tddp_group *group)
{
    tddp_work *work = acquire_queue(group);
    /* An operation that has failed here returns that, even if another rank reported first; one that
     * was left unfinished may still succeed. */
    tddp_status status = work->pending_status || work->started
                             ? TDDP_OK
                             : tddp_group_check_runnable(group, &work->op);
    work->op.awaited = awaited(work);
    pthread_mutex_unlock(&group->mutex);
    if (status) {
        tddp_recorder_finished(group, work, status, tddp_error_message());
        tddp_group_work_finish(work, status, tddp_error_message());
        tddp_work_release(work);
    } else {
        execute(group, work);
    }
    pthread_mutex_lock(&group->mutex);
    release_queue(group);
}

/* Executes the queue's first work on a waiting thread, or the engine's; false if it is the first in
 * the queue again. */
static bool execute_next_on_caller(tddp_group *group, tddp_cancel *cancel, int awaited)
{
    tddp_work *work = acquire_queue(group);
    work->op.awaited = awaited;
    group->polling = !awaited;
    pthread_mutex_unlock(&group->mutex);
    bool completed = execute_on_caller(group, work, cancel);
    if (completed) {
        tddp_work_release(work);
    }
    pthread_mutex_lock(&group->mutex);
    if (!completed) {
        put_back(group, work);
    }
    release_queue(group);
    return completed;
}

/* Locks the group of a work that is not done; NULL: it is done, or has none. */
static tddp_group *lock_group(tddp_work *work)
{
    pthread_mutex_lock(&work->mutex);
    tddp_group *group = atomic_load(&work->done) ? NULL : work->group;
    if (group) {
        pthread_mutex_lock(&group->mutex);
    }
    pthread_mutex_unlock(&work->mutex);
    return group;
}

/* Whether a waiting thread may execute the first work of the queue. With the lock held. */
static bool may_execute_on_caller(const tddp_group *group)
{
    return !group->running && group->head && !group->head->pending_status && !group->failure &&
           group->state < TDDP_GROUP_ENDING && op_resumes(group, &group->head->op);
}

static bool is_triggered(const tddp_cancel *cancel)
{
    return cancel && tddp_cancel_triggered(cancel);
}

/* Waits until the engine has tried the first work, or for a moment. With the lock held. */
static void await_poll(tddp_group *group)
{
    group->poll_waiters++;
    (void)tddp_cond_wait_until(&group->idle, &group->mutex,
                               tddp_deadline_after_ms(TDDP_GROUP_TOKEN_CHECK_MS));
    if (--group->poll_waiters == 0 && group->state >= TDDP_GROUP_ENDING) {
        pthread_cond_broadcast(&group->idle);
    }
}

void tddp_group_make_progress(tddp_work *work, tddp_cancel *cancel)
{
    if (tddp_op_is_p2p(work->op.kind)) {
        tddp_group_p2p_make_progress(work, cancel);
        return;
    }
    tddp_group *group = lock_group(work);
    if (group) {
        bool goes_on = true;
        while (goes_on && !atomic_load(&work->done) && !is_triggered(cancel)) {
            if (group->polling) {
                await_poll(group);
            } else {
                goes_on = may_execute_on_caller(group) && execute_next_on_caller(group, cancel, 1);
            }
        }
        tddp_group_provide_executor(group);
        tddp_group_wake_progress(group);
        pthread_mutex_unlock(&group->mutex);
    }
}

/* Has a thread execute the queue; without one, this one does for the first operation. With the lock
 * held, which is released meanwhile. */
static void execute_elsewhere(tddp_group *group)
{
    if (tddp_group_reserve_executor(group)) {
        const tddp_group *before = tddp_group_set_current(group);
        tddp_group_execute_next(group);
        (void)tddp_group_set_current(before);
    }
    tddp_group_wake_progress(group);
}

void tddp_group_provide_executor(tddp_group *group)
{
    if (!group->head || group->running || group->executor != TDDP_GROUP_NO_EXECUTOR ||
        group->state >= TDDP_GROUP_ENDING) {
        return;
    }
    /* What has failed is completed, if need be here; what hasn't goes on while it is waited for. */
    if (!may_execute_on_caller(group)) {
        execute_elsewhere(group);
    } else if (tddp_group_queue_is_polled(group) ? tddp_engine_start(group->engine)
                                                 : tddp_group_reserve_executor(group)) {
        tddp_log(TDDP_LOG_WARN, "group",
                 "operations of \"%s\" go on only while they are waited for: %s", group->name,
                 tddp_error_message());
    }
}

unsigned tddp_group_poll_queue(tddp_group *group)
{
    unsigned found = 0;
    pthread_mutex_lock(&group->mutex);
    if (tddp_group_queue_is_polled(group) && group->head && !group->running &&
        group->executor == TDDP_GROUP_NO_EXECUTOR && group->state < TDDP_GROUP_ENDING) {
        tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
        found = TDDP_GROUP_PROGRESSED;
        if (may_execute_on_caller(group)) {
            if (!execute_next_on_caller(group, &at_once, 0) && !group->head->pending_status) {
                found = TDDP_GROUP_WAITING;
            }
        } else {
            execute_elsewhere(group);
        }
        tddp_group_wake_progress(group);
    }
    pthread_mutex_unlock(&group->mutex);
    return found;
}

size_t tddp_group_op_bytes(const tddp_op *op)
{
    size_t count = op->input.count > op->output.count ? op->input.count : op->output.count;
    return count * tddp_dtype_size(op->input.dtype);
}

/* --- on the caller's stack ------------------------------------------------------------------- */

/* How long the caller may execute an operation within its call; false: not at all. `*until` is a
 * token for that. */
static bool limit_of(const tddp_work *work, const tddp_op_args *args, tddp_cancel *until)
{
    const size_t bytes = tddp_group_op_bytes(&work->op);
    if (args->inline_us <= 0) {
        return args->inline_us < 0;
    }
    int64_t us = args->inline_us < TDDP_GROUP_INLINE_US ? args->inline_us : TDDP_GROUP_INLINE_US;
    us += (int64_t)(bytes / BYTES_EACH_US);
    *until = (tddp_cancel){.fd = tddp_cancel_fd(args->cancel),
                           .also = args->cancel,
                           .deadline = tddp_now_ns() + us * 1000};
    return bytes <= TDDP_GROUP_INLINE_BYTES;
}

/* Acquires the queue for a new operation, if nothing is queued or running. */
static bool acquire_empty_queue(tddp_group *group, tddp_work *work)
{
    const int64_t now = tddp_now_ns();
    pthread_mutex_lock(&group->mutex);
    bool empty =
        !group->running && !group->head && !group->failure && group->state == TDDP_GROUP_OPEN;
    if (empty) {
        group->running = true;
        work->op.sequence = group->sequence + 1;
        group->sequence += work->steps;
        tddp_recorder_started(group, work, now);
        work->started = true;
    }
    pthread_mutex_unlock(&group->mutex);
    if (empty) { /* else it is queued, and its time has not begun */
        atomic_store_explicit(&work->expiry, tddp_deadline_from(now, work->op.timeout_ms),
                              memory_order_relaxed);
    }
    return empty;
}

/* Makes a work of what the caller has not finished, the first in the queue again. A failure is
 * completed by another thread, since that may take a while. Without memory for a work the caller
 * goes on to the end. */
static tddp_status leave_to_queue(tddp_group *group, tddp_work *here, tddp_work **out)
{
    tddp_work *work = NULL;
    tddp_status status = out ? tddp_group_work_move(here, &work) : TDDP_OK;
    if (!work) {
        status = here->pending_status ? tddp_group_kept_failure(here) : tddp_group_run(group, here);
        status = tddp_group_record_outcome(group, here, status);
    }
    pthread_mutex_lock(&group->mutex);
    if (work) {
        work->group = group;
        put_back(group, work);
    }
    if (out) {
        *out = work; /* NULL: it is done */
    }
    release_queue(group);
    tddp_group_provide_executor(group);
    tddp_group_wake_progress(group);
    pthread_mutex_unlock(&group->mutex);
    return status;
}

bool tddp_group_try_here(tddp_group *group, tddp_work *here, const tddp_op_args *args,
                         tddp_work **out, tddp_status *status)
{
    tddp_cancel until;
    tddp_cancel *cancel = !out ? NULL : args->inline_us > 0 ? &until : args->cancel;
    if ((out && !limit_of(here, args, &until)) || tddp_group_is_launched(group, &here->op) ||
        !(out ? op_resumes(group, &here->op) : group->resumes) || is_triggered(cancel) ||
        !acquire_empty_queue(group, here)) {
        return false;
    }
    tddp_group_span_queued(here);
    tddp_group_span_started(here);
    here->op.awaited = 1;
    here->op.cancel = cancel;
    tddp_status ended = tddp_group_run(group, here);
    here->op.cancel = NULL;
    if (ended) {
        if (ended != TDDP_CANCELED || !is_triggered(cancel)) {
            tddp_group_keep_failure(here, ended);
        }
        *status = leave_to_queue(group, here, out);
        return true;
    }
    *status = tddp_group_record_outcome(group, here, TDDP_OK);
    if (out) {
        *out = NULL;
    }
    pthread_mutex_lock(&group->mutex);
    release_queue(group);
    tddp_group_wake_progress(group);
    pthread_mutex_unlock(&group->mutex);
    return true;
}
