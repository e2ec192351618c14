/*
 * The failure detector's watcher thread: waits for failure notices at the store, publishes this
 * rank's failures, collects the ranks' reports, and fails a group here that failed on another rank.
 *
 * Invariant: while an entry is `busy` it stays in the list, its group stays alive, and its
 * description of the failed operation does not change. The lock is not held while a store or a
 * group is called.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/on_demand.h"
#include "group/failure_detector/root_cause.h"
#include "group/failure_detector/detector_state.h"

enum {
    CONNECT_MS = 5000,
    NOTICE_WAIT_MS = 600 * 1000,
    PAUSE_MS = 10, /* between two reads of a log, doubled each time */
    LONGEST_PAUSE_MS = 100,
    LOG_BYTES = 4 << 20, /* the size to which all ranks' reports may add up */
    LEAST_REPORT_BYTES = 100,
    MOST_REPORT_BYTES = 900,
};

/* --- for one group --------------------------------------------------------------------------- */

static void lose_store(tddp_detector *detector)
{
    tddp_log(TDDP_LOG_DEBUG, "group", "the failure detector has lost the store: %s",
             tddp_error_message());
    pthread_mutex_lock(&detector->mutex);
    detector->store_lost = true;
    pthread_cond_broadcast(&detector->changed);
    pthread_mutex_unlock(&detector->mutex);
}

/* Formats this rank's operations in the job's other groups. */
static void describe_other_groups(tddp_detector *detector, const tddp_detector_entry *self,
                                  char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    pthread_mutex_lock(&detector->mutex);
    for (const tddp_detector_entry *each = detector->entries; each && used < size;
         each = each->next) {
        tddp_recorder_position position = tddp_recorder_read_position(each->group->recorder);
        const tddp_recorder_op_summary *op =
            position.current.any ? &position.current : &position.message;
        if (each != self && op->any) {
            char name[TDDP_REPORT_OP_NAME_BYTES];
            int length =
                snprintf(text + used, size - used, "%sin group \"%.64s\" in %s for %.1f s",
                         used ? ", " : "", each->group->name,
                         tddp_status_report_op_name(op->kind, op->sequence, op->peer, name),
                         (double)(tddp_now_ns() - op->at_ns) / 1e9);
            used += (size_t)length;
        }
    }
    pthread_mutex_unlock(&detector->mutex);
}

/* Reports the failed operation as the current one: others may run beside it. */
static void set_failed_operation(const tddp_detector_entry *self, tddp_recorder_position *position)
{
    tddp_recorder_op_summary *current = &position->current;
    if (current->any && current->kind == self->op.kind && current->sequence == self->op.sequence) {
        return;
    }
    *current = (tddp_recorder_op_summary){.any = true,
                                          .kind = self->op.kind,
                                          .sequence = self->op.sequence,
                                          .peer = self->op.peer,
                                          .at_ns = tddp_now_ns()};
    (void)snprintf(current->text, sizeof current->text, "%s",
                   self->described ? self->described : "");
}

static tddp_status append_report(tddp_detector *detector, const tddp_detector_entry *self,
                                 tddp_status_report_kind kind)
{
    const tddp_group *group = self->group;
    char other_groups[256];
    tddp_bytes line = {0};
    tddp_recorder_position position = tddp_recorder_read_position(group->recorder);
    bool failed = kind == TDDP_REPORT_FAILURE;
    if (failed) {
        set_failed_operation(self, &position);
    }
    describe_other_groups(detector, self, other_groups, sizeof other_groups);
    size_t most = (size_t)(LOG_BYTES / group->world_size);
    most = most < LEAST_REPORT_BYTES  ? LEAST_REPORT_BYTES
           : most > MOST_REPORT_BYTES ? MOST_REPORT_BYTES
                                      : most;
    tddp_status status = tddp_status_report_write(
        &line, kind, group->rank, failed ? self->status : TDDP_OK, &position, other_groups,
        failed && self->text ? self->text : "", most);
    if (status == TDDP_OK) {
        status = tddp_notice_append_report(detector->store, self->key, &line);
    }
    tddp_bytes_free(&line);
    return status;
}

