/*
 * A barrier that names who does not come: a meeting in the group's store, on the thread that calls
 * it and beside the queue, so that it works where the ranks' operations do not match and leaves the
 * group as it was.
 *
 * The Nth barrier is the meeting "monitored/N". A rank's record is how long it waits, for those who
 * wait for rank 0: rank 0 decides that others did not come, by failing with a status and a text,
 * and any rank decides that of rank 0. All ranks end with what the meeting's list says, also those
 * that come late. While ranks are missing rank 0 looks after them, and they after rank 0: who has
 * ended will not come any more.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/meeting.h>

#include "group/checks.h"

enum {
    SLICE_MS = 100,
    /* How long a process may take to end after its connections have. */
    ENDING_MS = 300,
    TIDY_MS = 1000,
    /* What rank 0 gets beyond its own time to say what came of it. */
    GRACE_MS = 2000,
    NAME_BYTES = 32,
    TEXT_BYTES = 2048,
    NAMED = 8,
};

typedef struct barrier {
    tddp_group *group;
    tddp_store *store; /* held: the group lets go of its own when another thread shuts it down */
    tddp_meeting_opts opts;
    tddp_meeting *meeting;
    char name[NAME_BYTES];
    uint64_t number;
    int64_t timeout_ms;
    bool all_ranks;
    tddp_cancel *cancel;
    bool arrived; /* the others may wait for what this rank decides */
} barrier;

static tddp_status check_group(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, "monitored_barrier");
    pthread_mutex_unlock(&group->mutex);
    return status;
}

/* While ranks are missing: whether those that this one waits for can still arrive. */
static tddp_status check_peers(void *data)
{
    const barrier *self = data;
    tddp_group *group = self->group;
    const tddp_wait wait = {TIDY_MS, self->cancel};
    tddp_status status = check_group(group);
    const int from = group->rank == 0 ? 1 : 0;
    const int to = group->rank == 0 ? group->world_size : 1;
    for (int rank = from; status == TDDP_OK && rank < to; rank++) {
        char name[TDDP_PEER_NAME_BYTES];
        if (tddp_peers_check_liveness(group->peers, group->rank, rank) != TDDP_PEER_ENDED) {
            continue;
        }
        status = tddp_meeting_read(self->meeting, &wait);
        /* What rank 0 has come for is to tell the outcome. */
        if (status == TDDP_OK && (rank == 0 || !tddp_meeting_records(self->meeting)[rank].data)) {
            status = tddp_fail(
                TDDP_PEER_LOST,
                "monitored_barrier %" PRIu64 " of group \"%s\": lost %s: its process has ended",
                self->number, group->name, tddp_peers_name(group->peers, rank, name));
        }
    }
    return status;
}

/* --- who is missing -------------------------------------------------------------------------- */

/* Of rank 0. */
static tddp_status name_missing(const barrier *self)
{
    const tddp_group *group = self->group;
    const tddp_slice *records = tddp_meeting_records(self->meeting);
    char text[TEXT_BYTES] = "";
    size_t used = 0;
    int missing = 0;
    for (int rank = 1; rank < group->world_size && (self->all_ranks || missing == 0); rank++) {
        char name[TDDP_PEER_NAME_BYTES];
        if (!records[rank].data && missing++ < NAMED) {
            used +=
                (size_t)snprintf(text + used, sizeof text - used, "%s%s", missing > 1 ? ", " : "",
                                 tddp_peers_name(group->peers, rank, name));
        }
    }
    if (missing > NAMED) {
        (void)snprintf(text + used, sizeof text - used, " and %d more", missing - NAMED);
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "monitored_barrier %" PRIu64
                     " of group \"%s\": %s did not arrive within %" PRId64 " ms",
                     self->number, group->name, text, self->timeout_ms);
}

/* Of the others: rank 0 has decided nothing in this rank's time. Either it is not there, or it
 * waits itself. */
