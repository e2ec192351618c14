/*
 * How the ranks of a group find each other through the store: each claims its rank, tells the
 * others of itself and waits for them (arrivals.c). Runs on the thread that creates the group.
 *
 * Keys below the group's name: `joined/RANK` counts how often this rank has joined, `left/N/RANK`
 * records that it has left the Nth group. A rank that has joined and not left is claimed by another
 * process. The keys of the Nth group of that name are below `N/`: those of the ranks' arrivals, and
 * the backend's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/arrivals.h"

enum { KEY_BYTES = 64, LEAVE_MS = 1000 };

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
        status = group->store ? tddp_arrivals_withdraw(group, &wait) : TDDP_OK;
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

/* Finds the address on which the others reach this host; NULL if it cannot be found. */
static tddp_status find_address(tddp_store *store, const tddp_wait *wait, int64_t deadline,
                                int same_host, char **out)
{
    char text[TDDP_NET_TEXT_BYTES];
    tddp_net_address address;
    const char *found = same_host ? tddp_net_loopback() : NULL;
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
        status = tddp_arrivals_exchange(group, wait, deadline);
    }
    if (status == TDDP_OK) {
        group->joined = true;
        *same_host = tddp_peers_same_host(group->peers);
        status = find_address(store, wait, deadline, *same_host, address);
    }
    return status;
}
