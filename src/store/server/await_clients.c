/*
 * Waits for a server's clients to leave, before the process that hosts it ends. The waiting thread
 * adds a waiter to the server's list; the server's thread checks it after each batch of events and
 * triggers its event. Invariant: a waiter is in the list only while its thread waits, and is
 * accessed with the mutex held.
 */
#include <poll.h>
#include <stdio.h>

#include "store/server/server.h"

struct tddp_server_departure {
    tddp_server_departure *next;
    const tddp_slice *keys;
    size_t count;
    size_t present; /* of the keys, from the first */
    const atomic_int *own;
    uint64_t others; /* connections of other processes, when last checked */
    bool checked;
    tddp_cancel *over; /* a cancel token, used as an event that can be polled */
};

static void check(const tddp_store_server *server, tddp_server_departure *waiter)
{
    while (waiter->present < waiter->count &&
           tddp_store_map_find(&server->values, waiter->keys[waiter->present])) {
        waiter->present++;
    }
    uint64_t own = (uint64_t)atomic_load(waiter->own);
    waiter->checked = true;
    waiter->others = server->client_count > own ? server->client_count - own : 0;
    bool announced = waiter->count > 0 && waiter->present == waiter->count;
    if (announced || waiter->others == 0) {
        tddp_cancel_trigger(waiter->over);
    }
}

void tddp_server_check_departures(tddp_store_server *server)
{
    if (!atomic_load(&server->departures_awaited)) {
        return;
    }
    pthread_mutex_lock(&server->departures_mutex);
    for (tddp_server_departure *waiter = server->departures; waiter; waiter = waiter->next) {
        check(server, waiter);
    }
    pthread_mutex_unlock(&server->departures_mutex);
}

/* Waits while the waiter is in the list. */
static tddp_status await(tddp_store_server *server, tddp_server_departure *waiter,
                         const tddp_store_call *call)
{
    pthread_mutex_lock(&server->departures_mutex);
    waiter->next = server->departures;
    server->departures = waiter;
    atomic_store(&server->departures_awaited, true);
    pthread_mutex_unlock(&server->departures_mutex);
    tddp_server_poke(server);
    tddp_status status = tddp_net_poll(tddp_cancel_fd(waiter->over), POLLIN, call->deadline_ns,
                                       tddp_store_call_cancel_fd(call));
    pthread_mutex_lock(&server->departures_mutex);
    tddp_server_departure **link = &server->departures;
    while (*link != waiter) {
        link = &(*link)->next;
    }
    *link = waiter->next;
    atomic_store(&server->departures_awaited, server->departures != NULL);
    pthread_mutex_unlock(&server->departures_mutex);
    return status;
}

tddp_status tddp_server_await_clients(tddp_store_server *server, const atomic_int *own,
                                      const tddp_slice *keys, size_t count,
                                      const tddp_store_call *call)
{
    tddp_server_departure waiter = {.keys = keys, .count = count, .own = own};
    char left[96] = "its server was too busy to count them";
    tddp_status status = tddp_cancel_create(&waiter.over);
    if (status) {
        return status;
    }
    status = await(server, &waiter, call);
    tddp_cancel_free(waiter.over);
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted while waiting for the store's clients to leave");
    }
    if (waiter.checked) {
        (void)snprintf(left, sizeof left, "%llu connections are left",
                       (unsigned long long)waiter.others);
    }
    return status != TDDP_TIMEOUT
               ? status
               : tddp_fail(status,
                           "timed out after %lld ms waiting for the store's clients to leave: %s",
                           (long long)call->timeout_ms, left);
}
