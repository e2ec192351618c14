/*
 * The parts of the TCP client.
 *
 *   open.c      options, the server in this process, waiting for the workers
 *   connect.c   connections and their hello
 *   lock.c      which thread uses the connection
 *   exchange.c  one request and its answer on the connection
 *   client.c    the operations
 *   features.c  those that not every server has
 *   legacy.c    servers of PyTorch 1.13
 */
#ifndef TDDP_STORE_TCP_H
#define TDDP_STORE_TCP_H

#include <pthread.h>
#include <sys/types.h>

#include "net/net.h"
#include "store/auth.h"
#include "store/store_impl.h"
#include "store/wire.h"

/* A server that several stores of this process (one and its clones) keep alive. */
typedef struct tddp_tcp_server {
    atomic_int owners;
    atomic_int connections; /* of the owners, so that a server can distinguish them from others' */
    tddp_store_server *server;
} tddp_tcp_server;

/* What not every server of 2.x has. The hello does not say, so it is probed. */
typedef enum tddp_tcp_feature {
    TDDP_TCP_QUEUES,
    TDDP_TCP_LIST_KEYS,
    TDDP_TCP_BARRIER,
    TDDP_TCP_EPHEMERAL, /* only ours: ephemeral keys and watches */
    TDDP_TCP_FEATURES,
} tddp_tcp_feature;

/* Intervals, in milliseconds; constants but for tests, which shorten them. */
extern int64_t tddp_tcp_report_every_ms; /* between log lines of what is waited for */
/* What an impatient call still gives a request that is under way, or a connection that is made
 * again: without it a short timeout would cost the connection. */
extern int64_t tddp_tcp_grace_ms;
extern int64_t tddp_tcp_stale_ms; /* the lock of appends held for so long: its client was killed */

typedef enum tddp_tcp_support {
    TDDP_TCP_UNKNOWN,
    TDDP_TCP_HAS,
    TDDP_TCP_LACKS,
} tddp_tcp_support;

/* What is known of a server; clones inherit it. */
typedef struct tddp_tcp_traits {
    const tddp_wire_dialect *dialect; /* NULL before the first hello was answered */
    tddp_tcp_support support[TDDP_TCP_FEATURES];
} tddp_tcp_traits;

/* lock.c's. */
typedef struct tddp_tcp_lock {
    pthread_mutex_t mutex; /* guards what follows */
    bool held;
    tddp_waiter *waiters; /* in order of arrival */
} tddp_tcp_lock;

/* TDDP_TIMEOUT and TDDP_CANCELED as the call has it. */
TDDP_NODISCARD tddp_status tddp_tcp_lock_acquire(tddp_tcp_lock *lock, const tddp_store_call *call);
void tddp_tcp_lock_release(tddp_tcp_lock *lock);

typedef struct tddp_tcp_store {
    tddp_store base;
    char *host;     /* as the user named it */
    char *reach_at; /* the host to connect to: for its own server the loopback address */
    int port;
    char name[160];     /* "store HOST:PORT", for texts */
    pid_t pid;          /* of the process that may use it */
    int fd;             /* -1: given up, the next call makes a new one */
    tddp_tcp_lock lock; /* held by the thread that uses the connection */
    tddp_tcp_server *server;
    bool counted; /* in the server's connections */
    tddp_tcp_traits traits;
    tddp_bytes watched; /* the prefix of the last watch */
    bool watch_sent;    /* it was not answered yet */
    bool watch_missed;  /* its answer was not returned to a caller: the next one is due at once */
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
    bool silent;      /* the server did not answer: the connection was given up */
    bool watches;     /* goes on with a watch that was not answered yet, which all others end */
} tddp_tcp_exchange;

/* --- exchange.c ------------------------------------------------------------------------------ */

/* Refuses a store that was opened before a fork. */
TDDP_NODISCARD tddp_status tddp_tcp_check_process(const tddp_tcp_store *store);

/* Makes a connection that was given up again, for calls of several requests, too. What the call
 * still has of time counts, but a short timeout shall not cost the store. */
TDDP_NODISCARD tddp_status tddp_tcp_renew(tddp_tcp_exchange *exchange);

