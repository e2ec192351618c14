/*
 * What becomes of operations that fail, and of a group after its first failure. The thread whose
 * operation fails first reports the failure to the other ranks, aborts the backend, and finds the
 * root cause in the other ranks' reports; operations that end or are submitted meanwhile wait for
 * it.
 *
 * Invariant: `failure` is set once, by the first failure, and all later operations fail because of
 * it. `failure_pending` is set while the root cause is not known, so that its text may still
 * change, or the flight recorder's file is being written. All other errors of the group wait for
 * that: a program that exits on one of them must not leave half a file.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "group/recorder/recorder.h"
#include "group/failure_detector/detector.h"

enum { CAUSE_WAIT_MS = 3000, LAST_OPS_MS = 200, READING_MS = 100, TEXT_BYTES = 4096 };

bool tddp_group_breaks(tddp_status status)
{
    return status != TDDP_OK && status != TDDP_INVALID_ARGUMENT && status != TDDP_UNSUPPORTED;
}

/* Puts the operation's name, group and rank in front of its failure's text. */
static tddp_status fail_op(const tddp_group *group, const tddp_op *op, tddp_status status,
                           const char *text)
{
    char name[TDDP_REPORT_OP_NAME_BYTES];
    return tddp_fail(status, "%s of group \"%s\" on rank %d of %d: %s",
                     tddp_status_report_op_name(op->kind, op->sequence, op->peer, name),
                     group->name, group->rank, group->world_size, text);
}

static void wait_for_cause(tddp_group *group)
{
    int64_t deadline = tddp_deadline_after_ms(CAUSE_WAIT_MS);
    while (group->failure_pending && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&group->idle, &group->mutex, deadline);
    }
}

static const char *cause(const tddp_group *group)
{
    return group->failure_text ? group->failure_text : tddp_status_text(group->failure);
}

tddp_status tddp_group_fail_unstarted(tddp_group *group, const char *operation)
{
    wait_for_cause(group);
    if (group->failed_elsewhere && !group->failure_returned) {
        group->failure_returned = true;
        return tddp_fail(group->failure,
                         "%s: group \"%s\" has failed on another rank: %s; destroy the group and "
                         "make a new one",
                         operation, group->name, cause(group));
    }
    return tddp_fail(TDDP_GROUP_FAILED,
                     "group \"%s\" has failed: %s (%s); destroy the group and make a new one",
                     group->name, cause(group), tddp_status_name(group->failure));
}

/* An operation that the group's shutdown aborts: no failure of the group. With the lock held. */
static tddp_status fail_closed(const tddp_group *group, const tddp_op *op)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "aborted because the group was destroyed (%.2000s)",
                   tddp_error_message());
    return fail_op(group, op, TDDP_GROUP_CLOSED, text);
}

/* An operation that fails because the group has failed. After a mismatch it adds this rank's
 * description, which the rank that reported the mismatch did not know yet. With the lock held. */
static tddp_status fail_after_first(tddp_group *group, const tddp_work *work)
{
    wait_for_cause(group);
    tddp_status failure = group->failure;
    bool shared = group->failed_elsewhere || failure == TDDP_PEER_LOST || failure == TDDP_MISMATCH;
    char described[TDDP_RECORD_TEXT_BYTES + 2] = "";
    char text[TEXT_BYTES];
    if (failure == TDDP_MISMATCH && work->description) {
        (void)snprintf(described, sizeof described, "\"%s\"", work->description);
    }
    bool missing = !strstr(cause(group), described);
    (void)snprintf(text, sizeof text, "%s%s%s", cause(group),
                   missing ? "; this rank described its own as " : "", missing ? described : "");
    group->failure_returned = true;
    return fail_op(group, &work->op, shared ? failure : TDDP_GROUP_FAILED, text);
}

static void end_pending(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    group->failure_pending = false;
    pthread_cond_broadcast(&group->idle);
    pthread_mutex_unlock(&group->mutex);
}

