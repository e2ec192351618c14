/*
 * The failure detector's watcher thread: waits for failure notices at the store, publishes this
 * rank's failures, collects the ranks' reports, and fails a group here that failed on another rank.
 *
 * Invariant: while an entry is `busy` it stays in the list, its group stays alive, and its
 * description of the failed operation does not change. The lock is not held while a store or a
 * group is called.
 *
 * A store that is silent is asked again until it answers or its host refuses connections: what it
 * has to be told is in the outbox meanwhile, and groups that fail here find their cause without it.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/on_demand.h"
#include "group/failure_detector/detector_state.h"

enum {
    ASK_MS = 2000,
    PROBE_MS = 300,
    NOTICE_WAIT_MS = 600 * 1000,
    POLL_MS = 200, /* between two checks of a store without a server */
    PAUSE_MS = 10, /* between two reads of a log, doubled each time */
    LONGEST_PAUSE_MS = 100,
};

int64_t tddp_detector_connect_ms = 5000;

/* --- the store ------------------------------------------------------------------------------- */

static bool answers(const tddp_detector *detector)
{
    return detector->store_state == TDDP_DETECTOR_STORE_ANSWERS;
}

static bool is_lost(const tddp_detector *detector)
{
    return detector->store_state == TDDP_DETECTOR_STORE_LOST;
}

/* It is silent, but its host has not closed the connection, or there has been none yet. */
static bool may_answer(const tddp_detector *detector)
{
    return detector->store_state == TDDP_DETECTOR_STORE_SILENT &&
           (detector->store || !detector->connected);
}

/* Other ranks had no answer either: they have some time again. */
static void extend_deadlines(tddp_detector *detector)
{
    int64_t least = tddp_deadline_after_ms(TDDP_DETECTOR_REPLY_MS);
    for (tddp_detector_entry *each = detector->entries; each; each = each->next) {
        if (each->stage == TDDP_DETECTOR_NOTIFIED && each->deadline < least) {
            each->deadline = least;
        }
    }
}

/* Why is this thread's error text, unless it answers. */
static void set_store_state(tddp_detector *detector, tddp_detector_store_state state)
{
    static const char *const names[] = {"silent and is asked again", "answering", "lost"};
    if (detector->store_state == state) {
        return;
    }
    const bool works = state == TDDP_DETECTOR_STORE_ANSWERS;
    tddp_log(TDDP_LOG_DEBUG, "group", "the failure detector's store is %s: %s", names[state],
             works ? "" : tddp_error_message());
    pthread_mutex_lock(&detector->mutex);
    detector->store_state = state;
    if (works) {
        detector->connected = true;
        extend_deadlines(detector);
    } else if (is_lost(detector)) {
        tddp_detector_clear_outbox(detector);
    }
    pthread_cond_broadcast(&detector->changed);
    pthread_mutex_unlock(&detector->mutex);
}

/* Draws the conclusions from the status of a call. */
static void note(tddp_detector *detector, tddp_status status)
{
    if (status == TDDP_OUT_OF_MEMORY) {
        return;
    }
    if (status && status != TDDP_TIMEOUT && status != TDDP_CANCELED) {
        /* The connection is gone, the store need not be. */
        tddp_store_release(detector->store);
        detector->store = NULL;
        detector->connect_until = tddp_deadline_after_ms(tddp_detector_connect_ms);
    }
    set_store_state(detector, status ? TDDP_DETECTOR_STORE_SILENT : TDDP_DETECTOR_STORE_ANSWERS);
}

/* Whether the store's host refuses connections. A process that is stopped accepts them, and a
 * network that is down lets the attempt time out: both may answer later. */
static bool refuses(const tddp_detector *detector)
{
    int fd = -1;
    const char *host = tddp_tcp_store_host(detector->base);
    const tddp_status status =
        host ? tddp_net_connect_host(host, tddp_tcp_store_port(detector->base),
                                     tddp_deadline_after_ms(PROBE_MS), -1, &fd)
             : TDDP_NETWORK;
    tddp_net_close(fd);
    return status == TDDP_NETWORK;
}

