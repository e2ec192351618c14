/**
 * @file store.h
 * @brief Key-value stores: how the ranks of a job find each other and agree.
 *
 * A store is reference counted and may be used by several threads; a TCP store sends one request at
 * a time, so a thread that waits holds the others up (use tddp_store_clone() for a connection of
 * one's own). Keys and values are bytes. Every call that blocks takes a `const tddp_wait *`; NULL
 * means the store's own timeout.
 *
 * Statuses common to all calls: TDDP_INVALID_ARGUMENT, TDDP_TIMEOUT (the text names the keys),
 * TDDP_CANCELED, TDDP_NETWORK (the connection is gone: the store is of no further use),
 * TDDP_PROTOCOL, TDDP_STORE, TDDP_OUT_OF_MEMORY, TDDP_FORKED (a TCP store made before a fork and
 * used in the child).
 *
 * The wire format is that of PyTorch's TCPStore (2.x), the file format that of its FileStore.
 * Server and client also support the wire format of PyTorch 1.13: the server detects it by a
 * client's first bytes, the client by a server that hangs up on the newer hello and then answers
 * the older one. What 1.13 lacks is emulated (append, multi_get, multi_set), or TDDP_UNSUPPORTED
 * (queues, list_keys, barrier). Ephemeral keys and watches are an extension of it.
 */
#ifndef TDDP_STORE_H
#define TDDP_STORE_H

#include <stddef.h>
#include <stdint.h>

#include <tddp/wait.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A key-value store. Reference counted; any thread. */
typedef struct tddp_store tddp_store;
/** The server of TCP stores. */
typedef struct tddp_store_server tddp_store_server;

/** PyTorch's default: five minutes. */
#define TDDP_STORE_DEFAULT_TIMEOUT_MS (300 * 1000)

/** Bytes. As a result it is owned by the caller, who frees it with tddp_blob_free(). `data` of a
 *  result is followed by a NUL that `size` does not count. */
typedef struct tddp_blob {
    char *data;
    size_t size;
} tddp_blob;

/** Frees the bytes and clears the fields. An empty blob is fine. */
TDDP_API void tddp_blob_free(tddp_blob *blob);

/** Several blobs, owned by the caller, who frees them with tddp_blob_list_free(). */
typedef struct tddp_blob_list {
    tddp_blob *blobs;
    size_t count;
} tddp_blob_list;

/** Frees the blobs and clears the fields. An empty list is fine. */
TDDP_API void tddp_blob_list_free(tddp_blob_list *list);

/** Borrowed bytes, as an argument. */
typedef struct tddp_slice {
    const char *data;
    size_t size;
} tddp_slice;

/* --- the server ------------------------------------------------------------------------------ */