static tddp_status await_leader(const barrier *self)
{
    const tddp_group *group = self->group;
    const tddp_slice its = tddp_meeting_records(self->meeting)[0];
    char name[TDDP_PEER_NAME_BYTES];
    int64_t its_ms;
    const bool waits = its.data && tddp_parse_int(its.data, 0, INT64_MAX / 2, &its_ms);
    if (waits) {
        const tddp_wait wait = {its_ms + GRACE_MS, self->cancel};
        tddp_status status = tddp_meeting_await(self->meeting, &wait);
        if (status != TDDP_TIMEOUT) {
            return status;
        }
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "monitored_barrier %" PRIu64 " of group \"%s\": %s, which leads it, %s within "
                     "%" PRId64 " ms",
                     self->number, group->name, tddp_peers_name(group->peers, 0, name),
                     waits ? "has decided nothing" : "did not arrive", self->timeout_ms);
}

static tddp_status meet(barrier *self)
{
    char time[24];
    const tddp_wait wait = {self->timeout_ms, self->cancel};
    int length = snprintf(time, sizeof time, "%" PRId64, self->timeout_ms);
    tddp_status status =
        tddp_meeting_give(self->meeting, (tddp_slice){time, (size_t)length}, &wait);
    self->arrived = status == TDDP_OK;
    status = status ? status : tddp_meeting_await(self->meeting, &wait);
    if (status == TDDP_TIMEOUT) {
        status = self->group->rank == 0 ? name_missing(self) : await_leader(self);
    }
    return status;
}

/* --- the outcome ----------------------------------------------------------------------------- */

/* The first rank whose process is seen to have ended, soon if not now; -1 if there is none. */
static int first_ended(const tddp_group *group)
{
    int64_t deadline = tddp_deadline_after_ms(ENDING_MS);
    do {
        for (int rank = 0; rank < group->world_size; rank++) {
            if (tddp_peers_check_liveness(group->peers, group->rank, rank) == TDDP_PEER_ENDED) {
                return rank;
            }
        }
        (void)usleep(ENDING_MS * 1000 / 30);
    } while (tddp_now_ns() < deadline);
    return -1;
}

/* Says what the store's failure means here: one that is gone went with the rank that hosts it, if
 * one has just ended. */
static tddp_status explain(const barrier *self, tddp_status status)
{
    const tddp_group *group = self->group;
    char seen[TEXT_BYTES];
    char lost[TDDP_PEER_NAME_BYTES + 64] = "";
    if (status == TDDP_OK || status == TDDP_TIMEOUT || status == TDDP_PEER_LOST ||
        status == TDDP_GROUP_FAILED || status == TDDP_GROUP_CLOSED) {
        return status;
    }
    (void)snprintf(seen, sizeof seen, "%s", tddp_error_message());
    int rank = status == TDDP_NETWORK || status == TDDP_STORE ? first_ended(group) : -1;
    if (rank >= 0) {
        char name[TDDP_PEER_NAME_BYTES];
        (void)snprintf(lost, sizeof lost, "lost %s: its process has ended; seen here: ",
                       tddp_peers_name(group->peers, rank, name));
        status = TDDP_PEER_LOST;
    }
    return tddp_fail(status, "monitored_barrier %" PRIu64 " of group \"%s\" on rank %d of %d: %s%s",
                     self->number, group->name, group->rank, group->world_size, lost, seen);
}

/* What the list says, once a rank has failed in it. */
static tddp_status read_outcome(const barrier *self)
{
    int rank = -1;
    int64_t outcome;
    char status_text[16];
    const tddp_wait wait = {TIDY_MS, NULL};
    tddp_status status = tddp_meeting_read(self->meeting, &wait);
    if (status == TDDP_OK) {
        status = tddp_meeting_await(self->meeting, &wait);
    }
    const char *reason = tddp_meeting_failure(self->meeting, &rank);
    if (status != TDDP_PEER_LOST || !reason) {
        return explain(self, status);
    }
    const char *space = strchr(reason, ' ');
    (void)snprintf(status_text, sizeof status_text, "%.*s", space ? (int)(space - reason) : 0,
                   reason);
    if (!space || !tddp_parse_int(status_text, 1, INT32_MAX, &outcome)) {
        return tddp_fail(TDDP_INTERNAL, "monitored_barrier ended with \"%.100s\"", reason);
    }
    return tddp_fail((tddp_status)outcome, "%s", space + 1);
}

