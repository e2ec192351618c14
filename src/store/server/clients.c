/*
 * Connections of the server: receives until requests are complete, and sends answers as fast as the
 * client reads them. Server thread only. A client that is slow, silent or in the middle of a
 * message costs its buffer and nothing else. Clients are freed by tddp_server_clients_reap() only,
 * since events and lists of the same loop iteration may still point to them.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "store/server/server.h"

/* While more output than this waits, a client's further requests wait too: who never reads keeps no
 * more than this and one answer. */
enum { OUT_PAUSE_BYTES = 1 << 20 };

static atomic_int *take_slot(tddp_store_server *server, int fd)
{
    for (tddp_server_slots *slots = &server->slots;;) {
        for (size_t i = 0; i < sizeof slots->fds / sizeof *slots->fds; i++) {
            if (atomic_load(&slots->fds[i]) == 0) {
                atomic_store(&slots->fds[i], fd + 1);
                return &slots->fds[i];
            }
        }
        tddp_server_slots *next = atomic_load(&slots->next);
        if (!next) {
            next = tddp_alloc(sizeof *next);
            if (!next) {
                return NULL;
            }
            atomic_store(&slots->next, next);
        }
        slots = next;
    }
}

static void watch(tddp_store_server *server, tddp_server_client *client)
{
    bool held = client->in.size > 0 && client->in.size >= client->in_needed;
    bool paused = held || client->out.size - client->out_sent > OUT_PAUSE_BYTES;
    uint32_t events = (paused ? 0 : EPOLLIN) | (client->out.size ? EPOLLOUT : 0);
    struct epoll_event event = {.events = events, .data = {.ptr = client}};
    if (events != client->events && !client->dropped) {
        client->events = events;
        (void)epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, client->fd, &event);
    }
}

/* Makes room for a new connection by dropping one that has not completed a message. */
static void make_room(tddp_store_server *server)
{
    while ((server->client_count >= server->most_clients ||
            server->pending_count >= server->most_pending) &&
           tddp_server_evict(server)) {
    }
}

void tddp_server_client_add(tddp_store_server *server, int fd, const tddp_net_address *from)
{
    char why[96];
    make_room(server);
    snprintf(why, sizeof why, "there are %llu already (TDDP_STORE_MAX_CLIENTS)",
             (unsigned long long)server->client_count);
    bool full = server->client_count >= server->most_clients;
    tddp_server_client *client = full ? NULL : tddp_alloc(sizeof *client);
    atomic_int *slot = client ? take_slot(server, fd) : NULL;
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = client}};
    if (!slot || epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event)) {
        tddp_server_say(server, "cannot serve", from,
                        full   ? why
                        : slot ? strerror(errno)
                               : tddp_error_message());
        if (slot) {
            atomic_store(slot, 0);
        }
        free(client);
        tddp_net_close(fd);
        return;
    }
    client->fd = fd;
    client->slot = slot;
    client->address = *from;
    client->events = EPOLLIN;
    LIST_INSERT_HEAD(&server->clients, client, of_all);
    server->client_count++;
    server->pending_count++;
    tddp_server_late(server, client);
}

