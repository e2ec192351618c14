/**
 * @file transport.h
 * @brief What moves messages between two ranks of a group, and how that becomes a backend.
 *
 * A transport is a table of functions over a library for networks (Gloo, UCX, MPI). It knows
 * messages and connections, and nothing of collectives, of causes of failures, or of how ranks
 * meet: libtddp has all that once, over any transport. A module is a transport: its
 * tddp_backend_query() returns tddp_transport_backend() of its table.
 */
#ifndef TDDP_TRANSPORT_H
#define TDDP_TRANSPORT_H

#include <tddp/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Tags have at most so many bits, of which the highest are the kind. A transport whose own tags
 * have fewer must distinguish kinds; of TDDP_TRANSPORT_PROGRAM_TAG all that differ in the lower 32
 * bits; of the other kinds those that differ in the lowest three. Those that differ elsewhere are
 * posted in the same order at both ends (a collective's payloads, while the ranks' calls agree), or
 * are numbers of large messages to a peer, of which far fewer than 2^13 are under way at a time.
 */
enum { TDDP_TRANSPORT_TAG_BITS = 47, TDDP_TRANSPORT_KIND_BITS = 2, TDDP_TRANSPORT_PROGRAM_TAG = 1 };

/**
 * The functions of a transport. `context` is its own, one for a rank of a group. Any thread may
 * call send() and all that follows it here, at any time, several at once, but for one transfer one
 * at a time; they don't block, but for close(). Nothing runs code of a host language.
 *
 * Messages between two ranks with one tag match in the order in which their sends and receives were
 * posted. A message matches whether its receive was posted before or after its send, and arrives
 * after those that the same rank sent before, if their receives are posted.
 */
typedef struct tddp_transport_ops {
    size_t size;      /**< sizeof(tddp_transport_ops) the transport was built with */
    const char *name; /**< of its module, and of the backend over it */
    uint32_t traits;  /**< tddp_backend_v1.traits beyond TDDP_BACKEND_RESUMES */

    /** Makes what other ranks connect to, on the thread that creates the group, as connect() and
     * destroy(). `opts->events` counts an event whenever a transfer may have ended. Sets
     * `*context`, also after some errors, for destroy(), and `*address`, which stays the
     * transport's: what the others need to reach this rank. */
    tddp_status (*open)(const tddp_backend_opts *opts, void **context, tddp_slice *address);

    /** Connects to all other ranks, whose addresses these are, by rank; blocks until `wait` is over
     * at most. Messages may be sent then, although others may still be connecting. An error sets
     * `*peer` if it is about that one. */
    tddp_status (*connect)(void *context, const tddp_slice *addresses, const tddp_wait *wait,
                           int *peer);

    /** Starts to send a message to another rank. The memory is the transport's, unchanged, until
     * test() says that the transfer is complete, or release() has returned. (A receive into it may
     * be posted before, if its sender needs this message first.) Zero bytes are a message too.
     * `*transfer` is the caller's, until release(). Errors: TDDP_PEER_LOST, TDDP_GROUP_FAILED
     * (closed), TDDP_OUT_OF_MEMORY, TDDP_NETWORK. */
    tddp_status (*send)(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                        void **transfer);

    /** Starts to receive a message of at most so many bytes from another rank; TDDP_ANY_SOURCE:
     * from the first rank that sends one with this tag. Otherwise like send(). */
    tddp_status (*recv)(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                        void **transfer);

    /** Whether a transfer has ended: sets `*complete` to 0 or 1. Returns the status that it has
     * ended with, and sets the text unless that is TDDP_OK; TDDP_OK if it has not. Where a receive
     * has succeeded, sets `*source` to the sender's rank, unless `source` is NULL. May be called
     * again after that. Errors: TDDP_PEER_LOST: the connection to the peer ended before the
     * transfer was complete, and the text says how; of a receive from any source: those to all
     * have. TDDP_GROUP_FAILED: closed by this rank. */
    tddp_status (*test)(void *context, void *transfer, int *complete, int *source);

    /** Frees a transfer. One that is not complete is canceled first; its memory is not used any
     * more once this returns, and the context may be of no further use. */
    void (*release)(void *context, void *transfer);

    /** Moves messages on the caller's thread; called before transfers are tested. NULL: that is
     * never needed, as the transport has a thread. */
    void (*progress)(void *context);

    /** Called after the transfers were tested, before a thread sleeps on the events, or returns to
     * a caller that may: from then on, until progress() is called, the transport's own thread moves
     * messages and counts events. NULL: it always does. */
    void (*arm)(void *context);

    /** Ends all connections, and with them all transfers, current and later ones, once what was
     * sent has arrived, or after so many milliseconds. May be called again. */
    void (*close)(void *context, int64_t ms);

    /** Frees the context, after close(); all transfers are released. */
    void (*destroy)(void *context);

    /** This rank has failed, and tells the others why by a last message, which they may not receive
     * any more. NULL: that is nothing to the transport, and a rank that leaves sends a last message
     * too; where it is set, none does, so that at a good end no message is under way. */
    void (*failed)(void *context);
} tddp_transport_ops;

/** The backend over a transport, for tddp_backend_query(); made anew by each call, and never freed,
 * as modules are never unloaded. NULL, with a text: a function is missing, or memory. */
TDDP_API const tddp_backend_v1 *tddp_transport_backend(const tddp_transport_ops *ops);

/** Counts an event, after the change. Any thread; a system call only if a thread sleeps. */
TDDP_API void tddp_eventcount_notify(struct tddp_eventcount *events);

/* --- for transports over sockets ------------------------------------------------------------- */

/** Seconds without an answer after which a machine counts as dead: TDDP_PEER_TIMEOUT, default 15;
 * 0: only the system's own limits, which may be hours. Errors: TDDP_INVALID_ARGUMENT. */
TDDP_API TDDP_NODISCARD tddp_status tddp_transport_peer_timeout(int *seconds);

/** Closes a connection's socket in programs that this process executes, which would hide this
 * process's death from its peers; ends it after so many seconds without an answer, unless 0. */
TDDP_API void tddp_transport_set_up_socket(int fd, int seconds);

/** TDDP_SYSTEM if this process must not open as many files as connections to all other ranks need,
 * and `others`: they would fail one by one, and later whatever else this process opens. */
TDDP_API TDDP_NODISCARD tddp_status tddp_transport_check_descriptors(int world_size, int others);

#ifdef __cplusplus
}
#endif

#endif