static void publish(const barrier *self, tddp_status status, const char *text)
{
    char outcome[TEXT_BYTES + 16];
    (void)snprintf(outcome, sizeof outcome, "%d %s", (int)status, text);
    tddp_meeting_fail(&self->opts, outcome);
}

/* All ranks end with the outcome that was first in the store: this rank's failure is, if there was
 * none. */
static tddp_status agree(const barrier *self, tddp_status own)
{
    int rank = -1;
    if (own != TDDP_PEER_LOST || !tddp_meeting_failure(self->meeting, &rank)) {
        publish(self, own, tddp_error_message());
    }
    return read_outcome(self);
}

/* Of rank 0, which will decide nothing any more. */
static void publish_interrupt(const barrier *self)
{
    char name[TDDP_PEER_NAME_BYTES];
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text,
                   "monitored_barrier %" PRIu64 " of group \"%s\": %s, which leads it, was "
                   "interrupted",
                   self->number, self->group->name, tddp_peers_name(self->group->peers, 0, name));
    publish(self, TDDP_TIMEOUT, text);
}

static tddp_status run(barrier *self)
{
    char text[TEXT_BYTES];
    const tddp_wait tidy = {TIDY_MS, NULL};
    self->opts = (tddp_meeting_opts){.store = self->store,
                                     .name = self->name,
                                     .rank = self->group->rank,
                                     .world_size = self->group->world_size,
                                     .sender = TDDP_MEETING_ALL,
                                     .check = check_peers,
                                     .data = self,
                                     .check_ms = SLICE_MS};
    tddp_status status = tddp_meeting_open(&self->opts, &self->meeting);
    if (status) {
        return status;
    }
    status = explain(self, meet(self));
    /* A rank that is interrupted, or has lost the group or the store, speaks for itself alone. */
    const bool leads = self->group->rank == 0 && self->arrived;
    const bool gone = status == TDDP_NETWORK || status == TDDP_STORE || status == TDDP_GROUP_FAILED;
    const bool interrupted = status == TDDP_CANCELED;
    if (status == TDDP_TIMEOUT || status == TDDP_PEER_LOST ||
        (status && leads && !gone && !interrupted)) {
        status = agree(self, status);
    }
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (interrupted && leads) {
        publish_interrupt(self);
    }
    if (tddp_meeting_leave(self->meeting, &tidy)) {
        tddp_log(TDDP_LOG_DEBUG, "group", "monitored_barrier leaves keys behind: %s",
                 tddp_error_message());
    }
    tddp_meeting_close(self->meeting);
    return status ? tddp_fail(status, "%s", text) : TDDP_OK;
}

tddp_status tddp_monitored_barrier(tddp_group *group, int64_t timeout_ms, int wait_all_ranks,
                                   const tddp_wait *wait)
{
    tddp_status status = tddp_group_check_usable(group, "monitored_barrier");
    status = status ? status : check_group(group);
    if (status) {
        return status;
    }
    if (group->world_size == 1) {
        return TDDP_OK;
    }
    tddp_store *store = tddp_group_store(group);
    if (!store) {
        return check_group(group);
    }
    barrier self = {
        .group = group,
        .store = store,
        .number = atomic_fetch_add(&group->monitored_barriers, 1) + 1,
        .timeout_ms = timeout_ms > 0 ? timeout_ms : atomic_load(&group->timeout_ms),
        .all_ranks = wait_all_ranks != 0,
        .cancel = tddp_wait_cancel(wait),
    };
    if (wait && wait->timeout_ms >= 0 && wait->timeout_ms < self.timeout_ms) {
        self.timeout_ms = wait->timeout_ms;
    }
    (void)snprintf(self.name, sizeof self.name, "monitored/%" PRIu64, self.number);
    status = run(&self);
    tddp_store_release(store);
    return status;
}
