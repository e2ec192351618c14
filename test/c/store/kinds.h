/*
 * Stores of every kind for tests that hold for all of them, and a gate that makes of our server one
 * that uses the protocol of PyTorch 1.13 only.
 */
#ifndef TDDP_STORE_KINDS_H
#define TDDP_STORE_KINDS_H

#include <stdatomic.h>

#include "store_fixture.h"

/* --- the gate -------------------------------------------------------------------------------- */

typedef struct gate {
    int listen_fd;
    int server_port;
    int refusals; /* how many hellos of 2.x are refused; negative: all */
    bool lacking; /* hangs up on what not every server has */
    atomic_int stop;
    atomic_int refused;  /* hellos of 2.x */
    atomic_int accepted; /* connections of the older dialect */
    atomic_int open;     /* of those, still relayed */
    pthread_t thread;
} gate;

typedef struct relay {
    gate *gate;
    int ends[2];
} relay;

/* Moves what has come from one end to the other; false when that one has hung up. */
static inline bool relay_some(const relay *r, int from, int to)
{
    char bytes[65536];
    ssize_t size = recv(from, bytes, sizeof bytes, 0);
    size_t done = 0;
    if (size > 0 && r->gate->lacking && from == r->ends[0] &&
        ((bytes[0] >= 0x0e && bytes[0] <= 0x12) || (unsigned char)bytes[0] >= 0xf2)) {
        return false; /* a request comes in one piece here */
    }
    return size > 0 && tddp_net_send(to, bytes, (size_t)size, &done, tddp_deadline_after_ms(20000),
                                     -1) == TDDP_OK;
}

static inline void *relay_body(void *data)
{
    relay *r = data;
    struct pollfd fds[2] = {{.fd = r->ends[0], .events = POLLIN},
                            {.fd = r->ends[1], .events = POLLIN}};
    bool going = true;
    while (going && !atomic_load(&r->gate->stop)) {
        (void)poll(fds, 2, 50);
        for (int i = 0; i < 2 && going; i++) {
            going = fds[i].revents == 0 || relay_some(r, r->ends[i], r->ends[1 - i]);
        }
    }
    tddp_net_close(r->ends[0]);
    tddp_net_close(r->ends[1]);
    atomic_fetch_sub(&r->gate->open, 1);
    free(r);
    return NULL;
}

/* As a server of 1.13 does: a first byte 00 is a SET, and what follows no sane length. */
static inline void gate_admit(gate *g, int fd)
{
    unsigned char first = 0;
    tddp_status status = tddp_net_poll(fd, POLLIN, tddp_deadline_after_ms(5000), -1);
    bool received = status == TDDP_OK && recv(fd, &first, 1, MSG_PEEK) == 1;
    bool refuse = first == 0 && (g->refusals < 0 || atomic_load(&g->refused) < g->refusals);
    if (!received || refuse) {
        atomic_fetch_add(&g->refused, 1);
        tddp_net_close(fd);
        return;
    }
    relay *r = calloc(1, sizeof *r);
    *r = (relay){.gate = g, .ends = {fd, -1}};
    CHECK_OK(tddp_net_connect_host("127.0.0.1", g->server_port, tddp_deadline_after_ms(5000), -1,
                                   &r->ends[1]));
    atomic_fetch_add(&g->accepted, 1);
    atomic_fetch_add(&g->open, 1);
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, relay_body, r), 0);
    pthread_detach(thread);
}

static inline void *gate_body(void *data)
{
    gate *g = data;
    while (!atomic_load(&g->stop)) {
        int fd;
        tddp_net_address from;
        if (tddp_net_poll(g->listen_fd, POLLIN, tddp_deadline_after_ms(50), -1) == TDDP_OK &&
            tddp_net_accept(g->listen_fd, &fd, &from)) {
            gate_admit(g, fd);
        }
    }
    return NULL;
}

/* Returns its port. */
static inline int gate_open(gate *g, int server_port, int refusals, bool lacking)
{
    *g = (gate){.server_port = server_port, .refusals = refusals, .lacking = lacking};
    tddp_net_address local;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &g->listen_fd));
    CHECK_OK(tddp_net_local(g->listen_fd, &local));
    CHECK_INT(pthread_create(&g->thread, NULL, gate_body, g), 0);
    return tddp_net_port(&local);
}