static void report_failure(tddp_detector *detector, tddp_detector_entry *self)
{
    if (!detector->store_lost) {
        tddp_status status = append_report(detector, self, TDDP_REPORT_FAILURE);
        if (status == TDDP_OK) {
            status = tddp_notice_publish(detector->store, TDDP_NOTICE_FAILURE, self->key);
        }
        if (status && status != TDDP_OUT_OF_MEMORY) {
            lose_store(detector);
        }
    }
    pthread_mutex_lock(&detector->mutex);
    self->stage = TDDP_DETECTOR_REPORTED;
    pthread_cond_broadcast(&detector->changed);
    pthread_mutex_unlock(&detector->mutex);
}

static bool find_cause(tddp_detector *detector, tddp_detector_entry *self, char *log,
                       tddp_status *cause)
{
    const tddp_group *group = self->group;
    size_t count = (size_t)group->world_size;
    tddp_status_report *reports = tddp_alloc_array(count, sizeof *reports);
    if (!reports) {
        *cause = tddp_fail(self->failed_here ? self->status : TDDP_PEER_LOST, "%s",
                           self->failed_here && self->text ? self->text : "out of memory");
        return true;
    }
    tddp_status_report_read(log, reports, group->world_size);
    tddp_failure_evidence evidence = {
        .peers = group->peers,
        .rank = group->rank,
        .op = self->failed_here ? &self->op : NULL,
        .described = self->described,
        .status = self->failed_here ? self->status : TDDP_OK,
        .text = self->failed_here && self->text ? self->text : "",
        .reports = reports,
        .store_lost = detector->store_lost,
        .deadline_over = tddp_now_ns() >= self->deadline,
    };
    bool found = tddp_root_cause_find(&evidence, cause);
    free(reports);
    return found;
}

/* Finds the group's root cause if the reports suffice. True if it failed the group here, which
 * takes a while where an operation is about to end. */
static bool resolve(tddp_detector *detector, tddp_detector_entry *self)
{
    char *log = NULL;
    if (!detector->store_lost) {
        tddp_status status = tddp_notice_read_reports(detector->store, self->key, &log);
        if (status && status != TDDP_OUT_OF_MEMORY) {
            lose_store(detector);
        }
    }
    tddp_status cause;
    bool found = find_cause(detector, self, log, &cause);
    free(log);
    if (!found) {
        return false;
    }
    char *text = tddp_copy_string(tddp_error_message());
    pthread_mutex_lock(&detector->mutex);
    bool fails = self->stage == TDDP_DETECTOR_NOTIFIED;
    self->cause = cause;
    free(self->cause_text);
    self->cause_text = text;
    self->stage = TDDP_DETECTOR_RESOLVED;
    pthread_cond_broadcast(&detector->changed);
    pthread_mutex_unlock(&detector->mutex);
    if (fails) {
        tddp_group_fail(self->group, cause, text ? text : tddp_status_text(cause));
    }
    return fails;
}

static void report_position(tddp_detector *detector, tddp_detector_entry *self)
{
    self->position_reported = true;
    tddp_status status = append_report(detector, self, TDDP_REPORT_POSITION);
    if (status && status != TDDP_OUT_OF_MEMORY) {
        lose_store(detector);
    }
}

/* Replies to notices first: the other ranks wait for the replies a short time only. With the lock
 * held, which is released meanwhile. */
static void report_positions(tddp_detector *detector)
{
    for (tddp_detector_entry *each = detector->entries; each; each = each->next) {
        if (each->stage != TDDP_DETECTOR_NOTIFIED || each->position_reported) {
            continue;
        }
        each->busy = true;
        pthread_mutex_unlock(&detector->mutex);
        report_position(detector, each);
        pthread_mutex_lock(&detector->mutex);
        each->busy = false;
        pthread_cond_broadcast(&detector->changed);
    }
}