/* Asks a silent store until it answers, at most so long, or until there is something to do. */
static void ask_again(tddp_detector *detector, int64_t timeout_ms)
{
    tddp_wait wait = {timeout_ms, detector->wake};
    tddp_status status;
    if (detector->store) {
        status = tddp_notice_ask(detector->store, &wait);
        if (status != TDDP_CANCELED) {
            note(detector, status);
        }
        return;
    }
    status = tddp_store_clone(detector->base, &wait, &detector->store);
    if (status == TDDP_OK) {
        set_store_state(detector, TDDP_DETECTOR_STORE_ANSWERS);
    } else if (status != TDDP_CANCELED && status != TDDP_OUT_OF_MEMORY &&
               tddp_now_ns() >= detector->connect_until) {
        if (status != TDDP_NETWORK || refuses(detector)) {
            set_store_state(detector, TDDP_DETECTOR_STORE_LOST);
        } else {
            tddp_log(TDDP_LOG_DEBUG, "group", "the failure detector's store is silent: %s",
                     tddp_error_message());
        }
    }
}

/* --- notices --------------------------------------------------------------------------------- */

/* Takes the notice over. Without memory it is read again later. */
static tddp_status receive(tddp_detector *detector, char *notice)
{
    char **grown = tddp_grow(detector->notices, detector->notice_count, sizeof *grown);
    if (!grown) {
        free(notice);
        return TDDP_OUT_OF_MEMORY;
    }
    detector->notices = grown;
    detector->notices[detector->notice_count++] = notice;
    return TDDP_OK;
}

static int64_t next_number(const tddp_detector *detector)
{
    return (int64_t)detector->notice_count + 1;
}

/* With the lock held. */
static void tell_entry(tddp_detector *detector, tddp_detector_entry *self, char notice)
{
    if (notice == TDDP_NOTICE_CONNECT) {
        self->asked = false;
        tddp_on_demand_start(self->group->on_demand);
    } else if (notice == TDDP_NOTICE_FAILURE && self->stage == TDDP_DETECTOR_IDLE) {
        self->stage = TDDP_DETECTOR_NOTIFIED;
        self->deadline = tddp_deadline_after_ms(TDDP_DETECTOR_REPLY_MS);
        tddp_detector_put_report(detector, self, TDDP_REPORT_POSITION, NULL);
    }
}

/* Tells each entry of the notices about its group, also of those from before this rank watched
 * it. With the lock held. */
static void tell_entries(tddp_detector *detector)
{
    for (tddp_detector_entry *each = detector->entries; each; each = each->next) {
        for (; each->heard < detector->notice_count; each->heard++) {
            const char *notice = detector->notices[each->heard];
            if (notice[0] && strcmp(notice + 1, each->key) == 0) {
                tell_entry(detector, each, notice[0]);
            }
        }
    }
}

/* Tells the store the outbox's first message; false: not yet, as far as is known. */
static bool tell_store(tddp_detector *detector, const tddp_detector_message *message)
{
    char *there = NULL;
    tddp_status status =
        message->line.size > 0
            ? tddp_notice_append_report(detector->store, message->notice + 1, &message->line)
            : tddp_notice_offer(detector->store, next_number(detector), message->notice, &there);
    const bool taken = there && strcmp(there, message->notice) != 0; /* the number is, by another */
    status = there ? receive(detector, there) : status;
    note(detector, status);
    return status == TDDP_OUT_OF_MEMORY || (status == TDDP_OK && !taken);
}

/* Tells the entries what has arrived, and the store what is in the outbox, as far as it answers.
 * With the lock held, which is released meanwhile. */
static void exchange(tddp_detector *detector)
{
    tell_entries(detector);
    while (detector->outbox && answers(detector)) {
        const tddp_detector_message *message = detector->outbox;
        pthread_mutex_unlock(&detector->mutex);
        const bool told = tell_store(detector, message);
        pthread_mutex_lock(&detector->mutex);
        if (told) {
            tddp_detector_pop_message(detector);
            pthread_cond_broadcast(&detector->changed);
        }
        tell_entries(detector);
    }
}

/* --- for one group --------------------------------------------------------------------------- */

/* Finds the group's root cause if the reports suffice. True if it failed the group here, which
 * takes a while where an operation is about to end. */
