/*
 * A barrier that names the ranks that do not arrive: the meeting "monitored/N" in the group's
 * store, on the thread that calls it and beside the queue, so that it works where the ranks'
 * operations do not match and leaves the group as it was.
 *
 * A rank whose time is over, or that sees the end of a missing rank's process, fails in the meeting
 * with its error. All ranks end with what the meeting's list says first, also those that arrive
 * later. Rank 0 checks the processes of the others, and they check that of rank 0.
 */
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include <tddp/meeting.h>

#include "group/checks.h"

enum {
    CHECK_MS = 100,
    /* How long a process may take to end after its connections have. */
    ENDING_MS = 300,
    TIDY_MS = 1000,
    NAME_BYTES = 32,
    TEXT_BYTES = 1000, /* a meeting cuts longer ones */
    NAMED = 6,
};

typedef struct barrier {
    tddp_group *group;
    tddp_meeting_opts opts; /* its store is held: another thread may shut the group down */
    tddp_meeting *meeting;
    char name[NAME_BYTES];
    uint64_t number;
    int64_t timeout_ms;
    int most; /* missing ranks to name */
    tddp_cancel *cancel;
} barrier;

static tddp_status check_group(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, "monitored_barrier");
    pthread_mutex_unlock(&group->mutex);
    return status;
}

static tddp_status fail(const barrier *self, tddp_status status, const char *text)
{
    return tddp_fail(status, "monitored_barrier %" PRIu64 " of group \"%s\": %.900s", self->number,
                     self->group->name, text);
}

static bool has_ended(const tddp_group *group, int rank)
{
    return tddp_peers_check_liveness(group->peers, group->rank, rank) == TDDP_PEER_ENDED;
}

static tddp_status fail_ended(const barrier *self, int rank, const char *seen)
{
    char name[TDDP_PEER_NAME_BYTES];
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "lost %s: its process has ended%s%s",
                   tddp_peers_name(self->group->peers, rank, name), *seen ? "; seen here: " : "",
                   seen);
    return fail(self, TDDP_PEER_LOST, text);
}

/* While ranks are missing: whether those that this one checks can still arrive. */
static tddp_status check_peers(void *data)
{
    const barrier *self = data;
    tddp_group *group = self->group;
    const tddp_wait wait = {TIDY_MS, self->cancel};
    tddp_status status = check_group(group);
    const int from = group->rank == 0 ? 1 : 0;
    const int to = group->rank == 0 ? group->world_size : 1;
    for (int rank = from; status == TDDP_OK && rank < to; rank++) {
        if (has_ended(group, rank)) {
            status = tddp_meeting_read(self->meeting, &wait);
            if (status == TDDP_OK && !tddp_meeting_records(self->meeting)[rank].data) {
                status = fail_ended(self, rank, "");
            }
        }
    }
    return status;
}

static tddp_status fail_missing(const barrier *self)
{
    const tddp_group *group = self->group;
    char text[TEXT_BYTES] = "";
    int missing = 0;
    for (int rank = 0; rank < group->world_size; rank++) {
        char name[TDDP_PEER_NAME_BYTES];
        if (!tddp_meeting_records(self->meeting)[rank].data && missing++ < self->most) {
            tddp_add_text(text, sizeof text, "%s%s", missing > 1 ? ", " : "",
                          tddp_peers_name(group->peers, rank, name));
        }
    }
    if (missing > self->most) {
        tddp_add_text(text, sizeof text, " and %d more", missing - self->most);
    }
    tddp_add_text(text, sizeof text, " did not arrive within %" PRId64 " ms", self->timeout_ms);
    return fail(self, TDDP_TIMEOUT, text);
}