/* Refuses a forked child and a broken store, and takes the connection for this call. After TDDP_OK:
 * tddp_tcp_end(), which returns the status that it is given. */
TDDP_NODISCARD tddp_status tddp_tcp_begin(tddp_tcp_exchange *exchange);
TDDP_NODISCARD tddp_status tddp_tcp_end(tddp_tcp_exchange *exchange, tddp_status status);

/* How every operation of the table begins: its parameters `store` and `call` become `exchange`, and
 * `status` is TDDP_OK behind it. */
#define TDDP_TCP_BEGIN(name)                                                \
    tddp_tcp_exchange exchange = {                                          \
        .store = (tddp_tcp_store *)store, .call = call, .operation = name}; \
    tddp_status status = tddp_tcp_begin(&exchange);                         \
    if (status) {                                                           \
        return status;                                                      \
    }

/* Sends `request` in one write and empties it; `status` is the outcome of building it. */
TDDP_NODISCARD tddp_status tddp_tcp_send(tddp_tcp_exchange *exchange, tddp_status status);
TDDP_NODISCARD tddp_status tddp_tcp_receive(tddp_tcp_exchange *exchange, void *data, size_t size);
TDDP_NODISCARD tddp_status tddp_tcp_receive_u64(tddp_tcp_exchange *exchange, uint64_t *out);

/* Receives a string. When memory lacks the connection is given up. */
TDDP_NODISCARD tddp_status tddp_tcp_receive_blob(tddp_tcp_exchange *exchange, tddp_blob *out);

/* Receives a number and as many strings; with `values` pairs of them. */
TDDP_NODISCARD tddp_status tddp_tcp_receive_list(tddp_tcp_exchange *exchange, tddp_blob_list *keys,
                                                 tddp_blob_list *values);

/* The start of a request: its opcode in the server's dialect. TDDP_UNSUPPORTED: it has none. */
TDDP_NODISCARD tddp_status tddp_tcp_put_kind(tddp_tcp_exchange *exchange, tddp_wire_kind kind);

/* The start of every request with one key. */
TDDP_NODISCARD tddp_status tddp_tcp_put_head(tddp_tcp_exchange *exchange, tddp_wire_kind kind,
                                             tddp_slice key);

/* The whole of a request with a key and a number, or with a list of keys. */
TDDP_NODISCARD tddp_status tddp_tcp_put_number(tddp_tcp_exchange *exchange, tddp_wire_kind kind,
                                               tddp_slice key, uint64_t number);
TDDP_NODISCARD tddp_status tddp_tcp_put_keys(tddp_tcp_exchange *exchange, tddp_wire_kind kind,
                                             const tddp_slice *keys, size_t count);

/* Sends `request` and receives the number that answers it. */
TDDP_NODISCARD tddp_status tddp_tcp_ask(tddp_tcp_exchange *exchange, tddp_status status,
                                        uint64_t *out);

static inline bool tddp_tcp_is_legacy(const tddp_tcp_store *store)
{
    return store->traits.dialect == &tddp_wire_1_13;
}

/* Receives the byte that ends a wait which was sent. When time is up the wait is cancelled at the
 * server, or where it knows no such thing (or does not answer) the connection is given up; then
 * TDDP_TIMEOUT or TDDP_CANCELED without a text, and the store is as good as before unless it is
 * broken. */
TDDP_NODISCARD tddp_status tddp_tcp_await(tddp_tcp_exchange *exchange);

/* Ends a watch that was sent. */
TDDP_NODISCARD tddp_status tddp_tcp_end_watch(tddp_tcp_exchange *exchange);

/* WAIT for keys, with tddp_tcp_await(). */
TDDP_NODISCARD tddp_status tddp_tcp_wait(tddp_tcp_exchange *exchange, const tddp_slice *keys,
                                         size_t count);

/* Marks the store as of no further use, with the present text as the reason. */
tddp_status tddp_tcp_break(tddp_tcp_store *store, tddp_status status);

/* The store is marked broken by a failure that may only mean that the server hung up: tries a new
 * connection, and if that succeeds takes the mark away. */
TDDP_NODISCARD bool tddp_tcp_recover(tddp_tcp_exchange *exchange);

