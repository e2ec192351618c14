/*
 * The watch's thread: listens for alarms, and does for the groups what their failures need. It
 * tells the others, gathers what they say, and has a group fail here that has failed elsewhere.
 *
 * Invariant: an entry stays in the list, and its group alive, while `busy`; what an entry says of
 * an operation does not change meanwhile. The lock is not held while a store or a group is called.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/failure_detector/root_cause.h"
#include "group/failure_detector/detector_state.h"

enum {
    CONNECT_MS = 5000,
    LISTEN_MS = 600 * 1000,
    PAUSE_MS = 10, /* between two looks into the log, longer each time */
    LONG_PAUSE_MS = 100,
    LOG_BYTES = 4 << 20, /* what a log of all ranks may come to */
    LEAST_BYTES = 100,
    MOST_BYTES = 900,
};

/* --- for one group --------------------------------------------------------------------------- */

static void go_deaf(tddp_detector *watch)
{
    tddp_log(TDDP_LOG_DEBUG, "group", "the watch hears nothing any more: %s", tddp_error_message());
    pthread_mutex_lock(&watch->mutex);
    watch->deaf = true;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
}

/* What this rank does in the job's other groups. */
static void describe_elsewhere(tddp_detector *watch, const tddp_detector_entry *self, char *text,
                               size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    pthread_mutex_lock(&watch->mutex);
    for (const tddp_detector_entry *each = watch->entries; each && used < size; each = each->next) {
        tddp_recorder_position where = tddp_recorder_read_position(each->group->recorder);
        const tddp_recorder_op_summary *now = where.current.any ? &where.current : &where.message;
        if (each != self && now->any) {
            char op[TDDP_REPORT_OP_NAME_BYTES];
            int length =
                snprintf(text + used, size - used, "%sin group \"%.64s\" in %s for %.1f s",
                         used ? ", " : "", each->group->name,
                         tddp_status_report_op_name(now->kind, now->sequence, now->peer, op),
                         (double)(tddp_now_ns() - now->at_ns) / 1e9);
            used += (size_t)length;
        }
    }
    pthread_mutex_unlock(&watch->mutex);
}

