/**
 * @file transport.h
 * @brief What moves messages between two ranks of a group, and the operations of groups over it.
 *
 * A transport is a table of functions over a library for networks (Gloo, UCX). It knows messages
 * and peers, and nothing of collectives: tddp_coll implements all operations over any transport, so
 * that a backend for a network is a transport, a tddp_coll over it, and a tddp_backend_v1 whose
 * slots call the tddp_coll.
 */
#ifndef TDDP_TRANSPORT_H
#define TDDP_TRANSPORT_H

#include <tddp/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- transports ------------------------------------------------------------------------------ */

/** The first of the tags that tddp_coll does not use. */
#define TDDP_TRANSPORT_TAGS UINT64_C(0xffffffff00000000)

/**
 * The functions of a transport. `context` is its own, one for a rank of a group. No function blocks
 * or runs code of a host language. Any thread may call any of them at any time, several at once,
 * but for one transfer one at a time.
 *
 * Messages between two ranks with one tag match in the order in which their sends and receives were
 * posted. A message matches whether its receive was posted before or after its send. Tags from
 * TDDP_TRANSPORT_TAGS on are the transport's own.
 */
typedef struct tddp_transport_ops {
    size_t size; /**< sizeof(tddp_transport_ops) the transport was built with */

    /** Starts to send a message to another rank. The memory is the transport's, unchanged, until
     * test() says that the transfer is complete, or release() has returned. (A receive into it may
     * be posted before, if its sender needs this message first.) Zero bytes are a message too.
     * `*transfer` is the caller's, until release(). Errors: TDDP_PEER_LOST, TDDP_GROUP_FAILED
     * (aborted), TDDP_OUT_OF_MEMORY, TDDP_NETWORK. */
    tddp_status (*send)(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                        void **transfer);

    /** Starts to receive a message of at most so many bytes from another rank; TDDP_ANY_SOURCE:
     * from the first rank that sends one with this tag. Otherwise like send(). */
    tddp_status (*recv)(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                        void **transfer);

    /** Whether a transfer has ended: sets `*complete` to 0 or 1. Returns the status that it has
     * ended with, and sets the text unless that is TDDP_OK; TDDP_OK if it has not. Where a receive
     * has succeeded, sets `*source` to the sender's rank, unless `source` is NULL. May be called
     * again after that. Errors: TDDP_PEER_LOST: the peer went before the transfer was complete;
     * TDDP_GROUP_FAILED: aborted. */
    tddp_status (*test)(void *context, void *transfer, int *complete, int *source);

    /** Frees a transfer. One that is not complete is canceled first; its memory is not used any
     * more once this returns, and the context may be of no further use. */
    void (*release)(void *context, void *transfer);

    /** What counts an event whenever a transfer may have ended, a peer has gone, or the context was
     * aborted; see tddp_backend_v1.events. Never NULL, the same each time. */
    struct tddp_eventcount *(*events)(void *context);

    /** TDDP_OK while it may succeed to wait for this peer, or for any with TDDP_ANY_SOURCE.
     * `sequence` is the number of the collective that waits, which fails also if another rank has
     * left the group before it; 0: a message. Errors, with a text that names the ranks and what is
     * known of the cause: TDDP_PEER_LOST, TDDP_GROUP_FAILED (aborted). A peer has gone only once
     * all that it sent before has arrived, so that the caller, who tests its transfer once more,
     * finds it complete if it ever will be. */
    tddp_status (*check_peer)(void *context, int peer, uint64_t sequence);

    /** Called once an operation has failed, with its status and text, before its transfers are
     * released: what is sent to the peers to tell them why has to be on its way then. NULL: nothing
     * is. */
    void (*report_failure)(void *context, tddp_status status, const char *text);

    /** Moves messages on the caller's thread; called before transfers are tested. NULL: that is
     * never needed, as the transport has a thread. */
    void (*progress)(void *context);

    /** Called after the transfers were tested, before a thread sleeps on events(), or returns to a
     * caller that may: from then on, until progress() is called, the transport's own thread moves
     * messages and counts events. NULL: it always does. */
    void (*arm)(void *context);
} tddp_transport_ops;

/* --- events, for transports in modules ------------------------------------------------------- */

/** What threads sleep on until something may have changed. Caller frees it. Errors:
 * TDDP_OUT_OF_MEMORY. */
TDDP_API TDDP_NODISCARD tddp_status tddp_eventcount_create(struct tddp_eventcount **out);

/** Counts an event, after the change. Any thread; a system call only if a thread sleeps. */
TDDP_API void tddp_eventcount_notify(struct tddp_eventcount *events);

/** Frees it; no thread uses it. NULL is fine. */
TDDP_API void tddp_eventcount_free(struct tddp_eventcount *events);

/* --- operations over a transport ------------------------------------------------------------- */

/** The operations of one rank of a group over a transport. */
typedef struct tddp_coll tddp_coll;

/** What tddp_coll_create() gets. */
typedef struct tddp_coll_opts {
    size_t size;                         /**< sizeof(tddp_coll_opts) of the caller */
    const tddp_transport_ops *transport; /**< borrowed, like its context, until the end */
    void *context;
    int rank;
    int world_size;
    const int *names; /**< the ranks' names in messages, copied; NULL: their numbers */
    /** Receives which ranks have entered an operation that timed out, until the end. */
    tddp_observer observer;
} tddp_coll_opts;

/** Makes what operations need of memory, and posts a receive from each peer, which are connected.
 * The caller frees it. Errors: TDDP_INVALID_ARGUMENT (a transport without a function),
 * TDDP_OUT_OF_MEMORY, those of recv(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_coll_create(const tddp_coll_opts *opts, tddp_coll **out);

/** Cancels the transfers that are left and frees them, before their transport ends. No operation is
 * running. NULL is fine. */
TDDP_API void tddp_coll_destroy(tddp_coll *coll);

/**
 * Runs a collective, as tddp_backend_run describes, on any thread, one at a time. Once the
 * operation's token is triggered it returns TDDP_CANCELED, at whatever point it waits, and is then
 * called again with the same operation, on any thread; an event tells when that may get on. After
 * another error the group is out of step, except for TDDP_INVALID_ARGUMENT and TDDP_UNSUPPORTED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_coll_run(tddp_coll *coll, const tddp_op *op);

/** Starts a send or a receive, as tddp_backend_v1.post, for all of which there are events. */
TDDP_API TDDP_NODISCARD tddp_status tddp_coll_post(tddp_coll *coll, const tddp_op *op,
                                                   void **request);

/** Ends one, as tddp_backend_v1.finish. Once the operation's token is triggered it returns
 * TDDP_CANCELED, and is then called again. */
TDDP_API TDDP_NODISCARD tddp_status tddp_coll_finish(tddp_coll *coll, void *request, int *source);

/** Waits for a receive's message, as tddp_backend_v1.probe; interrupted like finish(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_coll_probe(tddp_coll *coll, void *request, int *source);

/** Frees a request that is not finished, as tddp_backend_v1.discard, also after
 * tddp_coll_destroy().
 */
TDDP_API void tddp_coll_drop(void *request);

#ifdef __cplusplus
}
#endif

#endif