/* --- client.c -------------------------------------------------------------------------------- */

/* CHECK. */
TDDP_NODISCARD tddp_status tddp_tcp_look(tddp_tcp_exchange *exchange, const tddp_slice *keys,
                                         size_t count, bool *there);

/* SET or APPEND, which have no answer. */
TDDP_NODISCARD tddp_status tddp_tcp_send_value(tddp_tcp_exchange *exchange, tddp_wire_kind kind,
                                               tddp_slice key, tddp_slice value);

/* COMPARE_SET: tddp_blob_free(). */
TDDP_NODISCARD tddp_status tddp_tcp_swap(tddp_tcp_exchange *exchange, tddp_slice key,
                                         tddp_slice expected, tddp_slice desired, tddp_blob *out);

extern const tddp_store_ops tddp_tcp_ops;

/* --- legacy.c -------------------------------------------------------------------------------- */

/* One attempt to connect, and how far it got. */
typedef struct tddp_tcp_attempt {
    int64_t deadline_ns;
    int cancel_fd;
    bool name_known; /* the host has an address */
    bool hung_up;    /* a connection was made, and ended by the other side during the hello */
    int fd;
} tddp_tcp_attempt;

/* The hello of 1.13, which has none: a request that only its servers echo. */
TDDP_NODISCARD tddp_status tddp_tcp_legacy_hello(int fd, int64_t deadline_ns, int cancel_fd);

/* After the other side hung up on the hello of 2.x. */
TDDP_NODISCARD tddp_status tddp_tcp_legacy_connect(tddp_tcp_store *tcp, tddp_tcp_attempt *attempt);

TDDP_NODISCARD tddp_status tddp_tcp_legacy_append(tddp_tcp_exchange *exchange, tddp_slice key,
                                                  tddp_slice value);

/* --- features.c ------------------------------------------------------------------------------ */

tddp_status tddp_tcp_queue_push(tddp_store *, tddp_slice key, tddp_slice value,
                                const tddp_store_call *);
tddp_status tddp_tcp_queue_pop(tddp_store *, tddp_slice key, bool block, const tddp_store_call *,
                               tddp_blob *out);
tddp_status tddp_tcp_queue_len(tddp_store *, tddp_slice key, const tddp_store_call *, int64_t *out);
tddp_status tddp_tcp_list_keys(tddp_store *, const tddp_store_call *, tddp_blob_list *out);
tddp_status tddp_tcp_barrier(tddp_store *, tddp_slice key, int world_size, const tddp_store_call *);
tddp_status tddp_tcp_set_ephemeral(tddp_store *, tddp_slice key, tddp_slice value, int64_t limit_ms,
                                   bool if_absent, const tddp_store_call *, int *set,
                                   tddp_blob *now);
tddp_status tddp_tcp_watch(tddp_store *, tddp_slice prefix, const tddp_store_call *,
                           tddp_store_entries *out);

/* --- connect.c ------------------------------------------------------------------------------- */

/* Makes a store with a connection to the server; takes a share of `server` (may be NULL) on
 * success. `traits`: what is known of the server, or NULL. */
TDDP_NODISCARD tddp_status tddp_tcp_connect(const char *host, const char *reach_at, int port,
                                            tddp_tcp_server *server, int64_t timeout_ms,
                                            const tddp_tcp_traits *traits,
                                            const tddp_store_call *call, tddp_tcp_store **out);

/* One connection with the hello of the store's dialect. */
TDDP_NODISCARD tddp_status tddp_tcp_attempt_once(const tddp_tcp_store *tcp,
                                                 tddp_tcp_attempt *attempt);

/* Connects again, with one attempt, to a server that was met before. */
TDDP_NODISCARD tddp_status tddp_tcp_reconnect(tddp_tcp_store *store, int64_t deadline_ns,
                                              int cancel_fd);
void tddp_tcp_destroy(tddp_store *store);

/* Whether the store has a connection to its own server that is in use: a server may know of one
 * that is not counted, but not the other way round. */
void tddp_tcp_count(tddp_tcp_store *store, bool connected);

/* One share less; the server ends with the last. NULL is fine. */
void tddp_tcp_server_release(tddp_tcp_server *server);

#endif