/**
 * Whom a server listens to, and what it takes from a client. Where a field is 0 (or NULL), a
 * variable of the server's environment decides; where that is not set, the default. A client that
 * goes beyond is dropped, with a log line of its address and the reason; other clients are not
 * affected.
 *
 *   field              variable                      default
 *   max_key_bytes      TDDP_STORE_MAX_KEY_BYTES      8 KiB
 *   max_value_bytes    TDDP_STORE_MAX_VALUE_BYTES    8 MiB
 *   max_keys           TDDP_STORE_MAX_KEYS           131072 in one request
 *   max_request_bytes  TDDP_STORE_MAX_REQUEST_BYTES  16 of the largest values. What one client
 *                                                    costs: at most that for a request half
 *                                                    received, and twice that in unsent answers
 *   max_total_bytes    TDDP_STORE_MAX_TOTAL_BYTES    1 GiB of keys and values, with 88 bytes for
 *                                                    each key on top
 *   max_buffered_bytes TDDP_STORE_MAX_BUFFERED_BYTES 1 GiB, or 4 of the largest requests: for all
 *                                                    clients together, half of it for what they
 *                                                    have sent and half for unsent answers
 *   max_clients        TDDP_STORE_MAX_CLIENTS        65536
 *   max_pending        TDDP_STORE_MAX_PENDING        1024 of these, or a quarter of the descriptors
 *                                                    that the process may have: connections that
 *                                                    have not yet sent a first message (with a
 *                                                    secret: proved it)
 *   client_timeout_ms        TDDP_STORE_CLIENT_TIMEOUT_MS        60 s
 *   secret             TDDP_STORE_SECRET             none
 *
 * Client timeout: the time for the first message of a connection. Later, while a client has to send
 * the rest of a message or to read an answer, it must transfer 1 KiB per second on average in every
 * such period; single bytes do not extend it. Otherwise a client may be idle for ever. Clients of
 * PyTorch 1.13 open a second connection on which they send nothing: silent ones are kept while
 * there are clients that use that protocol.
 *
 * Buffers: when requests that have partly arrived (and the keys that clients wait for) take more
 * than their half, the client that holds most of it is dropped. While unsent answers take more than
 * theirs, further requests wait until clients have read. Pending connections: where there is no
 * place or descriptor for a new one, the oldest of them is dropped.
 *
 * Secret: 1 to 4096 bytes. With one, only clients that know it are served: each side proves that it
 * does, by HMAC-SHA256 over two random numbers, and the secret itself is never sent; what follows
 * is not encrypted. PyTorch's own clients cannot take part then. Instead of the variable,
 * TDDP_STORE_SECRET_FILE may name a file whose first line it is. Clients read the same variables.
 * Without a secret the bytes on the wire are exactly PyTorch's.
 */
typedef struct tddp_store_server_opts {
    size_t size;      /**< sizeof(tddp_store_server_opts) */
    const char *host; /**< what the job calls this host. A loopback address or `localhost`: listens
                           there alone, since then all clients are on this host. Anything else, and
                           NULL: on every address, IPv6 and IPv4, as PyTorch does */
    int port;         /**< 0 to 65535; 0: the system chooses */
    int listen_fd;    /**< a listening socket to take over, or -1; closed also if starting fails,
                           unless with TDDP_INVALID_ARGUMENT */
    size_t max_key_bytes;
    size_t max_value_bytes;
    size_t max_keys;
    size_t max_request_bytes;
    size_t max_total_bytes;
    size_t max_clients;
    int64_t client_timeout_ms;
    const char *secret; /**< "": none, whatever the environment says */
    size_t max_buffered_bytes;
    size_t max_pending;
} tddp_store_server_opts;

/** The defaults: on a port that the system chooses, with the limits above. */
#define TDDP_STORE_SERVER_OPTS_INIT                                                  \
    {                                                                                \
        sizeof(tddp_store_server_opts), NULL, 0, -1, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0 \
    }

/** As TDDP_STORE_SERVER_OPTS_INIT, for languages without C's macros. `size`: of the caller's
 *  struct. */
TDDP_API void tddp_store_server_opts_init(tddp_store_server_opts *opts, size_t size);

/**
 * Binds, listens and serves from one thread of its own until stopped. A client that sends half a
 * message, garbage or nothing delays no other client. Caller: tddp_store_server_stop().
 * Errors: TDDP_INVALID_ARGUMENT (also for a variable whose value is none), TDDP_ADDRESS_IN_USE (the
 * text names the address), TDDP_NETWORK, TDDP_SYSTEM, TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_server_start(const tddp_store_server_opts *opts,
                                                            tddp_store_server **out);

/** The port it listens on. */
TDDP_API int tddp_store_server_port(const tddp_store_server *server);

/** The numeric address at which processes of this host reach it: the one it is bound to, or that of
 *  the loopback where it listens on every one. The server's; lives as long. */
TDDP_API const char *tddp_store_server_address(const tddp_store_server *server);

/** Closes every connection, joins the thread, frees the server. In a forked child it only closes
 *  the child's descriptors. NULL is fine. */
TDDP_API void tddp_store_server_stop(tddp_store_server *server);

/* --- making a store -------------------------------------------------------------------------- */

