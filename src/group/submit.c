/*
 * Submits operations. One that its caller waits for, or for which the caller allows some time, is
 * executed on the caller's stack, if nothing is ahead of it; what is unfinished then becomes a
 * work, the first of the queue. All others are queued as works, or launched on their device
 * (device.c). Entered by the threads that call.
 *
 * Invariant: `sequence` grows with each operation, in the order of the queue, by the steps that it
 * has (coalesce.c), so that equal calls have equal numbers on all ranks.
 */
#include "group/checks.h"
#include "group/recorder/recorder.h"

enum {
    BYTES_EACH_US = 4096, /* the memory that moves in a microsecond */
    /* Within a call with a limit: the longest, the most memory; the most of a message that is not
     * waited for at all. */
    LONGEST_US = 1000 * 1000,
    MOST_BYTES = 4 << 20,
    MOST_BYTES_AT_ONCE = 64 << 10,
};

static size_t bytes_of(const tddp_op *op)
{
    const size_t count = op->input.count > op->output.count ? op->input.count : op->output.count;
    return count * tddp_dtype_size(op->input.dtype);
}

bool tddp_group_limit_of(const tddp_op *op, const tddp_op_args *args, tddp_cancel *until,
                         tddp_cancel **cancel)
{
    const size_t bytes = bytes_of(op);
    *cancel = args->cancel;
    if (args->inline_us < 0) {
        return true;
    }
    int64_t us = args->inline_us < LONGEST_US ? args->inline_us : LONGEST_US;
    *cancel = until;
    *until = (tddp_cancel){.fd = tddp_cancel_fd(args->cancel), .also = args->cancel, .deadline = 1};
    if (us == 0) {
        return tddp_op_is_p2p(op->kind) && bytes <= MOST_BYTES_AT_ONCE;
    }
    us += (int64_t)(bytes / BYTES_EACH_US);
    until->deadline = tddp_now_ns() + us * 1000;
    return bytes <= MOST_BYTES;
}

/* With the lock held. */
static void number(tddp_group *group, tddp_work *work)
{
    work->op.sequence = group->sequence + 1;
    group->sequence += work->steps;
    group->in_flight++;
}

/* --- on the caller's stack ------------------------------------------------------------------- */

/* Begins a new operation, if none is queued or under way. */
static bool begin_here(tddp_group *group, tddp_work *work)
{
    const int64_t now = tddp_now_ns();
    pthread_mutex_lock(&group->mutex);
    bool begins =
        !group->running && !group->queue.head && !group->failure && group->state == TDDP_GROUP_OPEN;
    if (begins) {
        group->running = true;
        number(group, work);
        tddp_recorder_started(group, work, now);
        work->started = true;
    }
    pthread_mutex_unlock(&group->mutex);
    if (begins) { /* else it is queued, and its time has not begun */
        atomic_store_explicit(&work->expiry, tddp_deadline_from(now, work->op.timeout_ms),
                              memory_order_relaxed);
        tddp_group_span_queued(work);
        tddp_group_span_started(work);
    }
    return begins;
}

/* Records the outcome of an operation that no other thread knows of. */
static tddp_status end_here(tddp_group *group, tddp_work *here)
{
    tddp_status status = here->pending_status ? tddp_group_kept_failure(here) : TDDP_OK;
    status = tddp_group_record_outcome(group, here, status);
    pthread_mutex_lock(&group->mutex);
    tddp_group_ended(group, true);
    tddp_group_wake_engine(group);
    pthread_mutex_unlock(&group->mutex);
    return status;
}

/* Makes a work of what its caller has not finished, or what has failed, since to complete that may
 * take a while. Without memory for a work the caller goes on to the end. */
static tddp_status leave_unfinished(tddp_group *group, tddp_work *here, bool ended, tddp_work **out)
{
    tddp_work *work;
    if (tddp_group_work_move(here, &work)) {
        (void)(ended || tddp_group_execute(group, here, NULL, 1));
        return end_here(group, here);
    }
    *out = work;
    work->group = group;
    pthread_mutex_lock(&group->mutex);
    if (ended) {
        tddp_group_complete_ended(group, work);
    } else {
        tddp_work_list_prepend(&group->queue, work);
        group->running = false;
    }
    tddp_group_wake_engine(group);
    pthread_mutex_unlock(&group->mutex);
    return TDDP_OK;
}

/* False: nothing was done, since its options, its kind or others that are ahead of it don't allow
 * that. Without `out` it is done, with its outcome as the status. */
static bool try_here(tddp_group *group, tddp_work *here, const tddp_op_args *args, tddp_work **out,
                     tddp_status *status)
{
    tddp_cancel until;
    tddp_cancel *cancel = NULL;
    if ((out && !tddp_group_limit_of(&here->op, args, &until, &cancel)) ||
        (group->launches && tddp_group_is_launched(group, &here->op)) ||
        (cancel && tddp_cancel_triggered(cancel)) || !begin_here(group, here)) {
        return false;
    }
    const bool ended = tddp_group_execute(group, here, cancel, 1);
    if (out && (!ended || here->pending_status)) {
        *out = NULL;
        *status = leave_unfinished(group, here, ended, out);
        return true;
    }
    if (out) {
        *out = NULL;
    }
    *status = end_here(group, here);
    return true;
}

/* --- the queue ------------------------------------------------------------------------------- */

static tddp_status enqueue(tddp_group *group, tddp_work *work)
{
    work->group = group;
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, tddp_op_name(work->op.kind));
    if (status == TDDP_OK) {
        number(group, work);
        tddp_recorder_queued(group, work);
        tddp_group_span_queued(work);
        tddp_work_list_append(&group->queue, work);
        tddp_group_wake_engine(group);
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
    if (!try_here(group, here, args, out, &status)) {
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
