/*
 * A barrier that names who does not come. It goes through the group's store, on the thread that
 * calls it and beside the queue, so that it works where the ranks' operations do not match and
 * leaves the group as it was. Waits are cut into slices: a TCP store serves one call at a time.
 *
 * Keys of the Nth barrier, below `monitored/N/`: `here/RANK` says that a rank has come, `here`
 * counts them, and the last of them sets `all`. Rank 0 waits for that and sets `outcome`, a status
 * and its text, unless one that waited in vain for rank 0 has. All ranks end with it, also those
 * that come late. `gone` counts who has; each rank removes its own key, and the last all the rest.
 * Between the slices rank 0 looks after those that have not come, and they after rank 0: who has
 * ended will not come any more.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "group/checks.h"

enum {
    SLICE_MS = 100,
    /* How long a process may take to end after its connections have. */
    ENDING_MS = 300,
    TIDY_MS = 1000,
    /* What rank 0 gets beyond its own time to say what came of it. */
    GRACE_MS = 2000,
    KEY_BYTES = 80,
    TEXT_BYTES = 2048,
    NAMED = 8,
};

typedef struct barrier {
    tddp_group *group;
    tddp_store *store; /* held: the group lets go of its own when another thread shuts it down */
    uint64_t number;
    int64_t timeout_ms;
    bool all_ranks;
    tddp_cancel *cancel;
    int64_t deadline;
} barrier;

static tddp_slice key_of(const barrier *self, const char *what, char text[KEY_BYTES])
{
    int length = snprintf(text, KEY_BYTES, "monitored/%" PRIu64 "/%s", self->number, what);
    return (tddp_slice){text, (size_t)length};
}

static tddp_slice here_of(const barrier *self, int rank, char text[KEY_BYTES])
{
    char what[32];
    (void)snprintf(what, sizeof what, "here/%d", rank);
    return key_of(self, what, text);
}

static tddp_wait brief(const barrier *self, int ms)
{
    return (tddp_wait){ms, self->cancel};
}

/* Whether the rank whose process has ended has come before. */
static tddp_status lost(const barrier *self, int rank)
{
    char key[KEY_BYTES];
    char name[TDDP_PEER_NAME_BYTES];
    tddp_slice slice = here_of(self, rank, key);
    tddp_wait wait = brief(self, TIDY_MS);
    int there = 0;
    /* What rank 0 has come for is to tell the outcome. */
    tddp_status status = rank ? tddp_store_check(self->store, &slice, 1, &wait, &there) : TDDP_OK;
    if (status || there) {
        return status;
    }
    return tddp_fail(
        TDDP_PEER_LOST,
        "monitored_barrier %" PRIu64 " of group \"%s\": lost %s: its process has ended",
        self->number, self->group->name, tddp_peers_name(self->group->peers, rank, name));
}

static tddp_status check_group(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, "monitored_barrier");
    pthread_mutex_unlock(&group->mutex);
    return status;
}

/* Whether it is still worth waiting. */
static tddp_status look(const barrier *self)
{
    tddp_group *group = self->group;
    tddp_status status = check_group(group);
    int from = group->rank == 0 ? 1 : 0;
    int to = group->rank == 0 ? group->world_size : 1;
    for (int rank = from; status == TDDP_OK && rank < to; rank++) {
        if (tddp_peers_check_liveness(group->peers, group->rank, rank) == TDDP_PEER_ENDED) {
            status = lost(self, rank);
        }
    }
    return status;
}

/* Waits for a key until the deadline, letting other threads' calls through. */
static tddp_status await(const barrier *self, const char *what, int64_t deadline)
{
    char text[KEY_BYTES];
    tddp_slice key = key_of(self, what, text);
    for (;;) {
        int64_t slice = tddp_deadline_after_ms(SLICE_MS);
        tddp_wait wait = brief(self, tddp_deadline_poll_ms(slice < deadline ? slice : deadline));
        tddp_status status = tddp_store_wait(self->store, &key, 1, &wait);
        if (status != TDDP_TIMEOUT || tddp_now_ns() >= deadline) {
            return status;
        }
        if ((status = look(self))) {
            return status;
        }
    }
}