/** Options of tddp_tcp_store_open(). Begin with TDDP_TCP_STORE_OPTS_INIT. */
typedef struct tddp_tcp_store_opts {
    size_t size;          /**< sizeof(tddp_tcp_store_opts) */
    const char *host;     /**< name or numeric address of the server; required */
    int port;             /**< 1 to 65535, 0 only with is_server: the system chooses */
    int world_size;       /**< clients to wait for; 0: unknown, does not wait */
    int is_server;        /**< this process hosts the server; it stops with the last reference */
    int wait_for_workers; /**< with world_size: count in at `init/`; the server's process returns
                               once all are there */
    int64_t timeout_ms;   /**< of this call, and the store's default; <= 0: 300 s */
    int listen_fd;        /**< for is_server, see tddp_store_server_opts; else -1 */
} tddp_tcp_store_opts;

/** The defaults: a client that waits for workers; host and port have to be set. */
#define TDDP_TCP_STORE_OPTS_INIT                                                         \
    {                                                                                    \
        sizeof(tddp_tcp_store_opts), NULL, 0, 0, 0, 1, TDDP_STORE_DEFAULT_TIMEOUT_MS, -1 \
    }

/** As TDDP_TCP_STORE_OPTS_INIT, for languages without C's macros. `size`: of the caller's struct.
 */
TDDP_API void tddp_tcp_store_opts_init(tddp_tcp_store_opts *opts, size_t size);

/**
 * Connects to a store server (starting it first with is_server), retrying until the time is up.
 * An address that does not answer, and the number of missing workers, are logged every ten seconds.
 * The reference returned is the caller's: tddp_store_release().
 * Errors beside the common ones: TDDP_NETWORK when the server could not be reached in the time (the
 * text has host, port, the last reason), TDDP_TIMEOUT when workers are missing (how many),
 * TDDP_ADDRESS_IN_USE.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_tcp_store_open(const tddp_tcp_store_opts *opts,
                                                        const tddp_wait *wait, tddp_store **out);

/** The host of a TCP store, also of one beneath prefixes; NULL for others. The store's; lives as
 *  long. */
TDDP_API const char *tddp_tcp_store_host(const tddp_store *store);
/** The server's real port; -1 for stores of other kinds. */
TDDP_API int tddp_tcp_store_port(const tddp_store *store);

/**
 * Opens a store kept in a file (made when absent), safe for processes of one machine and on file
 * systems with flock. With world_size > 0 the last of so many to release it removes the file.
 * Use a fresh path for each run. `timeout_ms` <= 0: 300 s, as of the kinds below. Caller:
 * tddp_store_release().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_file_store_open(const char *path, int world_size,
                                                         int64_t timeout_ms, tddp_store **out);

/** Makes a store inside this process, for threads and tests. Caller: tddp_store_release(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_hash_store_create(int64_t timeout_ms, tddp_store **out);

/** A view of `store` in which key k is `prefix/k`. Keeps a reference. Caller: tddp_store_release().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_prefix_store_create(const char *prefix, tddp_store *store,
                                                             tddp_store **out);

/** A store with the same contents and a connection of its own (file and hash stores have none: one
 *  more reference). It keeps a hosted server alive. Caller: tddp_store_release(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_clone(tddp_store *store, const tddp_wait *wait,
                                                     tddp_store **out);

/**
 * For the process that hosts a TCP store's server, before it ends: returns once all `keys` exist,
 * by which the clients announce that they leave, or no other process is connected to the server.
 * For a store that this process does not host (and one in a file or in memory): at once. The store
 * can be used meanwhile. TDDP_TIMEOUT: the text has the number of connections that are left.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_await_clients(tddp_store *store,
                                                             const tddp_slice *keys, size_t count,
                                                             const tddp_wait *wait);

/** One more reference: tddp_store_release(). */
TDDP_API tddp_store *tddp_store_retain(tddp_store *store);

/** One reference less; with the last the store (and a server it hosts) ends. NULL is fine. */
TDDP_API void tddp_store_release(tddp_store *store);

