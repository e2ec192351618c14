/*
 * Waits for a server's clients to leave, before the process that hosts it ends. The waiting thread
 * adds a waiter to the server's list; the server's thread checks it after each batch of events and
 * triggers its event. Invariant: a waiter is in the list only while its thread waits, and is
 * accessed with the mutex held.
 */
#include <stdio.h>

#include "store/server/server.h"

typedef struct departure {
    tddp_waiter base;
    const tddp_slice *keys;
    size_t count;
    size_t present; /* of the keys, from the first */
    const atomic_int *own;
    uint64_t others; /* connections of other processes, when last checked */
    bool checked;
} departure;

static void check(const tddp_store_server *server, departure *waiter)
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
        tddp_waiter_wake(&waiter->base);
    }
}

void tddp_server_check_departures(tddp_store_server *server)
{
    if (!atomic_load(&server->departures_awaited)) {
        return;
    }
    pthread_mutex_lock(&server->departures_mutex);
    for (tddp_waiter *each = server->departures; each; each = each->next) {
        check(server, (departure *)each);
    }
    pthread_mutex_unlock(&server->departures_mutex);
}

tddp_status tddp_server_await_clients(tddp_store_server *server, const atomic_int *own,
                                      const tddp_slice *keys, size_t count,
                                      const tddp_store_call *call)
{
    departure waiter = {.keys = keys, .count = count, .own = own};
    char left[96] = "its server was too busy to count them";
    pthread_mutex_lock(&server->departures_mutex);
    atomic_store(&server->departures_awaited, true);
    tddp_server_poke(server); /* it looks at the list once the mutex is released */
    tddp_status status =
        tddp_waiter_wait(&waiter.base, &server->departures, &server->departures_mutex, call);
    atomic_store(&server->departures_awaited, server->departures != NULL);
    pthread_mutex_unlock(&server->departures_mutex);
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