/* The place of a failure is the operation that failed, which others may run beside. */
static void put_own_operation(const tddp_detector_entry *self, tddp_recorder_position *where)
{
    tddp_recorder_op_summary *current = &where->current;
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

static tddp_status say(tddp_detector *watch, const tddp_detector_entry *self,
                       tddp_status_report_kind kind)
{
    const tddp_group *group = self->group;
    char elsewhere[256];
    tddp_bytes line = {0};
    tddp_recorder_position where = tddp_recorder_read_position(group->recorder);
    bool failed = kind == TDDP_REPORT_FAILURE;
    if (failed) {
        put_own_operation(self, &where);
    }
    describe_elsewhere(watch, self, elsewhere, sizeof elsewhere);
    size_t most = (size_t)(LOG_BYTES / group->world_size);
    most = most < LEAST_BYTES ? LEAST_BYTES : most > MOST_BYTES ? MOST_BYTES : most;
    tddp_status status =
        tddp_status_report_write(&line, kind, group->rank, failed ? self->status : TDDP_OK, &where,
                                 elsewhere, failed && self->text ? self->text : "", most);
    if (status == TDDP_OK) {
        status = tddp_notice_append_report(watch->store, self->key, &line);
    }
    tddp_bytes_free(&line);
    return status;
}

static void tell(tddp_detector *watch, tddp_detector_entry *self)
{
    if (!watch->deaf) {
        tddp_status status = say(watch, self, TDDP_REPORT_FAILURE);
        if (status == TDDP_OK) {
            status = tddp_notice_publish(watch->store, self->key);
        }
        if (status && status != TDDP_OUT_OF_MEMORY) {
            go_deaf(watch);
        }
    }
    pthread_mutex_lock(&watch->mutex);
    self->stage = TDDP_DETECTOR_REPORTED;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
}

static bool consider(tddp_detector *watch, tddp_detector_entry *self, char *log,
                     tddp_status *verdict)
{
    const tddp_group *group = self->group;
    size_t count = (size_t)group->world_size;
    tddp_status_report *accounts = tddp_alloc_array(count, sizeof *accounts);
    if (!accounts) {
        *verdict = tddp_fail(self->own ? self->status : TDDP_PEER_LOST, "%s",
                             self->own && self->text ? self->text : "out of memory");
        return true;
    }
    tddp_status_report_read(log, accounts, group->world_size);
    tddp_failure_evidence evidence = {
        .peers = group->peers,
        .rank = group->rank,
        .op = self->own ? &self->op : NULL,
        .described = self->described,
        .status = self->own ? self->status : TDDP_OK,
        .text = self->own && self->text ? self->text : "",
        .accounts = accounts,
        .deaf = watch->deaf,
        .last = tddp_now_ns() >= self->deadline,
    };
    bool clear = tddp_root_cause_find(&evidence, verdict);
    free(accounts);
    return clear;
}

/* True if it has had the group fail here, which takes its time where an operation is almost done.
 */
static bool explain(tddp_detector *watch, tddp_detector_entry *self)
{
    char *log = NULL;
    if (!watch->deaf) {
        tddp_status status = tddp_notice_read_reports(watch->store, self->key, &log);
        if (status && status != TDDP_OUT_OF_MEMORY) {
            go_deaf(watch);
        }
    }
    tddp_status verdict;
    bool clear = consider(watch, self, log, &verdict);
    free(log);
    if (!clear) {
        return false;
    }
    char *text = tddp_copy_string(tddp_error_message());
    pthread_mutex_lock(&watch->mutex);
    bool fails = self->stage == TDDP_DETECTOR_NOTIFIED;
    self->verdict = verdict;
    free(self->verdict_text);
    self->verdict_text = text;
    self->stage = TDDP_DETECTOR_RESOLVED;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
    if (fails) {
        tddp_group_fail(self->group, verdict, text ? text : tddp_status_text(verdict));
    }
    return fails;
}

static void answer(tddp_detector *watch, tddp_detector_entry *self)
{
    self->answered = true;
    tddp_status status = say(watch, self, TDDP_REPORT_POSITION);
    if (status && status != TDDP_OUT_OF_MEMORY) {
        go_deaf(watch);
    }
}

/* Those who ask wait for answers a short time only. With the lock held, which is let go meanwhile.
 */
static void answer_all(tddp_detector *watch)
{
    for (tddp_detector_entry *each = watch->entries; each; each = each->next) {
        if (each->stage != TDDP_DETECTOR_NOTIFIED || each->answered) {
            continue;
        }
        each->busy = true;
        pthread_mutex_unlock(&watch->mutex);
        answer(watch, each);
        pthread_mutex_lock(&watch->mutex);
        each->busy = false;
        pthread_cond_broadcast(&watch->changed);
    }
}

/* Does what is due; true if it has to be looked at again soon. The entry is busy meanwhile. */
static bool attend(tddp_detector *watch, tddp_detector_entry *self, tddp_detector_stage now,
                   bool leaving, bool *failed)
{
    if (leaving && !watch->deaf && now == TDDP_DETECTOR_IDLE &&
        say(watch, self, TDDP_REPORT_LEFT) == TDDP_NETWORK) {
        go_deaf(watch);
    }
    switch (now) {
    case TDDP_DETECTOR_UNREPORTED:
        tell(watch, self);
        *failed = explain(watch, self);
        break;
    case TDDP_DETECTOR_NOTIFIED:
    case TDDP_DETECTOR_REPORTED:
        *failed = explain(watch, self);
        break;
    default:
        break;
    }
    pthread_mutex_lock(&watch->mutex);
    bool again = self->stage != TDDP_DETECTOR_IDLE && self->stage != TDDP_DETECTOR_RESOLVED;
    pthread_mutex_unlock(&watch->mutex);
    return again;
}

/* Goes no further when a group has failed here: others may ask meanwhile, and `pause_ms` is 0 then.
 * With the lock held, which is let go meanwhile. */
static bool attend_all(tddp_detector *watch, int64_t *pause_ms)
{
    bool again = false;
    bool failed = false;
    answer_all(watch);
    for (tddp_detector_entry *each = watch->entries; each && !failed; each = each->next) {
        bool leaving = each->leaving;
        if (each->stage == TDDP_DETECTOR_IDLE ? !leaving
                                              : each->stage == TDDP_DETECTOR_RESOLVED && !leaving) {
            continue;
        }
        tddp_detector_stage now = each->stage;
        each->busy = true;
        pthread_mutex_unlock(&watch->mutex);
        bool unfinished = attend(watch, each, now, leaving, &failed);
        pthread_mutex_lock(&watch->mutex);
        again = unfinished || again;
        each->busy = false;
        each->leaving = false;
        pthread_cond_broadcast(&watch->changed);
    }
    *pause_ms = failed ? 0 : *pause_ms;
    return again || failed;
}

/* --- the thread ------------------------------------------------------------------------------ */

static void hear(tddp_detector *watch, const char *key)
{
    pthread_mutex_lock(&watch->mutex);
    for (tddp_detector_entry *each = watch->entries; each; each = each->next) {
        if (strcmp(each->key, key) == 0 && each->stage == TDDP_DETECTOR_IDLE) {
            each->stage = TDDP_DETECTOR_NOTIFIED;
            each->deadline = tddp_deadline_after_ms(TDDP_DETECTOR_REPLY_MS);
        }
    }
    pthread_mutex_unlock(&watch->mutex);
}

/* Waits for the next alarm, or to be woken; with `again` no longer than the pause. Takes all that
 * have come: many groups may fail at once, and those who ask wait for answers a short time only. */
static void wait_for_alarm(tddp_detector *watch, bool again, int64_t pause_ms)
{
    tddp_wait wait = {again ? 0 : LISTEN_MS, watch->wake};
    if (again || watch->deaf) {
        int64_t until = tddp_deadline_after_ms(again ? pause_ms : LISTEN_MS);
        if (tddp_net_sleep(until, tddp_cancel_fd(watch->wake)) || watch->deaf) {
            return;
        }
    }
    tddp_status status;
    do {
        char *key;
        status = tddp_notice_wait(watch->store, watch->heard + 1, &wait, &key);
        if (status == TDDP_OK) {
            watch->heard++;
            hear(watch, key);
            free(key);
        }
        wait.timeout_ms = 0;
    } while (status == TDDP_OK);
    if (status != TDDP_TIMEOUT && status != TDDP_CANCELED && status != TDDP_OUT_OF_MEMORY) {
        go_deaf(watch);
    }
}

/* A connection of one's own, made here so that making a group does not wait for it. */
static void open_connection(tddp_detector *watch)
{
    tddp_store *own;
    tddp_status status;
    bool ended = false;
    do {
        tddp_wait wait = {CONNECT_MS, watch->wake};
        status = tddp_store_clone(watch->base, &wait, &own);
        pthread_mutex_lock(&watch->mutex);
        ended = watch->ended;
        if (status == TDDP_CANCELED && !ended) {
            tddp_cancel_reset(watch->wake); /* what was asked is seen to afterwards */
        }
        pthread_mutex_unlock(&watch->mutex);
    } while (status == TDDP_CANCELED && !ended);
    if (status == TDDP_OK) {
        watch->store = own;
    } else {
        go_deaf(watch);
    }
}

void *tddp_detector_run_watcher(void *data)
{
    tddp_detector *watch = data;
    int64_t pause = PAUSE_MS;
    open_connection(watch);
    pthread_mutex_lock(&watch->mutex);
    while (!watch->ended) {
        tddp_cancel_reset(watch->wake);
        bool again = attend_all(watch, &pause);
        bool ended = watch->ended;
        pthread_mutex_unlock(&watch->mutex);
        if (!ended) {
            wait_for_alarm(watch, again, pause);
        }
        pause = !again || pause == 0        ? PAUSE_MS
                : pause < LONG_PAUSE_MS / 2 ? 2 * pause
                                            : LONG_PAUSE_MS;
        pthread_mutex_lock(&watch->mutex);
    }
    pthread_mutex_unlock(&watch->mutex);
    return NULL;
}