/* --- using it -------------------------------------------------------------------------------- */

/** The default time of its calls, in milliseconds; a view's is that of the store it looks into. Any
 *  thread. */
TDDP_API int64_t tddp_store_timeout(const tddp_store *store);
/** Sets it: more than 0. Any thread. Errors: TDDP_INVALID_ARGUMENT. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_set_timeout(tddp_store *store, int64_t timeout_ms);

/** Stores a value, replacing what was there. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_set(tddp_store *store, tddp_slice key,
                                                   tddp_slice value, const tddp_wait *wait);

/** Waits for a key and fetches its value: tddp_blob_free(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_get(tddp_store *store, tddp_slice key,
                                                   const tddp_wait *wait, tddp_blob *out);

/** Adds to a counter (absent counts as 0) kept as decimal text; `*out` is the new total. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_add(tddp_store *store, tddp_slice key, int64_t delta,
                                                   const tddp_wait *wait, int64_t *out);

/**
 * Stores `desired` if the present value equals `expected`; an absent key equals an empty one.
 * `*out` is PyTorch's answer (tddp_blob_free()): `desired` if stored, else the present value, or
 * `expected` if the key is absent and `expected` is not empty.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_compare_set(tddp_store *store, tddp_slice key,
                                                           tddp_slice expected, tddp_slice desired,
                                                           const tddp_wait *wait, tddp_blob *out);

/** Removes a key; `*deleted` is 1 if it was there. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_delete_key(tddp_store *store, tddp_slice key,
                                                          const tddp_wait *wait, int *deleted);

/** Counts the keys, the store's own (`init/`) among them. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_num_keys(tddp_store *store, const tddp_wait *wait,
                                                        int64_t *out);

/** Returns once all keys exist. A queue that holds something counts as a key. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_wait(tddp_store *store, const tddp_slice *keys,
                                                    size_t count, const tddp_wait *wait);

/** Whether all keys exist, without waiting. A queue that holds something counts as a key. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_check(tddp_store *store, const tddp_slice *keys,
                                                     size_t count, const tddp_wait *wait,
                                                     int *all_exist);

/** Adds bytes to the end of a value, or makes it. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_append(tddp_store *store, tddp_slice key,
                                                      tddp_slice value, const tddp_wait *wait);

/** Waits for all keys and fetches their values into `out[count]`; tddp_blob_free() each. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_multi_get(tddp_store *store, const tddp_slice *keys,
                                                         size_t count, const tddp_wait *wait,
                                                         tddp_blob *out);

/** Stores several values. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_multi_set(tddp_store *store, const tddp_slice *keys,
                                                         const tddp_slice *values, size_t count,
                                                         const tddp_wait *wait);

/** Whether append, multi_get and multi_set are one step here. They are not towards a server of
 *  PyTorch 1.13, where each is made of several. */
TDDP_API int tddp_store_has_extended_api(const tddp_store *store);

/** The keys there are, in no order; a prefix store's are those beneath its prefix, without it. The
 *  store's own keys and queues are not among them. tddp_blob_list_free(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_list_keys(tddp_store *store, const tddp_wait *wait,
                                                         tddp_blob_list *out);

/* --- ephemeral keys and watches -------------------------------------------------------------- */

/*
 * Who is connected, and what has changed: for TCP stores whose server is torch-ddp's, and prefix
 * stores over them. TDDP_UNSUPPORTED: another kind of store, or a server of PyTorch; the store
 * stays usable.
 *
 * Both belong to the store's connection, which tddp_store_clone() does not share. The connection is
 * lost when a call returns TDDP_NETWORK (then open another store), and when the server does not
 * answer a call within its time (TDDP_TIMEOUT, TDDP_CANCELED): the next call makes a new one. The
 * keys of the old one go then, and nothing sets them again but their owner, who does so by
 * tddp_store_set_ephemeral(), before the limit is over in any case; with a time of the calls that
 * is as long as what a silent server is granted, a shorter silence does not cost the connection. A
 * first watch on a new connection answers at once, so that who watches sees whether its own key is
 * still there. Whether a key that is gone for a moment means that its owner is lost, its readers
 * decide.
 */