static tddp_status come(const barrier *self)
{
    char text[KEY_BYTES];
    int64_t count;
    tddp_store *store = self->store;
    tddp_wait wait = {-1, self->cancel};
    /* The value is how long rank 0 waits, for those who wait for rank 0. */
    char time[24];
    int length = snprintf(time, sizeof time, "%" PRId64, self->timeout_ms);
    tddp_status status = tddp_store_set(store, here_of(self, self->group->rank, text),
                                        (tddp_slice){time, (size_t)length}, &wait);
    if (status == TDDP_OK) {
        status = tddp_store_add(store, key_of(self, "here", text), 1, &wait, &count);
    }
    if (status == TDDP_OK && count == self->group->world_size) {
        status = tddp_store_set(store, key_of(self, "all", text), (tddp_slice){"1", 1}, &wait);
    }
    return status;
}

/* --- rank 0 ---------------------------------------------------------------------------------- */

/* Sets the text that all ranks get. */
static tddp_status name_missing(const barrier *self)
{
    const tddp_group *group = self->group;
    char text[TEXT_BYTES];
    size_t used = 0;
    int missing = 0;
    for (int rank = 1; rank < group->world_size; rank++) {
        char key[KEY_BYTES];
        char name[TDDP_PEER_NAME_BYTES];
        tddp_slice slice = here_of(self, rank, key);
        tddp_wait wait = brief(self, TIDY_MS);
        int there;
        tddp_status status = tddp_store_check(self->store, &slice, 1, &wait, &there);
        if (status) {
            return status;
        }
        if (!there && missing++ < NAMED) {
            used +=
                (size_t)snprintf(text + used, sizeof text - used, "%s%s", missing > 1 ? ", " : "",
                                 tddp_peers_name(group->peers, rank, name));
            if (!self->all_ranks) {
                break;
            }
        }
    }
    if (missing > NAMED) {
        used += (size_t)snprintf(text + used, sizeof text - used, " and %d more", missing - NAMED);
    }
    if (missing == 0) {
        return TDDP_OK; /* it came at the last moment */
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "monitored_barrier %" PRIu64
                     " of group \"%s\": %s did not come within %" PRId64 " ms",
                     self->number, group->name, text, self->timeout_ms);
}

static tddp_status lead(const barrier *self)
{
    tddp_status status = await(self, "all", self->deadline);
    return status == TDDP_TIMEOUT ? name_missing(self) : status;
}

/* --- the others ------------------------------------------------------------------------------ */

/* Rank 0 has not spoken in this rank's time: either it is not there, or it waits itself. */
static tddp_status await_leader(const barrier *self)
{
    const tddp_group *group = self->group;
    char text[KEY_BYTES];
    char name[TDDP_PEER_NAME_BYTES];
    tddp_slice key = here_of(self, 0, text);
    tddp_wait wait = brief(self, TIDY_MS);
    tddp_blob value = {0};
    int there;
    int64_t its_ms;
    tddp_status status = tddp_store_check(self->store, &key, 1, &wait, &there);
    if (status == TDDP_OK && there) {
        status = tddp_store_get(self->store, key, &wait, &value);
    }
    if (status) {
        return status;
    }
    bool waits = there && tddp_parse_int(value.data, 0, INT64_MAX / 2, &its_ms);
    tddp_blob_free(&value);
    if (waits) {
        status = await(self, "outcome", tddp_deadline_after_ms(its_ms + GRACE_MS));
        if (status != TDDP_TIMEOUT) {
            return status;
        }
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "monitored_barrier %" PRIu64 " of group \"%s\": %s, which leads it, %s within "
                     "%" PRId64 " ms",
                     self->number, group->name, tddp_peers_name(group->peers, 0, name),
                     waits ? "came but told no outcome" : "did not come", self->timeout_ms);
}

