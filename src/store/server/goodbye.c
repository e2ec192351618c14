/*
 * Waiting for a server's clients to leave, before the process that hosts it ends. The waiting
 * thread leaves a note in the server's list; the server's thread looks at it after each round of
 * events and rings its eventfd. Invariant: a note is in the list only while its thread waits, and
 * is touched with the mutex held.
 */
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "store/server/server.h"

struct tddp_server_goodbye {
    tddp_server_goodbye *next;
    const tddp_slice *keys;
    size_t count;
    size_t there; /* of the keys, from the first */
    const atomic_int *own;
    uint64_t others; /* connections, when last looked at */
    bool looked;
    int fd;
    bool over;
};

static void look(const tddp_store_server *server, tddp_server_goodbye *note)
{
    while (note->there < note->count &&
           tddp_store_map_find(&server->values, note->keys[note->there])) {
        note->there++;
    }
    uint64_t own = (uint64_t)atomic_load(note->own);
    note->looked = true;
    note->others = server->client_count > own ? server->client_count - own : 0;
    bool said = note->count > 0 && note->there == note->count;
    if (!note->over && (said || note->others == 0)) {
        uint64_t one = 1;
        note->over = true;
        ssize_t ignored = write(note->fd, &one, sizeof one); /* cannot fail: the counter is 0 */
        (void)ignored;
    }
}

void tddp_server_check_goodbyes(tddp_store_server *server)
{
    if (!atomic_load(&server->goodbye_wanted)) {
        return;
    }
    pthread_mutex_lock(&server->goodbye_mutex);
    for (tddp_server_goodbye *note = server->goodbyes; note; note = note->next) {
        look(server, note);
    }
    pthread_mutex_unlock(&server->goodbye_mutex);
}

static void enlist(tddp_store_server *server, tddp_server_goodbye *note)
{
    pthread_mutex_lock(&server->goodbye_mutex);
    note->next = server->goodbyes;
    server->goodbyes = note;
    atomic_store(&server->goodbye_wanted, true);
    pthread_mutex_unlock(&server->goodbye_mutex);
    tddp_server_poke(server);
}

static void withdraw(tddp_store_server *server, tddp_server_goodbye *note)
{
    pthread_mutex_lock(&server->goodbye_mutex);
    tddp_server_goodbye **link = &server->goodbyes;
    while (*link != note) {
        link = &(*link)->next;
    }
    *link = note->next;
    atomic_store(&server->goodbye_wanted, server->goodbyes != NULL);
    pthread_mutex_unlock(&server->goodbye_mutex);
}

tddp_status tddp_server_await_clients(tddp_store_server *server, const atomic_int *own,
                                      const tddp_slice *keys, size_t count,
                                      const tddp_store_call *call)
{
    tddp_server_goodbye note = {.keys = keys, .count = count, .own = own};
    note.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (note.fd < 0) {
        return tddp_fail_errno("eventfd");
    }
    enlist(server, &note);
    tddp_status status =
        tddp_net_poll(note.fd, POLLIN, call->deadline_ns, tddp_store_call_cancel_fd(call));
    withdraw(server, &note);
    tddp_close(note.fd);
    if (status == TDDP_TIMEOUT && !note.looked) {
        return tddp_fail(status,
                         "timed out after %lld ms waiting for the store's clients to leave: its "
                         "server was too busy to count them",
                         (long long)call->timeout_ms);
    }
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(status,
                         "timed out after %lld ms waiting for the store's clients to leave: %llu "
                         "connections are left",
                         (long long)call->timeout_ms, (unsigned long long)note.others);
    }
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted while waiting for the store's clients to leave");
    }
    return status;
}