/* The group's first failure: reports it and finds its root cause. */
static tddp_status fail_first(tddp_group *group, const tddp_work *work, tddp_status status)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    const tddp_failure failure = {
        .op = work->op, .described = work->description, .status = status, .text = text};
    tddp_detector_report_failure(group, &failure);
    tddp_group_backends_abort(group);
    status = tddp_detector_find_cause(group, &failure);
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    status = fail_op(group, &work->op, status, text);
    char *text_copy = tddp_copy_string(tddp_error_message());
    pthread_mutex_lock(&group->mutex);
    group->failure = status;
    group->failure_text = text_copy;
    pthread_mutex_unlock(&group->mutex);
    return status;
}

/* Returns the status with which the operation fails, with its text on this thread; whether it is
 * the group's `*first` failure, and whether it `*dumps` the flight recorder. */
static tddp_status determine_failure(tddp_group *group, const tddp_work *work, tddp_status status,
                                     bool *first, bool *dumps)
{
    pthread_mutex_lock(&group->mutex);
    bool breaks = tddp_group_breaks(status);
    bool ending = group->state >= TDDP_GROUP_ENDING;
    *first = false;
    if (!breaks) {
        status = fail_op(group, &work->op, status, tddp_error_message());
    } else if (group->failure) {
        status = fail_after_first(group, work);
    } else if (ending) {
        status = fail_closed(group, &work->op);
    } else {
        *first = true;
        group->failure = status;
        group->failure_pending = true;
    }
    *dumps = breaks && (*first || !group->dumped || !tddp_op_is_p2p(work->op.kind));
    group->dumped = group->dumped || *dumps;
    pthread_mutex_unlock(&group->mutex);
    return *first ? fail_first(group, work, status) : status;
}

/* After a mismatch the other ranks read this rank's description from the store, which this process
 * may host and end: gives them time to read. */
static void let_others_read(tddp_status status)
{
    if (status == TDDP_MISMATCH) {
        (void)usleep(READING_MS * 1000); /* a signal may shorten it */
    }
}

tddp_status tddp_group_record_outcome(tddp_group *group, tddp_work *work, tddp_status status)
{
    bool first = false;
    bool dumps = false;
    if (status) {
        status = determine_failure(group, work, status, &first, &dumps);
    }
    tddp_recorder_finished(group, work, status, status ? tddp_error_message() : NULL);
    tddp_group_span_ended(group, work, status);
    if (dumps) {
        /* Before the failure is delivered: the program may exit on it. */
        tddp_recorder_dump_failure(group);
    }
    if (first) {
        end_pending(group);
    }
    let_others_read(status);
    return status;
}

void tddp_group_complete_in_flight(tddp_group *group, tddp_work *work, tddp_status status)
{
    status = tddp_group_record_outcome(group, work, status);
    atomic_fetch_add(&group->in_flight_completing, 1);
    tddp_group_work_finish(work, status, status ? tddp_error_message() : NULL);
}

void tddp_group_fail(tddp_group *group, tddp_status status, const char *text)
{
    char *text_copy = tddp_copy_string(text);
    pthread_mutex_lock(&group->mutex);
    bool first = group->failure == TDDP_OK && group->state < TDDP_GROUP_ENDING;
    bool dumps = false;
    if (first) {
        tddp_recorder_set_failure(group->recorder, text);
        group->failure = status;
        group->failure_text = text_copy;
        group->failed_elsewhere = true;
        text_copy = NULL;
        /* Another rank may be an operation ahead, so the one that runs here may still succeed. */
        (void)tddp_group_await_idle(group, tddp_deadline_after_ms(LAST_OPS_MS), NULL);
        dumps = !group->dumped; /* else an operation that failed meanwhile dumps it */
        group->dumped = true;
        group->failure_pending = dumps;
    }
    pthread_mutex_unlock(&group->mutex);
    free(text_copy);
    if (dumps) {
        tddp_recorder_dump_failure(group);
        end_pending(group);
    }
    if (first) {
        tddp_group_backends_abort(group);
    }
}
