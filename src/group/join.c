/*
 * How the ranks of a group find each other through the store: each claims its rank, gives a
 * description of itself (peers.c) to a meeting and waits until all have. Runs on the thread that
 * creates the group.
 *
 * Keys below the group's name: `joined/RANK` counts how often this rank has joined, `left/N/RANK`
 * records that it has left the Nth group. A rank that has joined and not left is claimed by another
 * process. The keys of the Nth group of that name are below `N/`: those of the meeting "arrivals",
 * and the backend's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "group/group.h"

enum {
    KEY_BYTES = 64,
    ADDRESS_BYTES = 200,
    LEAVE_MS = 1000,
    READ_MS = 1000,
    CHECK_MS = 1000,
    CHECKED_KEYS = 8, /* each time, for ranks of PyTorch's own */
};

int64_t tddp_group_missing_log_interval_ms = 10000;

static tddp_slice rank_key(char text[KEY_BYTES], const char *what, int rank)
{
    int length = snprintf(text, KEY_BYTES, "%s/%d", what, rank);
    return (tddp_slice){text, (size_t)length};
}

static tddp_slice left_key(char text[KEY_BYTES], int64_t incarnation, int rank)
{
    int length = snprintf(text, KEY_BYTES, "left/%" PRId64 "/%d", incarnation, rank);
    return (tddp_slice){text, (size_t)length};
}

static tddp_status claim_rank(tddp_group *group, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    int64_t times;
    tddp_status status =
        tddp_store_add(group->membership, rank_key(key, "joined", group->rank), 1, wait, &times);
    if (status) {
        return status;
    }
    int left = 1;
    if (times > 1) {
        tddp_slice before = left_key(key, times - 1, group->rank);
        status = tddp_store_check(group->membership, &before, 1, wait, &left);
    }
    group->incarnation = times;
    if (status == TDDP_OK && !left) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "rank %d of group \"%s\" is taken: two processes have this rank, or an "
                           "earlier run used this store; give each process its own RANK, and each "
                           "run its own store or prefix",
                           group->rank, group->name);
    }
    if (status) {
        tddp_group_leave(group);
    }
    return status;
}

void tddp_group_leave(tddp_group *group)
{
    if (!group->membership || group->incarnation == 0) {
        return;
    }
    char key[KEY_BYTES];
    const tddp_wait wait = {LEAVE_MS, NULL};
    tddp_status status = TDDP_OK;
    if (group->peers) {
        status = tddp_store_set(group->membership, left_key(key, group->incarnation, group->rank),
                                (tddp_slice){"1", 1}, &wait);
    } else {
        int64_t times;
        status = group->arrivals ? tddp_meeting_withdraw(group->arrivals, &wait) : TDDP_OK;
        status = status ? status
                        : tddp_store_add(group->membership, rank_key(key, "joined", group->rank),
                                         -1, &wait, &times);
    }
    tddp_meeting_close(group->arrivals);
    group->arrivals = NULL;
    if (status) {
        /* Mostly the store's host has ended first, and no rank is left that would read the key. */
        tddp_log(TDDP_LOG_DEBUG, "group", "cannot record in the store that rank %d left \"%s\": %s",
                 group->rank, group->name, tddp_error_message());
    }
    group->incarnation = 0;
}

tddp_status tddp_group_wait_for_leave(tddp_store *membership, int world_size, int64_t incarnation,
                                      const tddp_wait *wait)
{
    size_t count = (size_t)world_size;
    tddp_slice *keys = tddp_alloc_array(count, sizeof *keys);
    char(*texts)[KEY_BYTES] = tddp_alloc_array(count, sizeof *texts);
    tddp_status status = keys && texts ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK) {
        for (int rank = 0; rank < world_size; rank++) {
            keys[rank] = left_key(texts[rank], incarnation, rank);
        }
        status = tddp_store_await_clients(membership, keys, count, wait);
    }
    free(texts);
    free(keys);
    return status;
}

/* --- arriving -------------------------------------------------------------------------------- */

