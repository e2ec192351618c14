/*
 * The parts of the TCP client: tcp_client.c (the operations), exchange.c (one request and its
 * answer on the connection), tcp_open.c (connecting, the hello, waiting for the workers).
 */
#ifndef TDDP_STORE_TCP_H
#define TDDP_STORE_TCP_H

#include <sys/types.h>

#include "net/net.h"
#include "store/auth.h"
#include "store/store_impl.h"
#include "store/wire.h"

/* A server that several stores of this process (one and its clones) keep alive. */
typedef struct tddp_tcp_server {
    atomic_int owners;
    tddp_store_server *server;
} tddp_tcp_server;

typedef struct tddp_tcp_store {
    tddp_store base;
    char *host;     /* as the user named it */
    char *reach_at; /* the host to connect to: for its own server the loopback address */
    int port;
    char name[160]; /* "store HOST:PORT", for texts */
    pid_t pid;      /* of the process that may use it */
    int fd;
    int turn_fd; /* an eventfd that holds 1 while nobody uses the connection */
    tddp_tcp_server *server;
    bool broken;
    char broken_why[512];
} tddp_tcp_store;

/* One use of the connection. */
typedef struct tddp_tcp_exchange {
    tddp_tcp_store *store;
    const tddp_store_call *call;
    const char *operation; /* for texts */
    tddp_bytes request;
    int64_t grace_ns; /* 0, or the moment at which also an answer under way is given up */
    size_t sent;      /* bytes of the last request, for texts */
} tddp_tcp_exchange;

/* --- exchange.c ------------------------------------------------------------------------------ */

/* Refuses a store that was opened before a fork. */
TDDP_NODISCARD tddp_status tddp_tcp_check_process(const tddp_tcp_store *store);

/* Refuses a forked child and a broken store, and takes the connection for this call. After TDDP_OK:
 * tddp_tcp_end(). */
TDDP_NODISCARD tddp_status tddp_tcp_begin(tddp_tcp_exchange *exchange);
void tddp_tcp_end(tddp_tcp_exchange *exchange);

/* Sends `request` in one write and empties it; `status` is what building it came to. */
TDDP_NODISCARD tddp_status tddp_tcp_send(tddp_tcp_exchange *exchange, tddp_status status);
TDDP_NODISCARD tddp_status tddp_tcp_receive(tddp_tcp_exchange *exchange, void *data, size_t size);
TDDP_NODISCARD tddp_status tddp_tcp_receive_u64(tddp_tcp_exchange *exchange, uint64_t *out);

/* Receives a string. When memory lacks it is passed over, and the connection stays usable. */
TDDP_NODISCARD tddp_status tddp_tcp_receive_blob(tddp_tcp_exchange *exchange, tddp_blob *out);

/* WAIT for keys (already as the server knows them), with CANCEL_WAIT when time is up. */
TDDP_NODISCARD tddp_status tddp_tcp_wait(tddp_tcp_exchange *exchange, const tddp_slice *keys,
                                         size_t count);

/* Marks the store as of no further use, with the present text as the reason. */
tddp_status tddp_tcp_break(tddp_tcp_store *store, tddp_status status);

/* --- tcp_client.c
 * ----------------------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_tcp_put_key(tddp_bytes *to, tddp_slice key);

extern const tddp_store_ops tddp_tcp_ops;

/* Adds to a counter; `prefixed` tells whether the key is a user's. */
TDDP_NODISCARD tddp_status tddp_tcp_add(tddp_tcp_store *store, tddp_slice key, bool prefixed,
                                        int64_t delta, const tddp_store_call *call, int64_t *out);

/* --- tcp_open.c ------------------------------------------------------------------------------ */

/* Makes a store with a connection to the server; takes a share of `server` (may be NULL) on
 * success. */
TDDP_NODISCARD tddp_status tddp_tcp_connect(const char *host, const char *reach_at, int port,
                                            tddp_tcp_server *server, int64_t timeout_ms,
                                            const tddp_store_call *call, tddp_tcp_store **out);
void tddp_tcp_destroy(tddp_store *store);

#endif
