/*
 * What the implementations of stores share: the table of operations that each fills, and small
 * helpers. store.c has checked every argument before an operation is called: slices are valid, keys
 * are not empty, out pointers are not NULL. Keys are as they are kept: users' begin with a slash,
 * which the stores' own do not.
 *
 *   store.c   the public functions of every store
 *   tcp/      a client of a server   local/    stores in a file and in this process's memory
 *   prefix.c  views of another store
 *   server/   the server of TCP stores
 *   values.c  the operations on a map of values (map.c); queue.c on queues
 *   wire.c    the wire protocol, auth.c the shared secret, for client and server
 *   key_text.c   keys in error texts, waiter.c   threads that wait for each other
 */
#ifndef TDDP_STORE_IMPL_H
#define TDDP_STORE_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <tddp/store.h>

#include "base/base.h"

/* How long one call may take. */
typedef struct tddp_store_call {
    int64_t deadline_ns;
    int64_t timeout_ms; /* what the deadline was made from, for texts */
    tddp_cancel *cancel;
} tddp_store_call;

/* get fills zeroed blobs, list_keys and watch an empty list; on failure store.c frees what is in
 * them. A queue_pop that finds nothing returns TDDP_NOT_FOUND without a text. */
typedef struct tddp_store_ops {
    tddp_status (*set)(tddp_store *, const tddp_slice *keys, const tddp_slice *values, size_t count,
                       const tddp_store_call *);
    tddp_status (*get)(tddp_store *, const tddp_slice *keys, size_t count, const tddp_store_call *,
                       tddp_blob *out);
    tddp_status (*add)(tddp_store *, tddp_slice key, int64_t delta, const tddp_store_call *,
                       int64_t *out);
    tddp_status (*compare_set)(tddp_store *, tddp_slice key, tddp_slice expected,
                               tddp_slice desired, const tddp_store_call *, tddp_blob *out);
    tddp_status (*delete_key)(tddp_store *, tddp_slice key, const tddp_store_call *, int *deleted);
    tddp_status (*num_keys)(tddp_store *, const tddp_store_call *, int64_t *out);
    tddp_status (*wait)(tddp_store *, const tddp_slice *keys, size_t count,
                        const tddp_store_call *);
    tddp_status (*check)(tddp_store *, const tddp_slice *keys, size_t count,
                         const tddp_store_call *, int *all_exist);
    tddp_status (*append)(tddp_store *, tddp_slice key, tddp_slice value, const tddp_store_call *);
    tddp_status (*list_keys)(tddp_store *, const tddp_store_call *, tddp_blob_list *out);
    tddp_status (*barrier)(tddp_store *, tddp_slice key, int world_size, const tddp_store_call *);
    void (*destroy)(tddp_store *);
    /* What follows is NULL where a kind has no such thing. */
    tddp_status (*queue_push)(tddp_store *, tddp_slice key, tddp_slice value,
                              const tddp_store_call *);
    tddp_status (*queue_pop)(tddp_store *, tddp_slice key, bool block, const tddp_store_call *,
                             tddp_blob *out);
    tddp_status (*queue_len)(tddp_store *, tddp_slice key, const tddp_store_call *, int64_t *out);
    tddp_status (*set_ephemeral)(tddp_store *, tddp_slice key, tddp_slice value, int64_t limit_ms,
                                 bool if_absent, const tddp_store_call *, int *set, tddp_blob *now);
    tddp_status (*watch)(tddp_store *, tddp_slice prefix, const tddp_store_call *,
                         tddp_store_entries *out);
    bool (*extended)(const tddp_store *); /* NULL: it is */
    /* NULL: there is no server that this process could host. */
    tddp_status (*await_clients)(tddp_store *, const tddp_slice *keys, size_t count,
                                 const tddp_store_call *);
    /* NULL: there are no connections, and one more reference is as good. */
    tddp_status (*clone)(tddp_store *, const tddp_store_call *, tddp_store **out);
} tddp_store_ops;