/* Asks all ranks to connect, or connects if one has asked before this rank watched the group. */
static void process_connect(tddp_detector *detector, const tddp_detector_entry *self, bool asks)
{
    tddp_on_demand *on_demand = self->group->on_demand;
    tddp_status status = TDDP_NETWORK;
    bool asked = false;
    if (!detector->store_lost) {
        status = asks ? tddp_notice_publish(detector->store, TDDP_NOTICE_CONNECT, self->key)
                      : tddp_notice_was_published(detector->store, TDDP_NOTICE_CONNECT, self->key,
                                                  &asked);
    }
    if (status == TDDP_OK && (asks || asked)) {
        tddp_on_demand_start(on_demand);
    } else if (status) {
        tddp_on_demand_fail(on_demand, status,
                            "the ranks of several hosts cannot connect: the store, in which they "
                            "agree on that, cannot be reached any more");
        if (!detector->store_lost && status != TDDP_OUT_OF_MEMORY) {
            lose_store(detector);
        }
    }
}

/* The same for all groups. With the lock held, which is released meanwhile. */
static void process_connects(tddp_detector *detector)
{
    for (tddp_detector_entry *each = detector->entries; each; each = each->next) {
        const bool asks = each->asks;
        if (!asks && !each->unchecked) {
            continue;
        }
        each->asks = each->unchecked = false;
        each->busy = true;
        pthread_mutex_unlock(&detector->mutex);
        process_connect(detector, each, asks);
        pthread_mutex_lock(&detector->mutex);
        each->busy = false;
        pthread_cond_broadcast(&detector->changed);
    }
}

/* Does what the entry's stage requires; true if the entry has to be processed again soon. The entry
 * is busy meanwhile. */
static bool process(tddp_detector *detector, tddp_detector_entry *self, tddp_detector_stage stage,
                    bool leaving, bool *failed)
{
    if (leaving && !detector->store_lost && stage == TDDP_DETECTOR_IDLE &&
        append_report(detector, self, TDDP_REPORT_LEFT) == TDDP_NETWORK) {
        lose_store(detector);
    }
    switch (stage) {
    case TDDP_DETECTOR_UNREPORTED:
        report_failure(detector, self);
        *failed = resolve(detector, self);
        break;
    case TDDP_DETECTOR_NOTIFIED:
    case TDDP_DETECTOR_REPORTED:
        *failed = resolve(detector, self);
        break;
    default:
        break;
    }
    pthread_mutex_lock(&detector->mutex);
    bool again = self->stage != TDDP_DETECTOR_IDLE && self->stage != TDDP_DETECTOR_RESOLVED;
    pthread_mutex_unlock(&detector->mutex);
    return again;
}

/* Processes every entry that needs it; true if one has to be processed again soon. Stops after an
 * entry whose group it failed, with `pause_ms` 0: notices may have come meanwhile. With the lock
 * held, which is released meanwhile. */
static bool process_all(tddp_detector *detector, int64_t *pause_ms)
{
    bool again = false;
    bool failed = false;
    report_positions(detector);
    process_connects(detector);
    for (tddp_detector_entry *each = detector->entries; each && !failed; each = each->next) {
        bool leaving = each->leaving;
        bool unchanged = each->stage == TDDP_DETECTOR_IDLE || each->stage == TDDP_DETECTOR_RESOLVED;
        if (unchanged && !leaving) {
            continue;
        }
        tddp_detector_stage stage = each->stage;
        each->busy = true;
        pthread_mutex_unlock(&detector->mutex);
        bool unfinished = process(detector, each, stage, leaving, &failed);
        pthread_mutex_lock(&detector->mutex);
        again = unfinished || again;
        each->busy = false;
        each->leaving = false;
        pthread_cond_broadcast(&detector->changed);
    }
    *pause_ms = failed ? 0 : *pause_ms;
    return again || failed;
}

