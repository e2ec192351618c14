/*
 * Whose turn it is to carry out a group's operations: the progress thread's or, with a backend that
 * bears it (TDDP_BACKEND_RESUMES), that of a thread that submits or waits for one of them. It saves
 * two changes of threads, which take longer than small operations do. Entered by the progress
 * thread and by those others.
 *
 * Invariants: one thread at a time has the turn (`running`), and the queue is carried out in order
 * whoever has it. While the turn is taken, or a work in the queue is not done, the group does not
 * go: its end waits for both. Whatever is in the queue the progress thread executes unless another
 * thread is faster: a thread that queues something or ends its turn wakes it, so that leaving a
 * wait early never leaves an operation to nobody.
 * Operations that fail are concluded on threads of the group's, or on that of a caller who has no
 * other way to go: it takes its time.
 *
 * Locks are taken in the order work, group.
 */
#include <stdlib.h>

#include <tddp/cuda.h>

#include "group/recorder/recorder.h"

/* So many works are looked at for somebody who waits. */
enum { LOOKS_AHEAD = 32 };

/* Of an operation that is executed inline for a limited time: the longest wait, the most memory,
 * and how much of it a microsecond moves. */
enum { MOST_US = 1000 * 1000, MOST_BYTES = 4 << 20, BYTES_EACH_US = 4096 };

bool tddp_group_resumes(const tddp_group *group)
{
    return group->backend->traits & TDDP_BACKEND_RESUMES;
}

/* The group whose thread this is, or as whose it acts; NULL on all other threads. */
static _Thread_local const tddp_group *acting;

bool tddp_group_on_progress_thread(const tddp_group *group)
{
    return acting == group;
}

void tddp_group_enter_thread(const tddp_group *group)
{
    acting = group;
    tddp_cuda_keep_device();
}

/* Whether anybody waits for this work or one behind it: the thread that waits leaves its core to
 * the one that works. With the lock held. */
static int awaited(const tddp_work *work)
{
    for (int i = 0; work && i < LOOKS_AHEAD; i++, work = work->next) {
        if (atomic_load_explicit(&work->waiters, memory_order_relaxed) > 0) {
            return 1;
        }
    }
    return 0;
}

static void begin(tddp_group *group, tddp_work *work)
{
    if (!work->started) {
        int64_t now = tddp_now_ns();
        atomic_store(&work->expiry, tddp_deadline_from(now, work->op.timeout_ms));
        tddp_recorder_started(group, work, now);
        tddp_group_span_started(work);
        work->started = true;
    }
}

/* What the backend said of it on a thread that cannot conclude it. */
static void keep_failure(tddp_work *work, tddp_status status)
{
    work->pending_status = status;
    work->pending_text = tddp_copy_string(tddp_error_message());
}

static tddp_status failure_kept(const tddp_work *work)
{
    return tddp_fail(work->pending_status, "%s",
                     work->pending_text ? work->pending_text
                                        : tddp_status_text(work->pending_status));
}

/* On a thread of the group's, whose reference to the work ends. */
static void carry_out(tddp_group *group, tddp_work *work)
{
    begin(group, work);
    if (work->on_device) {
        tddp_group_device_carry_out(group, work);
        return;
    }
    tddp_status status = work->pending_status ? failure_kept(work) : tddp_group_run(group, work);
    tddp_group_complete(group, work, status);
    tddp_work_release(work);
}

/* On one that waits: false if it is not over, since the token ended it or the outcome is still to
 * be told. */
static bool carry_out_here(tddp_group *group, tddp_work *work, tddp_cancel *cancel)
{
    begin(group, work);
    work->op.cancel = cancel;
    tddp_status status = tddp_group_run(group, work);
    work->op.cancel = NULL;
    if (status) {
        if (status != TDDP_CANCELED || !cancel || !tddp_cancel_triggered(cancel)) {
            keep_failure(work, status);
        }
        return false;
    }
    const tddp_group *before = acting;
    acting = group;
    tddp_group_complete(group, work, TDDP_OK);
    acting = before;
    return true;
}

static tddp_work *take_first(tddp_group *group)
{
    tddp_work *work = group->head;
    group->head = work->next;
    if (!group->head) {
        group->tail = NULL;
    }
    group->running = true;
    return work;
}

static void put_first(tddp_group *group, tddp_work *work)
{
    work->next = group->head;
    group->head = work;
    if (!group->tail) {
        group->tail = work;
    }
}

static void end_turn(tddp_group *group)
{
    group->running = false;
    atomic_store(&group->completing, false);
    if (!group->head) {
        pthread_cond_broadcast(&group->idle);
    }
}