/* The first member of every kind. */
struct tddp_store {
    const tddp_store_ops *ops; /* of a view: those of the store it looks into */
    atomic_int references;
    _Atomic int64_t timeout_ms;
    const char *name;  /* the kind, for texts */
    tddp_slice prefix; /* in front of every key of a user's, "/" first */
    tddp_store *under; /* of a view: the store it looks into, which is none, and whose timeout is
                          its own */
};

/* Fills the base with one reference; timeout_ms <= 0 means the default. */
void tddp_store_init(tddp_store *store, const tddp_store_ops *ops, const char *name,
                     int64_t timeout_ms);

tddp_store_call tddp_store_call_begin(const tddp_wait *wait, int64_t default_ms);

static inline int tddp_store_call_cancel_fd(const tddp_store_call *call)
{
    return tddp_cancel_fd(call->cancel);
}

/* Copies bytes into a fresh blob. */
TDDP_NODISCARD tddp_status tddp_blob_copy(tddp_slice bytes, tddp_blob *out);

/* Makes room for one more, which is zeroed and not yet counted. */
TDDP_NODISCARD tddp_status tddp_blob_list_grow(tddp_blob_list *list);

/* Adds a copy. */
TDDP_NODISCARD tddp_status tddp_blob_list_add(tddp_blob_list *list, tddp_slice bytes);

/* --- prefix.c -------------------------------------------------------------------------------- */

/* The store itself, or that which a view looks into. */
static inline tddp_store *tddp_store_base(const tddp_store *store)
{
    return store->under ? store->under : (tddp_store *)(uintptr_t)store;
}

/* A view of `base` with the whole prefix. Takes over a reference, on success only. */
TDDP_NODISCARD tddp_status tddp_store_view(tddp_slice prefix, tddp_store *base, tddp_store **out);

/* Users' keys as they are kept: the slices and, behind them, their bytes in one block that the
 * caller frees with free(). */
TDDP_NODISCARD tddp_status tddp_store_kept_keys(const tddp_store *store, const tddp_slice *keys,
                                                size_t count, tddp_slice **out);

/* Takes the prefix off a key; false if it is none of the store's. */
bool tddp_store_strip(const tddp_store *store, tddp_blob *key);

/* --- waiter.c -------------------------------------------------------------------------------- */

/* A thread that waits for another to wake it; on its stack. */
typedef struct tddp_waiter {
    struct tddp_waiter *next;
    tddp_cancel *event; /* a cancel token, used as an event that can be polled */
} tddp_waiter;

/* With the mutex, which is released meanwhile: waits at the end of the list, which the mutex
 * guards, until it is woken or the call's time is up. The thread that wakes it may have removed it.
 */
TDDP_NODISCARD tddp_status tddp_waiter_wait(tddp_waiter *self, tddp_waiter **list,
                                            pthread_mutex_t *mutex, const tddp_store_call *call);

/* With the mutex. */
void tddp_waiter_wake(const tddp_waiter *waiter);

/* --- key_text.c ------------------------------------------------------------------------------ */

/* Writes the keys for a person: without a first slash, at most ten, long and binary ones shortened;
 * returns `text`. */
enum { TDDP_STORE_KEYS_TEXT_BYTES = 1024 };
const char *tddp_store_keys_text(const tddp_slice *keys, size_t count,
                                 char text[TDDP_STORE_KEYS_TEXT_BYTES]);

/* The text of a wait that ended without its keys, TDDP_TIMEOUT or TDDP_CANCELED. */
tddp_status tddp_store_fail_wait(tddp_status status, const tddp_slice *keys, size_t count,
                                 const tddp_store_call *call, const char *store_name);

/* The same of a barrier; `arrived` is negative if that is not known. */
tddp_status tddp_store_fail_barrier(tddp_status status, tddp_slice key, int64_t arrived,
                                    int world_size, const tddp_store_call *call,
                                    const char *store_name);

#endif