/* The store's failure: a lost one ended with the rank that hosts it, if one has just ended. */
static tddp_status fail_store(const barrier *self, tddp_status status)
{
    const int64_t deadline = tddp_deadline_after_ms(ENDING_MS);
    const bool lost = status == TDDP_NETWORK || status == TDDP_STORE;
    char seen[TEXT_BYTES];
    (void)snprintf(seen, sizeof seen, "%s", tddp_error_message());
    while (lost && tddp_now_ns() < deadline) {
        for (int rank = 0; rank < self->group->world_size; rank++) {
            if (has_ended(self->group, rank)) {
                return fail_ended(self, rank, seen);
            }
        }
        (void)usleep(ENDING_MS * 1000 / 30);
    }
    return fail(self, status, seen);
}

/* All ranks end with the outcome that was first in the store: this rank's failure is, if there was
 * none. */
static tddp_status agree(const barrier *self, tddp_status own)
{
    const tddp_wait wait = {TIDY_MS, NULL};
    char text[TEXT_BYTES];
    char reason[TEXT_BYTES + 16];
    int rank = -1;
    int decided;
    int used = 0;
    tddp_status status = own;
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (!tddp_meeting_failure(self->meeting, &rank)) {
        (void)snprintf(reason, sizeof reason, "%d %s", (int)own, text);
        tddp_meeting_fail(&self->opts, reason);
        status = tddp_meeting_await(self->meeting, &wait);
    }
    const char *first = tddp_meeting_failure(self->meeting, &rank);
    if (status && first && sscanf(first, "%d %n", &decided, &used) == 1 && used > 0) {
        return tddp_fail((tddp_status)decided, "%s", first + used);
    }
    return status ? tddp_fail(own, "%s", text) : TDDP_OK;
}

static tddp_status meet(const barrier *self)
{
    const int64_t deadline = tddp_deadline_after_ms(self->timeout_ms);
    const tddp_wait wait = {self->timeout_ms, self->cancel};
    tddp_status status = tddp_meeting_give(self->meeting, (tddp_slice){"", 0}, &wait);
    const tddp_wait left = {tddp_deadline_poll_ms(deadline), self->cancel};
    status = status ? status : tddp_meeting_await(self->meeting, &left);
    switch (status) {
    case TDDP_OK:
    case TDDP_GROUP_FAILED:
    case TDDP_GROUP_CLOSED:
        return status;
    case TDDP_TIMEOUT:
        return agree(self, fail_missing(self));
    case TDDP_PEER_LOST:
        return agree(self, status);
    case TDDP_CANCELED: /* if this rank has arrived, the others need nothing more of it */
    case TDDP_NETWORK:
    case TDDP_STORE:
        return fail_store(self, status);
    default:
        return agree(self, fail_store(self, status));
    }
}

/* Leaves the meeting; the status and this thread's error text stay. */
static tddp_status leave(barrier *self, tddp_status status)
{
    const tddp_wait wait = {TIDY_MS, NULL};
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (tddp_meeting_leave(self->meeting, &wait)) {
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
    if (status || group->world_size == 1) {
        return status;
    }
    tddp_store *store = tddp_group_store(group);
    if (!store) {
        return check_group(group);
    }
    barrier self = {.group = group,
                    .number = atomic_fetch_add(&group->monitored_barriers, 1) + 1,
                    .timeout_ms = timeout_ms > 0 ? timeout_ms : atomic_load(&group->timeout_ms),
                    .most = wait_all_ranks ? NAMED : 1,
                    .cancel = tddp_wait_cancel(wait)};
    if (wait && wait->timeout_ms >= 0 && wait->timeout_ms < self.timeout_ms) {
        self.timeout_ms = wait->timeout_ms;
    }
    (void)snprintf(self.name, sizeof self.name, "monitored/%" PRIu64, self.number);
    self.opts = (tddp_meeting_opts){.store = store,
                                    .name = self.name,
                                    .rank = group->rank,
                                    .world_size = group->world_size,
                                    .sender = TDDP_MEETING_ALL,
                                    .check = check_peers,
                                    .data = &self,
                                    .check_ms = CHECK_MS};
    status = tddp_meeting_open(&self.opts, &self.meeting);
    status = status ? status : leave(&self, meet(&self));
    tddp_store_release(store);
    return status;
}