/* TDDP_OK: there is an outcome. */
static tddp_status follow(const barrier *self)
{
    tddp_status status = await(self, "outcome", self->deadline);
    return status == TDDP_TIMEOUT ? await_leader(self) : status;
}

/* --- all of them ----------------------------------------------------------------------------- */

/* This rank is done with the barrier's keys; the last one removes those that all share. */
static void tidy(const barrier *self)
{
    char text[KEY_BYTES];
    int deleted;
    int64_t gone;
    tddp_wait wait = {TIDY_MS, NULL};
    tddp_store *store = self->store;
    tddp_status status =
        tddp_store_delete_key(store, here_of(self, self->group->rank, text), &wait, &deleted);
    if (status == TDDP_OK) {
        status = tddp_store_add(store, key_of(self, "gone", text), 1, &wait, &gone);
    }
    static const char *const shared[] = {"here", "all", "outcome", "gone"};
    for (size_t i = 0;
         status == TDDP_OK && gone == self->group->world_size && i < sizeof shared / sizeof *shared;
         i++) {
        status = tddp_store_delete_key(store, key_of(self, shared[i], text), &wait, &deleted);
    }
    if (status) {
        tddp_log(TDDP_LOG_DEBUG, "group", "monitored_barrier leaves keys behind: %s",
                 tddp_error_message());
    }
}

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

/* All ranks end with the outcome that was set first. What this one has come to is set if none was;
 * a rank that has seen one comes with TDDP_OK. */
static tddp_status agree(const barrier *self, tddp_status own)
{
    char key[KEY_BYTES];
    char value[TEXT_BYTES];
    int length = snprintf(value, sizeof value, "%d %s", (int)own, own ? tddp_error_message() : "");
    length = length < TEXT_BYTES ? length : TEXT_BYTES - 1;
    tddp_wait wait = {TIDY_MS, NULL};
    tddp_blob set;
    tddp_status status =
        tddp_store_compare_set(self->store, key_of(self, "outcome", key), (tddp_slice){"", 0},
                               (tddp_slice){value, (size_t)length}, &wait, &set);
    if (status) {
        return explain(self, status);
    }
    char *space = strchr(set.data, ' ');
    int64_t outcome;
    if (space) {
        *space = '\0';
    }
    if (space && tddp_parse_int(set.data, 0, INT32_MAX, &outcome)) {
        status = outcome ? tddp_fail((tddp_status)outcome, "%s", space + 1) : TDDP_OK;
    } else {
        status = tddp_fail(TDDP_INTERNAL, "monitored_barrier ended with \"%.100s\"", set.data);
    }
    tddp_blob_free(&set);
    return status;
}

static tddp_status admit(tddp_group *group)
{
    tddp_status status = tddp_group_check_usable(group, "monitored_barrier");
    return status ? status : check_group(group);
}

static tddp_status run(barrier *self)
{
    char text[TEXT_BYTES];
    tddp_status status = come(self);
    if (status) {
        return explain(self, status);
    }
    int rank = self->group->rank;
    status = explain(self, rank == 0 ? lead(self) : follow(self));
    /* A rank that is interrupted, or has lost the group or the store, speaks for itself alone; it
     * is heard if it leads. */
    bool gone = status == TDDP_NETWORK || status == TDDP_STORE || status == TDDP_GROUP_FAILED;
    if (status == TDDP_OK || status == TDDP_TIMEOUT || status == TDDP_PEER_LOST ||
        (rank == 0 && !gone)) {
        status = agree(self, status);
    }
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    tidy(self);
    return status ? tddp_fail(status, "%s", text) : TDDP_OK;
}

tddp_status tddp_monitored_barrier(tddp_group *group, int64_t timeout_ms, int wait_all_ranks,
                                   const tddp_wait *wait)
{
    tddp_status status = admit(group);
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
    self.deadline = tddp_deadline_after_ms(self.timeout_ms);
    status = run(&self);
    tddp_store_release(store);
    return status;
}
