/*
 * Waits for a server's clients to leave, before the process that hosts it ends. The waiting thread
 * adds a waiter to the server's list; the server's thread checks it after each batch of events and
 * signals its eventfd. Invariant: a waiter is in the list only while its thread waits, and is
 * accessed with the mutex held.
 */
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "store/server/server.h"

struct tddp_server_departure {
    tddp_server_departure *next;
    const tddp_slice *keys;
    size_t count;
    size_t present; /* of the keys, from the first */
    const atomic_int *own;
    uint64_t others; /* connections of other processes, when last checked */
    bool checked;
    int fd;
    bool over;
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
    if (!waiter->over && (announced || waiter->others == 0)) {
        uint64_t one = 1;
        waiter->over = true;
        ssize_t ignored = write(waiter->fd, &one, sizeof one); /* cannot fail: the counter is 0 */
        (void)ignored;
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

static void add(tddp_store_server *server, tddp_server_departure *waiter)
{
    pthread_mutex_lock(&server->departures_mutex);
    waiter->next = server->departures;
    server->departures = waiter;
    atomic_store(&server->departures_awaited, true);
    pthread_mutex_unlock(&server->departures_mutex);
    tddp_server_poke(server);
}

static void remove_waiter(tddp_store_server *server, tddp_server_departure *waiter)
{
    pthread_mutex_lock(&server->departures_mutex);
    tddp_server_departure **link = &server->departures;
    while (*link != waiter) {
        link = &(*link)->next;
    }
    *link = waiter->next;
    atomic_store(&server->departures_awaited, server->departures != NULL);
    pthread_mutex_unlock(&server->departures_mutex);
}

tddp_status tddp_server_await_clients(tddp_store_server *server, const atomic_int *own,
                                      const tddp_slice *keys, size_t count,
                                      const tddp_store_call *call)
{
    tddp_server_departure waiter = {.keys = keys, .count = count, .own = own};
    waiter.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (waiter.fd < 0) {
        return tddp_fail_errno("eventfd");
    }
    add(server, &waiter);
    tddp_status status =
        tddp_net_poll(waiter.fd, POLLIN, call->deadline_ns, tddp_store_call_cancel_fd(call));
    remove_waiter(server, &waiter);
    tddp_close(waiter.fd);
    if (status == TDDP_TIMEOUT && !waiter.checked) {
        return tddp_fail(status,
                         "timed out after %lld ms waiting for the store's clients to leave: its "
                         "server was too busy to count them",
                         (long long)call->timeout_ms);
    }
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(status,
                         "timed out after %lld ms waiting for the store's clients to leave: %llu "
                         "connections are left",
                         (long long)call->timeout_ms, (unsigned long long)waiter.others);
    }
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted while waiting for the store's clients to leave");
    }
    return status;
}