void tddp_group_wake_progress(tddp_group *group)
{
    if (!group->running && (group->head || group->state >= TDDP_GROUP_ENDING)) {
        pthread_cond_signal(&group->wake);
    }
}

void tddp_group_execute_next(tddp_group *group)
{
    tddp_work *work = take_first(group);
    /* What has failed here is told so, also if another rank was faster to tell. */
    tddp_status status =
        work->pending_status ? TDDP_OK : tddp_group_check_runnable(group, &work->op);
    work->op.awaited = awaited(work);
    pthread_mutex_unlock(&group->mutex);
    if (status) {
        if (work->on_device) {
            tddp_group_device_drop(group, work);
        }
        tddp_recorder_finished(group, work, status, tddp_error_message());
        tddp_group_work_finish(work, status, tddp_error_message());
        tddp_work_release(work);
    } else {
        carry_out(group, work);
    }
    pthread_mutex_lock(&group->mutex);
    end_turn(group);
}

/* A turn on a thread that waits; false if the work is the first in the queue again. */
static bool turn_here(tddp_group *group, tddp_cancel *cancel)
{
    tddp_work *work = take_first(group);
    work->op.awaited = 1;
    pthread_mutex_unlock(&group->mutex);
    bool over = carry_out_here(group, work, cancel);
    if (over) {
        tddp_work_release(work);
    }
    pthread_mutex_lock(&group->mutex);
    if (!over) {
        put_first(group, work);
    }
    end_turn(group);
    return over;
}

/* The group of a work that is not done, with its lock held; NULL: it is done, or has none. */
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

/* Nothing stands against carrying out the first of the queue on a thread that waits. */
static bool is_free(const tddp_group *group)
{
    return !group->running && group->head && !group->head->pending_status &&
           !group->head->on_device && !group->failure && group->state < TDDP_GROUP_ENDING;
}

static bool ended(const tddp_cancel *cancel)
{
    return cancel && tddp_cancel_triggered(cancel);
}

void tddp_group_make_progress(tddp_work *work, tddp_cancel *cancel)
{
    tddp_group *group = lock_group(work);
    if (group) {
        while (!atomic_load(&work->done) && is_free(group) && !ended(cancel) &&
               turn_here(group, cancel)) {
        }
        tddp_group_wake_progress(group);
        pthread_mutex_unlock(&group->mutex);
    }
}

static size_t bytes_of(const tddp_op *op)
{
    size_t count = op->input.count > op->output.count ? op->input.count : op->output.count;
    return count * tddp_dtype_size(op->input.dtype);
}

void tddp_group_run_inline(tddp_group *group, const tddp_work *work, int64_t inline_us,
                           tddp_cancel *cancel)
{
    if (inline_us == 0 || !tddp_group_resumes(group) || group->head != work || !is_free(group) ||
        ended(cancel)) {
        return;
    }
    if (inline_us < 0) {
        (void)turn_here(group, cancel);
        return;
    }
    size_t bytes = bytes_of(&work->op);
    if (bytes <= MOST_BYTES) {
        int64_t us = inline_us < MOST_US ? inline_us : MOST_US;
        us += (int64_t)(bytes / BYTES_EACH_US);
        tddp_cancel until = {
            .fd = tddp_cancel_fd(cancel), .also = cancel, .deadline = tddp_now_ns() + us * 1000};
        (void)turn_here(group, &until);
    }
}

/* Takes the turn for a new operation, if nothing is before it. */
static bool take_turn(tddp_group *group, tddp_work *work)
{
    int64_t now = tddp_now_ns();
    pthread_mutex_lock(&group->mutex);
    bool free =
        !group->running && !group->head && !group->failure && group->state == TDDP_GROUP_OPEN;
    if (free) {
        group->running = true;
        work->op.sequence = ++group->sequence;
        tddp_recorder_queued_and_started(group, work, now);
        work->started = true;
    }
    pthread_mutex_unlock(&group->mutex);
    return free;
}

bool tddp_group_run_unqueued(tddp_group *group, tddp_work *work, tddp_status *status)
{
    work->op.awaited = 1;
    if (!take_turn(group, work)) {
        return false;
    }
    tddp_group_span_queued(work);
    tddp_group_span_started(work);
    *status = tddp_group_record_outcome(group, work, tddp_group_run(group, work));
    pthread_mutex_lock(&group->mutex);
    end_turn(group);
    tddp_group_wake_progress(group);
    pthread_mutex_unlock(&group->mutex);
    return true;
}