static bool resolve(tddp_detector *detector, tddp_detector_entry *self)
{
    char *log = NULL;
    if (answers(detector)) {
        note(detector, tddp_notice_read_reports(detector->store, self->key, &log));
    }
    if (may_answer(detector) && tddp_now_ns() < self->deadline) {
        return false;
    }
    tddp_status cause;
    const tddp_failure_evidence evidence = {.peers = self->group->peers,
                                            .rank = self->group->rank,
                                            .failure = self->failure,
                                            .observed = &self->group->observed,
                                            .store_lost = !answers(detector),
                                            .deadline_over = tddp_now_ns() >= self->deadline};
    bool found = tddp_root_cause_find(&evidence, log, &cause);
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

/* Whether something has to be done for the entry soon. */
static bool is_unfinished(const tddp_detector_entry *self)
{
    return self->stage != TDDP_DETECTOR_IDLE && self->stage != TDDP_DETECTOR_RESOLVED;
}

/* Ends what waits for connections that the ranks cannot be asked for any more. With the lock held.
 */
static void fail_requests(const tddp_detector *detector)
{
    for (tddp_detector_entry *each = detector->entries; each; each = each->next) {
        if (each->asked && is_lost(detector)) {
            each->asked = false;
            tddp_on_demand_fail(each->group->on_demand, TDDP_NETWORK,
                                "the ranks of several hosts cannot connect: the store, in which "
                                "they agree on that, cannot be reached any more");
        }
    }
}

/* Does what the entries' stages require; true if one has to be processed again soon. Stops after an
 * entry whose group it failed, with `pause_ms` 0: notices may have come meanwhile. With the lock
 * held, which is released meanwhile. */
static bool process_all(tddp_detector *detector, int64_t *pause_ms)
{
    bool again = false;
    bool failed = false;
    exchange(detector);
    fail_requests(detector);
    for (tddp_detector_entry *each = detector->entries; each && !failed; each = each->next) {
        /* While the store is silent, another rank's failure has time. */
        if (each->stage == TDDP_DETECTOR_FAILED ||
            (each->stage == TDDP_DETECTOR_NOTIFIED && !may_answer(detector))) {
            each->busy = true;
            pthread_mutex_unlock(&detector->mutex);
            failed = resolve(detector, each);
            pthread_mutex_lock(&detector->mutex);
            each->busy = false;
            pthread_cond_broadcast(&detector->changed);
        }
        again = is_unfinished(each) || again;
    }
    *pause_ms = failed ? 0 : *pause_ms;
    return again || failed;
}

/* --- the thread ------------------------------------------------------------------------------ */

/* Waits for the next notice, or to be woken; with `again` no longer than the pause. Receives all
 * notices that are there: many groups may fail at once, and replies are waited for a short time
 * only. */
static void wait_for_notices(tddp_detector *detector, bool again, int64_t pause_ms)
{
    if (detector->store_state == TDDP_DETECTOR_STORE_SILENT) {
        ask_again(detector, again ? TDDP_DETECTOR_REPLY_MS : ASK_MS);
        return;
    }
    /* The wait of a store without a server would hold a lock, or poll without pause. */
    const bool polls = again || is_lost(detector) || tddp_tcp_store_port(detector->base) < 0;
    if (polls) {
        const int64_t longest_ms = is_lost(detector) ? NOTICE_WAIT_MS : POLL_MS;
        const int64_t until = tddp_deadline_after_ms(again ? pause_ms : longest_ms);
        if (tddp_net_sleep(until, tddp_cancel_fd(detector->wake)) || is_lost(detector)) {
            return;
        }
    }
    tddp_wait wait = {polls ? 0 : NOTICE_WAIT_MS, detector->wake};
    tddp_status status;
    do {
        char *notice;
        status = tddp_notice_wait(detector->store, next_number(detector), &wait, &notice);
        status = status ? status : receive(detector, notice);
        wait.timeout_ms = 0;
    } while (status == TDDP_OK);
    if (status != TDDP_TIMEOUT && status != TDDP_CANCELED) {
        note(detector, status);
    }
}

void *tddp_detector_run_watcher(void *data)
{
    tddp_detector *detector = data;
    int64_t pause = PAUSE_MS;
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
    tddp_detector_clear_outbox(detector);
    pthread_mutex_unlock(&detector->mutex);
    /* Other references to the detector must not keep the store's server alive. */
    tddp_store_release(detector->store);
    tddp_store_release(detector->base);
    detector->store = detector->base = NULL;
    return NULL;
}
