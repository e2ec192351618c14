/*
 * The ranks of a group meet in the store to make it: each gives a description of itself
 * (peers.c), and waits until all have. Runs on the thread that creates the group.
 */
#include "group/arrivals.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <tddp/meeting.h>

enum {
    READ_MS = 1000,
    CHECK_MS = 1000,
    LOOKS_A_SLICE = 4 /* for ranks of PyTorch's own */,
    ADDRESS_BYTES = 200
};

int64_t tddp_group_missing_log_interval_ms = 10000;

/* One wait. */
typedef struct arrival {
    tddp_group *group;
    tddp_meeting *meeting;
    const tddp_wait read;
    int64_t start;
    int64_t next_log;
    int next; /* of the ranks that are looked at */
} arrival;

/* " at 10.0.0.1:29500"; "" where the store has no address. Returns `text`. */
static const char *store_address(const tddp_group *group, char text[ADDRESS_BYTES])
{
    const char *host = tddp_tcp_store_host(group->store);
    text[0] = '\0';
    if (host) {
        (void)snprintf(text, ADDRESS_BYTES, " at %.180s:%d", host,
                       tddp_tcp_store_port(group->store));
    }
    return text;
}

/* --- ranks of PyTorch's own ------------------------------------------------------------------ */

/* Whether a process of PyTorch's gloo has begun to meet others as this rank, by the keys of its
 * default group: what 1.13 sets first, and what later versions do. */
static tddp_status has_pytorchs_keys(tddp_group *group, int rank, const tddp_wait *wait, bool *out)
{
    static const char *const formats[] = {"0/0/rank_%d", "0//cpu//0/%d"};
    tddp_status status = TDDP_OK;
    *out = false;
    for (size_t i = 0; i < sizeof formats / sizeof *formats && status == TDDP_OK && !*out; i++) {
        char text[48];
        int there = 0;
        const int length = snprintf(text, sizeof text, formats[i], rank);
        const tddp_slice key = {text, (size_t)length};
        status = tddp_store_check(group->membership, &key, 1, wait, &there);
        *out = there != 0;
    }
    return status;
}

/* Fails if one of the missing ranks, others each turn, is a process of PyTorch's: it waits for this
 * one as long as this one for it. */
static tddp_status check_for_pytorch(arrival *self)
{
    tddp_group *group = self->group;
    tddp_status status = TDDP_OK;
    for (int i = 0; i < LOOKS_A_SLICE && status == TDDP_OK; i++) {
        const int rank = self->next++ % group->world_size;
        bool there = false;
        if (rank != group->rank && !tddp_meeting_records(self->meeting)[rank].data) {
            status = has_pytorchs_keys(group, rank, &self->read, &there);
        }
        if (there) {
            char address[ADDRESS_BYTES];
            status =
                tddp_fail(TDDP_MISMATCH,
                          "rank %d of group \"%s\" is a process of PyTorch, which has begun to "
                          "meet the others in the store%s in its own way: all ranks of a group "
                          "use torch-ddp; give PyTorch's processes a store of their own",
                          rank, group->name, store_address(group, address));
        }
    }
    return status;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* While ranks are missing. */
static tddp_status check(void *data)
{
    arrival *self = data;
    const tddp_group *group = self->group;
    char missing[TDDP_MEETING_TEXT_BYTES];
    char address[ADDRESS_BYTES];
    const bool logs = tddp_now_ns() >= self->next_log;
    /* All ranks read all records: no more often than there is something to say. */
    tddp_status status = logs ? tddp_meeting_read(self->meeting, &self->read) : TDDP_OK;
    if (status) {
        return status;
    }
    if (logs && tddp_meeting_missing(self->meeting, missing) > 0) {
        tddp_log(TDDP_LOG_WARN, "group",
                 "rank %d of \"%s\" has waited %" PRId64 " s in the store%s for rank(s) %s of %d",
                 group->rank, group->name, (tddp_now_ns() - self->start) / TDDP_NS_PER_S,
                 store_address(group, address), missing, group->world_size);
        self->next_log += tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS;
    }
    return group->is_root && strcmp(group->name, "default_pg") == 0 ? check_for_pytorch(self)
                                                                    : TDDP_OK;
}

static tddp_status fail_missing(const arrival *self)
{
    const tddp_group *group = self->group;
    char missing[TDDP_MEETING_TEXT_BYTES];
    char address[ADDRESS_BYTES];
    (void)tddp_meeting_missing(self->meeting, missing);
    return tddp_fail(TDDP_TIMEOUT,
                     "rank %d of group \"%s\" waited %.1f s in vain for rank(s) %s of %d: start "
                     "them with the same store%s, name and world size",
                     group->rank, group->name, (double)(tddp_now_ns() - self->start) / 1e9, missing,
                     group->world_size, store_address(group, address));
}

static tddp_status meet(arrival *self, int64_t deadline, tddp_cancel *cancel)
{
    char record[TDDP_PEER_RECORD_BYTES];
    const tddp_wait wait = {tddp_deadline_poll_ms(deadline), cancel};
    tddp_group *group = self->group;
    tddp_status status = tddp_peers_describe_self(group->root_rank, record);
    if (status == TDDP_OK) {
        status = tddp_meeting_give(self->meeting, (tddp_slice){record, strlen(record)}, &wait);
        group->arrived = tddp_meeting_gave(self->meeting);
    }
    if (status == TDDP_OK) {
        const tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
        status = tddp_meeting_await(self->meeting, &left);
        status = status == TDDP_TIMEOUT ? fail_missing(self) : status;
    }
    return status ? status
                  : tddp_peers_create(tddp_meeting_records(self->meeting), group->world_size,
                                      &group->peers);
}

static tddp_meeting_opts meeting_of(const tddp_group *group)
{
    return (tddp_meeting_opts){.store = group->store,
                               .name = "arrivals",
                               .rank = group->rank,
                               .world_size = group->world_size,
                               .sender = TDDP_MEETING_ALL};
}

tddp_status tddp_arrivals_exchange(tddp_group *group, const tddp_wait *wait, int64_t deadline)
{
    const int64_t now = tddp_now_ns();
    arrival self = {.group = group,
                    .read = {READ_MS, tddp_wait_cancel(wait)},
                    .start = now,
                    .next_log = now + tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS};
    tddp_meeting_opts opts = meeting_of(group);
    opts.check = check;
    opts.data = &self;
    opts.check_ms = CHECK_MS;
    tddp_status status = tddp_meeting_open(&opts, &self.meeting);
    if (status == TDDP_OK) {
        status = meet(&self, deadline, tddp_wait_cancel(wait));
        tddp_meeting_close(self.meeting);
    }
    return status;
}

tddp_status tddp_arrivals_withdraw(tddp_group *group, const tddp_wait *wait)
{
    tddp_meeting *meeting;
    const tddp_meeting_opts opts = meeting_of(group);
    tddp_status status = tddp_meeting_open(&opts, &meeting);
    if (status == TDDP_OK) {
        status = tddp_meeting_withdraw(meeting, group->arrived, wait);
        tddp_meeting_close(meeting);
    }
    return status;
}
