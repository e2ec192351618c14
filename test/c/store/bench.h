/*
 * A server without a thread, so that a test can set its clock.
 */
#ifndef TDDP_STORE_BENCH_H
#define TDDP_STORE_BENCH_H

#include <sys/epoll.h>
#include <sys/socket.h>

#include "store/server/server.h"
#include "store_fixture.h"

/* A server without a thread and its one client, whose other end is `ours`. */
typedef struct bench {
    tddp_store_server server;
    tddp_server_client *client;
    atomic_int slot;
    int ours;
} bench;

static inline bench *bench_open(void)
{
    bench *b = calloc(1, sizeof *b);
    tddp_store_server_opts opts = loopback_opts();
    int ends[2];
    CHECK(b);
    opts.client_timeout_ms = 60000;
    CHECK_OK(tddp_server_configure(&b->server, &opts));
    CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    b->client = calloc(1, sizeof *b->client);
    CHECK(b->client);
    b->server.epoll_fd = -1;
    LIST_INSERT_HEAD(&b->server.clients, b->client, of_all);
    b->server.client_count = b->server.pending_count = 1;
    b->slot = ends[0] + 1;
    b->client->slot = &b->slot;
    b->client->fd = ends[0];
    b->client->events = EPOLLIN;
    b->ours = ends[1];
    tddp_server_late(&b->server, b->client);
    return b;
}

static inline void bench_close(bench *b)
{
    tddp_server_client_drop(&b->server, b->client, NULL);
    CHECK(LIST_EMPTY(&b->client->ephemerals));
    tddp_server_clients_reap(&b->server);
    tddp_server_clear(&b->server);
    CHECK_INT(b->server.in_bytes, 0);
    CHECK_INT(b->server.out_bytes, 0);
    CHECK_INT(b->server.pending_count, 0);
    close(b->ours);
    free(b);
}

static inline void bench_take(bench *b, const char *hex)
{
    char bytes[4096];
    tddp_server_client_take(&b->server, b->client, bytes, from_hex(hex, bytes));
    tddp_server_flush_unsent(&b->server);
    b->client->events = EPOLLIN; /* no descriptor is watched here */
}

#endif