static inline void gate_close(gate *g)
{
    atomic_store(&g->stop, 1);
    pthread_join(g->thread, NULL);
    CHECK_UNTIL(!atomic_load(&g->open));
    tddp_net_close(g->listen_fd);
}

/* A server of ours behind a gate. */
typedef struct setting {
    tddp_store_server *server;
    gate gate;
    int port;
} setting;

static inline void setting_open(setting *s, int refusals, bool lacking)
{
    s->server = loopback_server();
    s->port = gate_open(&s->gate, tddp_store_server_port(s->server), refusals, lacking);
}

static inline void setting_close(setting *s)
{
    gate_close(&s->gate);
    tddp_store_server_stop(s->server);
}

/* --- every kind ------------------------------------------------------------------------------ */

typedef struct fixture {
    const char *kind;
    tddp_store *base;
    tddp_store *store; /* the one under test */
    tddp_store_server *server;
    gate *gate;
    char path[64];
} fixture;

/* The last two are of the older dialect, and only the first four have queues. */
static const char *const kinds[] = {"tcp",  "hash",        "prefix/tcp", "prefix/hash",
                                    "file", "prefix/file", "tcp 1.13",   "prefix/tcp 1.13"};
enum { KINDS = sizeof kinds / sizeof *kinds, NEWER_KINDS = KINDS - 2, KINDS_WITH_QUEUES = 4 };

static inline fixture fixture_open(const char *kind)
{
    fixture f = {.kind = kind};
    printf("kind %s\n", kind);
    fflush(stdout);
    if (strstr(kind, "tcp")) {
        f.server = loopback_server();
        int port = tddp_store_server_port(f.server);
        if (strstr(kind, "1.13")) {
            f.gate = calloc(1, sizeof *f.gate);
            port = gate_open(f.gate, port, -1, false);
        }
        f.base = client_of(port);
    } else if (strstr(kind, "file")) {
        static int number;
        snprintf(f.path, sizeof f.path, "/tmp/tddp_store_test_%d_%d", (int)getpid(), number++);
        CHECK_OK(tddp_file_store_open(f.path, 1, 20000, &f.base));
    } else {
        CHECK_OK(tddp_hash_store_create(20000, &f.base));
    }
    if (strstr(kind, "prefix/")) {
        CHECK_OK(tddp_prefix_store_create("a/b", f.base, &f.store));
    } else {
        f.store = tddp_store_retain(f.base);
    }
    return f;
}

static inline void fixture_close(fixture *f)
{
    tddp_store_release(f->store);
    tddp_store_release(f->base);
    if (f->gate) {
        gate_close(f->gate);
        free(f->gate);
    }
    tddp_store_server_stop(f->server);
    if (f->path[0]) {
        CHECK(access(f->path, F_OK) != 0); /* removed by the last of 1 */
    }
}

#define FOR_EACH_OF(f, how_many)                                            \
    for (int kind_index = 0; kind_index < (how_many); kind_index++)         \
        for (fixture f = fixture_open(kinds[kind_index]), *once = &f; once; \
             fixture_close(&f), once = NULL)
#define FOR_EACH_KIND(f) FOR_EACH_OF(f, KINDS)
#define FOR_EACH_NEWER_KIND(f) FOR_EACH_OF(f, NEWER_KINDS)
#define FOR_EACH_KIND_WITH_QUEUES(f) FOR_EACH_OF(f, KINDS_WITH_QUEUES)

/* --- small helpers ---------------------------------------------------------------------------- */

static inline void check_pop(tddp_store *store, const char *key, const char *expected)
{
    tddp_blob got;
    CHECK_OK(tddp_store_queue_pop(store, text(key), 1, NULL, &got));
    CHECK_TEXT(got.data, expected);
    CHECK_INT(got.size, strlen(expected));
    tddp_blob_free(&got);
}

static inline int64_t length(tddp_store *store, const char *key)
{
    int64_t length = -7;
    CHECK_OK(tddp_store_queue_len(store, text(key), NULL, &length));
    return length;
}

static inline int there(tddp_store *store, const char *key)
{
    int all = -7;
    tddp_slice slice = text(key);
    CHECK_OK(tddp_store_check(store, &slice, 1, NULL, &all));
    return all;
}

/* Once the test's first thread waits. */
static inline void *trigger_soon(void *cancel)
{
    CHECK_AWAIT_ASLEEP(getpid());
    tddp_cancel_trigger(cancel);
    return NULL;
}

#endif