/**
 * Stores a value that is deleted once this store's connection has ended, for whatever reason, or
 * once the server has received nothing from it for `limit_ms` (0: only when it ends). Each request
 * counts as a sign of life, this one too; a watch that is under way does not. Time in which the
 * server itself was stopped does not count against its clients.
 *
 * Setting it again on the same connection renews its limit, which with the same value is no change
 * to those who watch it. Another connection that sets it takes the key over: the end of the first
 * no longer deletes it. Any other call that stores a value makes it an ordinary key.
 *
 * `if_absent`: only if there is no such key, or it is ephemeral and this connection's already; of
 * several callers one succeeds. `*set` is 1 if the value was stored, else 0 (only with
 * `if_absent`); `now`, which may be NULL, receives the value that the key has then:
 * tddp_blob_free(). It can equal `value` although `*set` is 0: an earlier connection of the caller
 * has it, and the server does not know yet that it is gone.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_set_ephemeral(tddp_store *store, tddp_slice key,
                                                             tddp_slice value, int64_t limit_ms,
                                                             int if_absent, const tddp_wait *wait,
                                                             int *set, tddp_blob *now);

/** Keys and their values: `values.blobs[i]` is that of `keys.blobs[i]`. Owned by the caller, who
 *  frees them with tddp_store_entries_free(). */
typedef struct tddp_store_entries {
    tddp_blob_list keys;
    tddp_blob_list values;
} tddp_store_entries;

/** Frees both lists and clears the fields. Empty ones are fine. */
TDDP_API void tddp_store_entries_free(tddp_store_entries *entries);

/**
 * Returns all keys that begin with `prefix` (empty: all keys) and their values, in no order: at
 * once with the first call on a connection and with a call of another prefix, afterwards once one
 * of them has changed since the last result: was made, got another value, was deleted. Several
 * changes may be one result; it is never older than what this caller has stored. A prefix store's
 * keys are those beneath its prefix, without it.
 *
 * A connection watches one prefix; that it does so costs the server a comparison for each change
 * of any key. TDDP_TIMEOUT and TDDP_CANCELED leave the store as usable as before, and no change is
 * lost: the next call continues. Other calls may come in between, from other threads only after
 * this one has returned.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_watch(tddp_store *store, tddp_slice prefix,
                                                     const tddp_wait *wait,
                                                     tddp_store_entries *out);

/* --- queues and barriers --------------------------------------------------------------------- */

/*
 * The first value creates a queue, and removing the last one deletes it. Queues and keys have
 * separate namespaces, but a wait for a name that both have ends for either.
 *
 * TDDP_UNSUPPORTED: the server is PyTorch's and has no such thing, or the store is one in a file,
 * which has no queues. The store stays usable.
 */

/** Adds a value at the end of a queue. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_queue_push(tddp_store *store, tddp_slice key,
                                                          tddp_slice value, const tddp_wait *wait);

/** Takes the value at the start of a queue: tddp_blob_free(). While the queue is empty it waits
 * with `block`, and else returns TDDP_NOT_FOUND. Each value is returned to one caller; none is
 * removed unless the result is TDDP_OK. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_queue_pop(tddp_store *store, tddp_slice key,
                                                         int block, const tddp_wait *wait,
                                                         tddp_blob *out);

/** How many values a queue holds; 0 if there is none. */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_queue_len(tddp_store *store, tddp_slice key,
                                                         const tddp_wait *wait, int64_t *out);

/**
 * Returns once `world_size` callers have arrived. The key holds their count, so each barrier needs
 * its own key, and a caller that timed out still counts. TDDP_TIMEOUT: the text has the number of
 * callers that arrived.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_store_barrier(tddp_store *store, tddp_slice key,
                                                       int world_size, const tddp_wait *wait);

#ifdef __cplusplus
}
#endif

#endif