typedef struct arrival {
    tddp_group *group;
    const tddp_wait read;
    int64_t start;
    int64_t next_log;
    int next_key; /* of PyTorch's */
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

/* Fails if one of the missing ranks, others each time, is a process of PyTorch's: it waits for this
 * one as long as this one for it. Its gloo meets others by the keys of its default group: what 1.13
 * sets first, and what later versions do. */
static tddp_status check_for_pytorch(arrival *self)
{
    static const char *const formats[] = {"0/0/rank_%d", "0//cpu//0/%d"};
    tddp_group *group = self->group;
    for (int i = 0; i < CHECKED_KEYS; i++) {
        char text[KEY_BYTES];
        int there = 0;
        const int rank = self->next_key / 2 % group->world_size;
        const int length = snprintf(text, sizeof text, formats[self->next_key++ % 2], rank);
        const tddp_slice key = {text, (size_t)length};
        if (rank == group->rank || tddp_meeting_records(group->arrivals)[rank].data) {
            continue;
        }
        tddp_status status = tddp_store_check(group->membership, &key, 1, &self->read, &there);
        if (status) {
            return status;
        }
        if (there) {
            char address[ADDRESS_BYTES];
            return tddp_fail(TDDP_MISMATCH,
                             "rank %d of group \"%s\" is a process of PyTorch, which has begun to "
                             "meet the others in the store%s in its own way: all ranks of a group "
                             "use torch-ddp; give PyTorch's processes a store of their own",
                             rank, group->name, store_address(group, address));
        }
    }
    return TDDP_OK;
}

/* While ranks are missing. */
static tddp_status check(void *data)
{
    arrival *self = data;
    const tddp_group *group = self->group;
    char missing[TDDP_MEETING_TEXT_BYTES];
    char address[ADDRESS_BYTES];
    const bool logs = tddp_now_ns() >= self->next_log;
    /* All ranks read all records: no more often than there is something to say. */
    tddp_status status = logs ? tddp_meeting_read(group->arrivals, &self->read) : TDDP_OK;
    if (status) {
        return status;
    }
    if (logs && tddp_meeting_missing(group->arrivals, missing) > 0) {
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
    (void)tddp_meeting_missing(group->arrivals, missing);
    return tddp_fail(TDDP_TIMEOUT,
                     "rank %d of group \"%s\" waited %.1f s in vain for rank(s) %s of %d: start "
                     "them with the same store%s, name and world size",
                     group->rank, group->name, (double)(tddp_now_ns() - self->start) / 1e9, missing,
                     group->world_size, store_address(group, address));
}

/* Tells the others of this rank, and waits until all have arrived: group->peers. Meanwhile log
 * lines name those that are missing, and TDDP_TIMEOUT does. After a failure tddp_group_leave()
 * withdraws from the meeting. */
static tddp_status arrive(tddp_group *group, tddp_cancel *cancel, int64_t deadline)
{
    const int64_t now = tddp_now_ns();
    arrival self = {.group = group,
                    .read = {READ_MS, cancel},
                    .start = now,
                    .next_log = now + tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS};
    const tddp_meeting_opts opts = {.store = group->store,
                                    .name = "arrivals",
                                    .rank = group->rank,
                                    .world_size = group->world_size,
                                    .sender = TDDP_MEETING_ALL,
                                    .check = check,
                                    .data = &self,
                                    .check_ms = CHECK_MS};
    char record[TDDP_PEER_RECORD_BYTES];
    tddp_status status = tddp_peers_describe_self(group->root_rank, record);
    status = status ? status : tddp_meeting_open(&opts, &group->arrivals);
    if (status == TDDP_OK) {
        const tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
        status = tddp_meeting_give(group->arrivals, (tddp_slice){record, strlen(record)}, &left);
    }
    if (status == TDDP_OK) {
        const tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
        status = tddp_meeting_await(group->arrivals, &left);
        status = status == TDDP_TIMEOUT ? fail_missing(&self) : status;
    }
    if (status == TDDP_OK) {
        status = tddp_peers_create(tddp_meeting_records(group->arrivals), group->world_size,
                                   &group->peers);
    }
    if (status == TDDP_OK) {
        tddp_meeting_close(group->arrivals);
        group->arrivals = NULL;
    }
    return status;
}

/* --- joining --------------------------------------------------------------------------------- */

/* Finds the address on which the others reach this host; NULL if it cannot be found. */
static tddp_status find_address(tddp_store *store, tddp_cancel *cancel, int64_t deadline,
                                int same_host, char **out)
{
    char text[TDDP_NET_TEXT_BYTES];
    tddp_net_address address;
    const char *found = same_host ? tddp_net_loopback() : NULL;
    const char *host = tddp_tcp_store_host(store);
    if (!same_host && host) {
        tddp_status status = tddp_net_address_towards(host, tddp_tcp_store_port(store), deadline,
                                                      tddp_cancel_fd(cancel), &address);
        if (status) {
            return status;
        }
        /* The store's own host connects by loopback, which the others cannot reach. */
        found = tddp_net_is_loopback(&address) ? NULL : tddp_net_host_text(&address, text);
    }
    *out = found ? tddp_copy_string(found) : NULL;
    return found && !*out ? TDDP_OUT_OF_MEMORY : TDDP_OK;
}

tddp_status tddp_group_join(tddp_group *group, tddp_store *store, tddp_cancel *cancel,
                            int64_t deadline, int *same_host, char **address)
{
    char prefix[KEY_BYTES];
    const tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
    tddp_status status = tddp_prefix_store_create(group->name, store, &group->membership);
    status = status ? status : claim_rank(group, &left);
    (void)snprintf(prefix, sizeof prefix, "%" PRId64, group->incarnation);
    status = status ? status : tddp_prefix_store_create(prefix, group->membership, &group->store);
    status = status ? status : arrive(group, cancel, deadline);
    if (status == TDDP_OK) {
        *same_host = tddp_peers_same_host(group->peers);
        status = find_address(store, cancel, deadline, *same_host, address);
    }
    return status;
}
