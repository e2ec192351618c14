/*
 * How the ranks of a group find each other through the store: each claims its rank, publishes its
 * host and process, and waits for all others; log lines and errors name the missing ranks. Runs on
 * the thread that creates the group.
 *
 * Keys below the group's name: `joined/RANK` counts how often this rank has joined, `left/N/RANK`
 * records that it has left the Nth group. A rank that has joined and not left is claimed by another
 * process. The keys of the Nth group of that name are below `N/`: `N/peer/RANK`, the list of ranks
 * that have arrived (`N/arrivals`), and the backend's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/group.h"

enum {
    KEY_BYTES = 64,
    LEAVE_MS = 1000,
    WAIT_SLICE_MS = 1000,
    NAMES_SHOWN = 8,
    ADDRESS_BYTES = 200
};

int64_t tddp_group_missing_log_interval_ms = 10000;

static const char loopback[] = "127.0.0.1";

/* Grows by "+RANK " with each arrival: one request reads the arrivals of any number of ranks. */
static const tddp_slice arrivals_key = {"arrivals", 8};

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

static tddp_wait time_left(int64_t deadline, const tddp_wait *wait)
{
    return (tddp_wait){tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
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

/* Records that this rank has arrived or, with '-', that it has given up. */
static tddp_status append_arrival(tddp_group *group, char change, const tddp_wait *wait)
{
    char text[24];
    int length = snprintf(text, sizeof text, "%c%d ", change, group->rank);
    return tddp_store_append(group->store, arrivals_key, (tddp_slice){text, (size_t)length}, wait);
}

void tddp_group_leave(tddp_group *group)
{
    if (!group->membership || group->incarnation == 0) {
        return;
    }
    char key[KEY_BYTES];
    tddp_wait wait = {LEAVE_MS, NULL};
    tddp_status status;
    if (group->joined) {
        status = tddp_store_set(group->membership, left_key(key, group->incarnation, group->rank),
                                (tddp_slice){"1", 1}, &wait);
    } else {
        int64_t times;
        int deleted;
        status = group->store
                     ? tddp_store_delete_key(group->store, rank_key(key, "peer", group->rank),
                                             &wait, &deleted)
                     : TDDP_OK;
        if (status == TDDP_OK && group->store) {
            status = append_arrival(group, '-', &wait);
        }
        if (status == TDDP_OK) {
            status = tddp_store_add(group->membership, rank_key(key, "joined", group->rank), -1,
                                    &wait, &times);
        }
    }
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

/* --- waiting for the others ------------------------------------------------------------------ */

static void parse_arrivals(const char *text, bool *arrived, int world_size)
{
    while (*text == '+' || *text == '-') {
        char *end;
        long rank = strtol(text + 1, &end, 10);
        if (end == text + 1) {
            return;
        }
        if (rank >= 0 && rank < world_size) {
            arrived[rank] = *text == '+';
        }
        text = *end == ' ' ? end + 1 : end;
    }
}

/* Lists the missing ranks: "2", "1, 2, 4", "1, 2, ... (30 in all)", or "" if none is missing. */
static tddp_status missing_ranks(tddp_group *group, const tddp_wait *wait, char *text, size_t size)
{
    tddp_blob arrivals = {0};
    bool *arrived = tddp_alloc_array((size_t)group->world_size, sizeof *arrived);
    if (!arrived) {
        return TDDP_OUT_OF_MEMORY;
    }
    /* The key exists, since this rank has arrived: the call does not wait. */
    tddp_status status = tddp_store_get(group->store, arrivals_key, wait, &arrivals);
    if (status == TDDP_OK) {
        parse_arrivals(arrivals.data, arrived, group->world_size);
    }
    int missing = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int rank = 0; status == TDDP_OK && rank < group->world_size; rank++) {
        if (!arrived[rank] && missing++ < NAMES_SHOWN && used < size) {
            used += (size_t)snprintf(text + used, size - used, "%s%d", used ? ", " : "", rank);
        }
    }
    if (missing > NAMES_SHOWN && used < size) {
        (void)snprintf(text + used, size - used, ", ... (%d in all)", missing);
    }
    tddp_blob_free(&arrivals);
    free(arrived);
    return status;
}

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

static void log_missing(tddp_group *group, const tddp_wait *wait, int64_t start)
{
    char missing[128];
    char address[ADDRESS_BYTES];
    if (missing_ranks(group, wait, missing, sizeof missing) == TDDP_OK && missing[0]) {
        tddp_log(TDDP_LOG_WARN, "group",
                 "rank %d of \"%s\" has waited %" PRId64 " s in the store%s for rank(s) %s of %d",
                 group->rank, group->name, (tddp_now_ns() - start) / TDDP_NS_PER_S,
                 store_address(group, address), missing, group->world_size);
    }
}

static tddp_status fail_missing(tddp_group *group, int64_t start, const char *reason)
{
    char missing[128];
    char address[ADDRESS_BYTES];
    tddp_wait wait = {LEAVE_MS, NULL};
    if (missing_ranks(group, &wait, missing, sizeof missing) || !missing[0]) {
        return tddp_fail(TDDP_TIMEOUT, "rank %d of group \"%s\": %s", group->rank, group->name,
                         reason);
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "rank %d of group \"%s\" waited %.1f s in vain for rank(s) %s of %d: start "
                     "them with the same store%s, name and world size",
                     group->rank, group->name, (double)(tddp_now_ns() - start) / 1e9, missing,
                     group->world_size, store_address(group, address));
}

static tddp_slice *peer_keys(const tddp_group *group, char (**texts)[KEY_BYTES])
{
    size_t count = (size_t)group->world_size;
    tddp_slice *keys = tddp_alloc_array(count, sizeof *keys);
    *texts = tddp_alloc_array(count, sizeof **texts);
    if (!keys || !*texts) {
        free(keys);
        free(*texts);
        return NULL;
    }
    for (int rank = 0; rank < group->world_size; rank++) {
        keys[rank] = rank_key((*texts)[rank], "peer", rank);
    }
    return keys;
}

/* Waits in short slices: a TCP store serves one call at a time, and other threads need it too. */
static tddp_status wait_for_all(tddp_group *group, const tddp_slice *keys, const tddp_wait *wait,
                                int64_t deadline)
{
    int64_t start = tddp_now_ns();
    int64_t next_log = start + tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS;
    for (;;) {
        int64_t slice = tddp_deadline_after_ms(WAIT_SLICE_MS);
        tddp_wait part = time_left(slice < deadline ? slice : deadline, wait);
        tddp_status status = tddp_store_wait(group->store, keys, (size_t)group->world_size, &part);
        if (status != TDDP_TIMEOUT) {
            return status;
        }
        if (tddp_now_ns() >= deadline) {
            return fail_missing(group, start, tddp_error_message());
        }
        if (tddp_now_ns() >= next_log) {
            tddp_wait brief = time_left(deadline, wait);
            log_missing(group, &brief, start);
            next_log += tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS;
        }
    }
}

static tddp_status read_peers(tddp_group *group, const tddp_slice *keys, const tddp_wait *wait)
{
    size_t count = (size_t)group->world_size;
    tddp_blob *records = tddp_alloc_array(count, sizeof *records);
    if (!records) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = tddp_store_multi_get(group->store, keys, count, wait, records);
    if (status == TDDP_OK) {
        status = tddp_peers_create(records, group->world_size, &group->peers);
    }
    for (size_t i = 0; i < count; i++) {
        tddp_blob_free(&records[i]);
    }
    free(records);
    return status;
}

static tddp_status exchange_peers(tddp_group *group, const tddp_wait *wait, int64_t deadline,
                                  int *same_host)
{
    char record[TDDP_PEER_RECORD_BYTES];
    char key[KEY_BYTES];
    tddp_status status = tddp_peers_describe_self(group->root_rank, record);
    if (status) {
        return status;
    }
    char(*texts)[KEY_BYTES];
    tddp_slice *keys = peer_keys(group, &texts);
    if (!keys) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_wait left = time_left(deadline, wait);
    status = tddp_store_set(group->store, rank_key(key, "peer", group->rank),
                            (tddp_slice){record, strlen(record)}, &left);
    if (status == TDDP_OK) {
        status = append_arrival(group, '+', &left);
    }
    if (status == TDDP_OK) {
        status = wait_for_all(group, keys, wait, deadline);
        group->joined = status == TDDP_OK;
    }
    if (status == TDDP_OK) {
        /* All keys exist: the deadline gets a little longer, in case it is just over. */
        left = (tddp_wait){LEAVE_MS, tddp_wait_cancel(wait)};
        status = read_peers(group, keys, &left);
    }
    if (status == TDDP_OK) {
        *same_host = tddp_peers_same_host(group->peers);
    }
    free(texts);
    free(keys);
    return status;
}

/* Finds the address on which the others reach this host; NULL if it cannot be found. */
static tddp_status find_address(tddp_store *store, const tddp_wait *wait, int64_t deadline,
                                int same_host, char **out)
{
    char text[TDDP_NET_TEXT_BYTES];
    tddp_net_address address;
    const char *found = same_host ? loopback : NULL;
    const char *host = tddp_tcp_store_host(store);
    if (!same_host && host) {
        tddp_status status =
            tddp_net_address_towards(host, tddp_tcp_store_port(store), deadline,
                                     tddp_cancel_fd(tddp_wait_cancel(wait)), &address);
        if (status) {
            return status;
        }
        /* The store's own host connects by loopback, which the others cannot reach. */
        found = tddp_net_is_loopback(&address) ? NULL : tddp_net_host_text(&address, text);
    }
    *out = found ? tddp_copy_string(found) : NULL;
    return found && !*out ? TDDP_OUT_OF_MEMORY : TDDP_OK;
}

tddp_status tddp_group_join(tddp_group *group, tddp_store *store, const tddp_wait *wait,
                            int64_t deadline, int *same_host, char **address)
{
    tddp_status status = tddp_prefix_store_create(group->name, store, &group->membership);
    tddp_wait left = time_left(deadline, wait);
    if (status == TDDP_OK) {
        status = claim_rank(group, &left);
    }
    if (status == TDDP_OK) {
        char prefix[KEY_BYTES];
        (void)snprintf(prefix, sizeof prefix, "%" PRId64, group->incarnation);
        status = tddp_prefix_store_create(prefix, group->membership, &group->store);
    }
    if (status == TDDP_OK) {
        status = exchange_peers(group, wait, deadline, same_host);
    }
    if (status == TDDP_OK) {
        status = find_address(store, wait, deadline, *same_host, address);
    }
    return status;
}
