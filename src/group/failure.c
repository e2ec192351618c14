/*
 * What becomes of operations that fail, and of a group after the first of them. The thread whose
 * operation is the first to fail tells the other ranks, ends the connections, and learns from the
 * others what the cause is; operations that end or are queued meanwhile wait for its word.
 *
 * Invariant: `failure` is set once, by the first failure, and answers everything after it;
 * `settling` is set while its cause is being looked for and its text may still change, or the
 * flight recorder's file is being written. Every other error of the group waits for that, so that
 * nobody ends the process on account of one while a file is half written.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/recorder/recorder.h"
#include "group/failure_detector/detector.h"

enum { SETTLE_MS = 3000, LAST_MS = 200, LINGER_MS = 100, TEXT_BYTES = 4096 };

/* Whether the other ranks may be out of step after this. */
static bool breaks_group(tddp_status status)
{
    return status != TDDP_OK && status != TDDP_INVALID_ARGUMENT && status != TDDP_UNSUPPORTED;
}

/* Says which operation it was, and whose, before what is known of its failure. */
static tddp_status describe(const tddp_group *group, const tddp_op *op, tddp_status status,
                            const char *text)
{
    char name[TDDP_REPORT_OP_NAME_BYTES];
    return tddp_fail(status, "%s of group \"%s\" on rank %d of %d: %s",
                     tddp_status_report_op_name(op->kind, op->sequence, op->peer, name),
                     group->name, group->rank, group->world_size, text);
}

static void await_cause(tddp_group *group)
{
    int64_t deadline = tddp_deadline_after_ms(SETTLE_MS);
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
    await_cause(group);
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

/* The group's own end is no failure. With the lock held. */
static tddp_status end_early(const tddp_group *group, const tddp_op *op)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "aborted because the group was destroyed (%.2000s)",
                   tddp_error_message());
    return describe(group, op, TDDP_GROUP_CLOSED, text);
}

/* An operation that ended because the group has failed. Where ranks disagree, whoever told of it
 * first did not know yet what this one said. With the lock held. */
static tddp_status follow(tddp_group *group, const tddp_work *work)
{
    await_cause(group);
    tddp_status failure = group->failure;
    bool shared = group->failed_elsewhere || failure == TDDP_PEER_LOST || failure == TDDP_MISMATCH;
    char own[TDDP_RECORD_TEXT_BYTES + 2] = "";
    char text[TEXT_BYTES];
    if (failure == TDDP_MISMATCH && work->description) {
        (void)snprintf(own, sizeof own, "\"%s\"", work->description);
    }
    bool missing = !strstr(cause(group), own);
    (void)snprintf(text, sizeof text, "%s%s%s", cause(group),
                   missing ? "; this rank described its own as " : "", missing ? own : "");
    group->failure_returned = true;
    return describe(group, &work->op, shared ? failure : TDDP_GROUP_FAILED, text);
}

void tddp_group_abort(tddp_group *group)
{
    atomic_store(&group->aborted, true);
    group->backend->abort(group->context);
}

static void end_settling(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    group->failure_pending = false;
    pthread_cond_broadcast(&group->idle);
    pthread_mutex_unlock(&group->mutex);
}

/* The first failure of the group: it is ours to tell and to explain. */
static tddp_status lead(tddp_group *group, const tddp_work *work, tddp_status status)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    const tddp_op *op = &work->op;
    tddp_detector_report_failure(group, op, work->description, status, text);
    tddp_group_abort(group);
    status = tddp_detector_find_cause(group, op, work->description, status, text);
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    (void)describe(group, op, status, text);
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    char *kept = tddp_copy_string(text);
    pthread_mutex_lock(&group->mutex);
    group->failure = status;
    group->failure_text = kept;
    pthread_mutex_unlock(&group->mutex);
    return tddp_fail(status, "%s", text);
}

/* What the operation ends with, with its text on this thread; whether it is the group's `*first`,
 * and whether it `*writes` the flight recorder's file. */
static tddp_status settle(tddp_group *group, const tddp_work *work, tddp_status status, bool *first,
                          bool *writes)
{
    pthread_mutex_lock(&group->mutex);
    bool breaks = breaks_group(status);
    bool ending = group->state >= TDDP_GROUP_ENDING;
    *first = false;
    if (!breaks) {
        status = describe(group, &work->op, status, tddp_error_message());
    } else if (group->failure) {
        status = follow(group, work);
    } else if (ending) {
        status = end_early(group, &work->op);
    } else {
        *first = true;
        group->failure = status;
        group->failure_pending = true;
    }
    *writes = breaks && (*first || !group->dumped || !tddp_op_is_p2p(work->op.kind));
    group->dumped = group->dumped || *writes;
    pthread_mutex_unlock(&group->mutex);
    return *first ? lead(group, work, status) : status;
}

/* Ranks that disagree learn what the others said of their calls from the store, which may be this
 * process's and end with it: they get the time to read. */
static void linger(tddp_status status)
{
    if (status == TDDP_MISMATCH) {
        char text[TEXT_BYTES];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_status slept = tddp_net_sleep(tddp_deadline_after_ms(LINGER_MS), -1);
        (void)slept; /* nobody can wake it */
        (void)tddp_fail(status, "%s", text);
    }
}

tddp_status tddp_group_record_outcome(tddp_group *group, tddp_work *work, tddp_status status)
{
    bool first = false;
    bool writes = false;
    if (status) {
        status = settle(group, work, status, &first, &writes);
    }
    tddp_recorder_finished(group, work, status, status ? tddp_error_message() : NULL);
    tddp_group_span_ended(group, work, status);
    if (writes) {
        /* Before anybody learns of it and ends the process. */
        tddp_recorder_dump_failure(group);
    }
    if (first) {
        end_settling(group);
    }
    linger(status);
    return status;
}

void tddp_group_complete(tddp_group *group, tddp_work *work, tddp_status status)
{
    status = tddp_group_record_outcome(group, work, status);
    atomic_store(&group->completing, true);
    tddp_group_work_finish(work, status, status ? tddp_error_message() : NULL);
}

void tddp_group_complete_in_flight(tddp_group *group, tddp_work *work, tddp_status status)
{
    status = tddp_group_record_outcome(group, work, status);
    atomic_fetch_add(&group->in_flight_completing, 1);
    tddp_group_work_finish(work, status, status ? tddp_error_message() : NULL);
}

void tddp_group_fail(tddp_group *group, tddp_status status, const char *text)
{
    char *kept = tddp_copy_string(text);
    pthread_mutex_lock(&group->mutex);
    bool first = group->failure == TDDP_OK && group->state < TDDP_GROUP_ENDING;
    bool writes = false;
    if (first) {
        tddp_recorder_set_failure(group->recorder, status, text);
        group->failure = status;
        group->failure_text = kept;
        group->failed_elsewhere = true;
        kept = NULL;
        /* Another rank may be an operation further, and what runs here almost done: it may end
         * well. */
        (void)tddp_group_await_idle(group, tddp_deadline_after_ms(LAST_MS), NULL);
        writes = !group->dumped; /* else an operation has failed meanwhile, and does */
        group->dumped = true;
        group->failure_pending = writes;
    }
    pthread_mutex_unlock(&group->mutex);
    free(kept);
    if (writes) {
        tddp_recorder_dump_failure(group);
        end_settling(group);
    }
    if (first) {
        tddp_group_abort(group);
    }
}