/* --- the thread ------------------------------------------------------------------------------ */

static void receive_notice(tddp_detector *detector, tddp_notice_kind kind, const char *key)
{
    pthread_mutex_lock(&detector->mutex);
    for (tddp_detector_entry *each = detector->entries; each; each = each->next) {
        if (strcmp(each->key, key) != 0) {
            continue;
        }
        if (kind == TDDP_NOTICE_CONNECT) {
            tddp_on_demand_start(each->group->on_demand);
        } else if (kind == TDDP_NOTICE_FAILURE && each->stage == TDDP_DETECTOR_IDLE) {
            each->stage = TDDP_DETECTOR_NOTIFIED;
            each->deadline = tddp_deadline_after_ms(TDDP_DETECTOR_REPLY_MS);
        }
    }
    pthread_mutex_unlock(&detector->mutex);
}

/* Waits for the next notice, or to be woken; with `again` no longer than the pause. Receives all
 * notices that are there: many groups may fail at once, and replies are waited for a short time
 * only. */
static void wait_for_notices(tddp_detector *detector, bool again, int64_t pause_ms)
{
    tddp_wait wait = {again ? 0 : NOTICE_WAIT_MS, detector->wake};
    if (again || detector->store_lost) {
        int64_t until = tddp_deadline_after_ms(again ? pause_ms : NOTICE_WAIT_MS);
        if (tddp_net_sleep(until, tddp_cancel_fd(detector->wake)) || detector->store_lost) {
            return;
        }
    }
    tddp_status status;
    do {
        char *key;
        tddp_notice_kind kind;
        status =
            tddp_notice_wait(detector->store, detector->notices_received + 1, &wait, &kind, &key);
        if (status == TDDP_OK) {
            detector->notices_received++;
            receive_notice(detector, kind, key);
            free(key);
        }
        wait.timeout_ms = 0;
    } while (status == TDDP_OK);
    if (status != TDDP_TIMEOUT && status != TDDP_CANCELED && status != TDDP_OUT_OF_MEMORY) {
        lose_store(detector);
    }
}

/* Opens the watcher's connection on its own thread: creating a group does not wait for it. */
static void open_connection(tddp_detector *detector)
{
    tddp_store *store;
    tddp_status status;
    bool ended = false;
    do {
        tddp_wait wait = {CONNECT_MS, detector->wake};
        status = tddp_store_clone(detector->base, &wait, &store);
        pthread_mutex_lock(&detector->mutex);
        ended = detector->ended;
        if (status == TDDP_CANCELED && !ended) {
            tddp_cancel_reset(detector->wake); /* the changed entries are processed afterwards */
        }
        pthread_mutex_unlock(&detector->mutex);
    } while (status == TDDP_CANCELED && !ended);
    if (status == TDDP_OK) {
        detector->store = store;
    } else {
        lose_store(detector);
    }
}

void *tddp_detector_run_watcher(void *data)
{
    tddp_detector *detector = data;
    int64_t pause = PAUSE_MS;
    open_connection(detector);
    pthread_mutex_lock(&detector->mutex);
    while (!detector->ended) {
        tddp_cancel_reset(detector->wake);
        bool again = process_all(detector, &pause);
        bool ended = detector->ended;
        pthread_mutex_unlock(&detector->mutex);
        if (!ended) {
            wait_for_notices(detector, again, pause);
        }
        pause = !again || pause == 0           ? PAUSE_MS
                : pause < LONGEST_PAUSE_MS / 2 ? 2 * pause
                                               : LONGEST_PAUSE_MS;
        pthread_mutex_lock(&detector->mutex);
    }
    pthread_mutex_unlock(&detector->mutex);
    return NULL;
}