void tddp_server_client_drop(tddp_store_server *server, tddp_server_client *client, const char *why)
{
    if (client->dropped) {
        return;
    }
    if (why && client->out.size) {
        /* Its earlier requests are answered, as far as that is possible without waiting. */
        (void)send(client->fd, client->out.data + client->out_sent,
                   client->out.size - client->out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (why) {
        tddp_server_say(server, "dropped", &client->address, why);
    }
    client->dropped = true;
    tddp_server_wait_cancel(client);
    tddp_server_watch_end(client);
    tddp_server_delete_owned(server, client);
    tddp_server_forget(server, client);
    server->client_count--;
    /* A forked child may hold a copy, and then closing alone would not end the watch. */
    (void)epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, client->fd, NULL);
    atomic_store(client->slot, 0);
    tddp_net_close(client->fd);
    client->next_dropped = server->dropped;
    server->dropped = client;
}

void tddp_server_clients_reap(tddp_store_server *server)
{
    while (server->dropped) {
        tddp_server_client *client = server->dropped;
        server->dropped = client->next_dropped;
        LIST_REMOVE(client, of_all);
        tddp_bytes_free(&client->in);
        tddp_bytes_free(&client->out);
        free(client);
    }
}

void tddp_server_clients_drop(tddp_store_server *server)
{
    while (!LIST_EMPTY(&server->clients)) {
        tddp_server_client_drop(server, LIST_FIRST(&server->clients), NULL);
        tddp_server_clients_reap(server);
    }
}

void tddp_server_clients_free(tddp_store_server *server)
{
    tddp_server_clients_drop(server);
    tddp_server_slots *slots = atomic_load(&server->slots.next);
    while (slots) {
        tddp_server_slots *next = atomic_load(&slots->next);
        free(slots);
        slots = next;
    }
}

void tddp_server_client_unsent(tddp_store_server *server, tddp_server_client *client)
{
    if (!client->unsent) {
        client->unsent = true;
        STAILQ_INSERT_TAIL(&server->unsent, client, of_unsent);
    }
}

/* Executes one request; a failure's text says why the client must be dropped. */
static tddp_status carry_out(tddp_store_server *server, tddp_server_client *client,
                             const tddp_wire_request *request)
{
    if (request->kind == TDDP_WIRE_AUTH_BEGIN || request->kind == TDDP_WIRE_AUTH_PROVE) {
        return tddp_server_authenticate(server, client, request);
    }
    tddp_status status = tddp_server_execute(server, client, request);
    if (status == TDDP_OK && !client->admitted && !client->dropped) {
        tddp_server_admit(server, client, request->kind);
    }
    return status;
}

/* Reads a request once it is known in which dialect, and that it may be one. */
static tddp_wire_result read_request(tddp_store_server *server, tddp_server_client *client,
                                     const char *data, size_t size, tddp_wire_parse *parse)
{
    if (!client->dialect) {
        tddp_wire_result result = tddp_wire_choose(data, size, &client->dialect, parse);
        if (result != TDDP_WIRE_COMPLETE) {
            return result;
        }
    }
    if (!client->admitted && tddp_server_may_send(server, client, (unsigned char)*data)) {
        snprintf(parse->fault, sizeof parse->fault, "%.150s", tddp_error_message());
        return TDDP_WIRE_MALFORMED;
    }
    return tddp_wire_read_on(client->dialect, &server->limits, data, size, &client->in_read, parse);
}

/* Carries out the complete requests at the start of `data`; returns the bytes they took. */
static size_t run_requests(tddp_store_server *server, tddp_server_client *client, const char *data,
                           size_t size)
{
    size_t done = 0;
    client->in_needed = 0;
    while (done < size && !client->dropped &&
           client->out.size - client->out_sent <= OUT_PAUSE_BYTES) {
        tddp_wire_parse parse;
        tddp_wire_result result = read_request(server, client, data + done, size - done, &parse);
        if (result == TDDP_WIRE_MALFORMED) {
            tddp_server_client_drop(server, client, parse.fault);
        } else if (result == TDDP_WIRE_MORE) {
            client->in_needed = parse.needed;
            break;
        } else if (tddp_server_holds(server, &parse.request)) {
            break;
        } else if (carry_out(server, client, &parse.request)) {
            tddp_server_client_drop(server, client, tddp_error_message());
        } else {
            done += parse.request.size;
        }
    }
    return done;
}

/* Continues with requests that were held back or are now complete. Returns whether there
 * were any. */
static bool run_buffered(tddp_store_server *server, tddp_server_client *client)
{
    if (client->in.size == 0 || client->in.size < client->in_needed) {
        return false;
    }
    size_t done = run_requests(server, client, client->in.data, client->in.size);
    if (done == client->in.size) {
        tddp_bytes_free(&client->in); /* thousands of idle clients must not keep buffers */
    } else {
        tddp_bytes_consume(&client->in, done);
    }
    return done > 0;
}

/* Returns whether a request was carried out. */
static bool take_bytes(tddp_store_server *server, tddp_server_client *client, const char *data,
                       size_t size)
{
    size_t done = 0;
    if (client->in.size == 0) {
        done = run_requests(server, client, data, size);
        if (client->dropped || done == size) {
            return true;
        }
    }
    if (tddp_bytes_append(&client->in, data + done, size - done)) {
        tddp_server_client_drop(server, client, tddp_error_message());
    } else if (done == 0) {
        return run_buffered(server, client);
    }
    return done > 0;
}

void tddp_server_client_take(tddp_store_server *server, tddp_server_client *client,
                             const char *data, size_t size)
{
    client->received = true;
    tddp_server_note_received(client);
    client->moved += client->out.size ? 0 : size;
    bool completed = take_bytes(server, client, data, size);
    tddp_server_note_progress(server, client, completed);
    tddp_server_count_buffers(server, client);
    tddp_server_limit_input(server);
}

void tddp_server_client_receive(tddp_store_server *server, tddp_server_client *client)
{
    ssize_t size;
    do {
        size = recv(client->fd, server->scratch, sizeof server->scratch, 0);
    } while (size < 0 && errno == EINTR);
    if (size > 0) {
        tddp_server_client_take(server, client, server->scratch, (size_t)size);
    } else if (size == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        tddp_server_client_drop(server, client, NULL);
    }
}

static void flush(tddp_store_server *server, tddp_server_client *client)
{
    while (client->out_sent < client->out.size) {
        ssize_t sent = send(client->fd, client->out.data + client->out_sent,
                            client->out.size - client->out_sent, MSG_NOSIGNAL);
        if (sent >= 0) {
            client->out_sent += (size_t)sent;
            client->moved += client->events & EPOLLOUT ? (size_t)sent : 0; /* it was owed */
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            break;
        } else if (errno != EINTR) {
            tddp_server_client_drop(server, client, NULL);
            return;
        }
    }
    if (client->out_sent == client->out.size) {
        tddp_bytes_free(&client->out);
        client->out_sent = 0;
    }
    tddp_server_count_buffers(server, client);
}

void tddp_server_flush_unsent(tddp_store_server *server)
{
    while (!STAILQ_EMPTY(&server->unsent)) {
        tddp_server_client *client = STAILQ_FIRST(&server->unsent);
        STAILQ_REMOVE_HEAD(&server->unsent, of_unsent);
        client->unsent = false;
        if (!client->dropped) {
            flush(server, client);
        }
        if (!client->dropped) {
            bool completed = run_buffered(server, client);
            tddp_server_note_progress(server, client, completed);
            tddp_server_count_buffers(server, client);
            watch(server, client);
        }
    }
}

void tddp_server_client_event(tddp_store_server *server, tddp_server_client *client,
                              uint32_t events)
{
    if (client->dropped) {
        return;
    }
    if (events & EPOLLOUT) {
        tddp_server_client_unsent(server, client);
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        tddp_server_client_receive(server, client);
    }
    tddp_server_flush_unsent(server);
    watch(server, client);
}
