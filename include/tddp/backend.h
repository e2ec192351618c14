/**
 * @file backend.h
 * @brief The table of functions that implements process groups' operations: a backend (ABI 2).
 *
 * A backend has a name ("gloo", "nccl", "fake", your own). libtddp looks for it among the
 * registered ones, then for a module `tddp_backend_<name>.so` in TDDP_BACKEND_PATH, beside libtddp
 * and on the system's library path. A module is never unloaded. It exports
 *
 *     const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);
 *
 * which returns NULL if it does not know that ABI, or if something that it needs is missing: it
 * then reports what with tddp_fail(), and the next request calls it again. A module links libtddp
 * for the store and tddp_fail().
 *
 * An operation on the host is tried again and again, each time until its token is triggered, by
 * whichever thread waits for it, or by one that tries those of many groups. A backend that can't be
 * interrupted leaves out events(): then each of its calls has a thread, and may block.
 *
 * Threads: create() and destroy() run on the thread that creates or destroys the group. Collectives
 * of a group run one at a time, in the same order on every rank; sends and receives are posted and
 * finished beside them; each on any thread. Operations on a device (`launches`) are posted and
 * launched on the thread that calls them, and tested and finished on libtddp's watchdog thread.
 * abort() may be called on any thread at any time. No slot may throw, or run code of a host
 * language.
 */
#ifndef TDDP_BACKEND_H
#define TDDP_BACKEND_H

#include <tddp/buffer.h>
#include <tddp/observation.h>
#include <tddp/op.h>
#include <tddp/store.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of this table. */
#define TDDP_BACKEND_ABI 2u

/** Whether it is between two ranks instead of all: posted, not run. */
static inline int tddp_op_is_p2p(tddp_op_kind kind)
{
    return kind == TDDP_OP_SEND || kind == TDDP_OP_RECV;
}

/**
 * One operation, checked by the group: dtypes agree, sizes fit, root, peer and op are in range.
 *
 * Operations with a part for each rank have them in `input_parts` (reduce_scatter, scatter at the
 * root, all_to_all) and `output_parts` (all_gather, gather at the root, all_to_all): world_size
 * buffers, by rank, valid as long as the operation; NULL for all other operations and ranks. If the
 * parts are contiguous, `input` or `output` is all of them as one buffer; otherwise its data is
 * NULL and its count the sum. Parts of all_gather, gather, scatter and all_to_all may differ in
 * size; the backend checks that both ends agree.
 */
typedef struct tddp_op {
    tddp_op_kind kind;
    /** Counts the group's collectives from 1; equal on every rank. Point to point: counts this
     * rank's sends and receives, separately. */
    uint64_t sequence;
    /** What this rank sends. all_reduce, reduce, broadcast: the same memory as output. gather:
     * this rank's part; scatter: at the root as described above, elsewhere empty; send: the
     * message. */
    tddp_buffer input;
    /** What this rank receives. gather: at the root as described above, elsewhere empty; reduce:
     * unchanged at ranks other than the root; recv: the message. */
    tddp_buffer output;
    const tddp_buffer *input_parts;
    const tddp_buffer *output_parts;
    tddp_reduce_op reduce; /**< all_reduce, reduce, reduce_scatter */
    double premul; /**< this rank's factor of TDDP_REDUCE_PREMUL_SUM; may differ between ranks */
    int root;      /**< broadcast, reduce, gather, scatter: a rank of this group */
    int peer;      /**< send: the destination; recv: the source, or TDDP_ANY_SOURCE */
    uint32_t tag;  /**< send, recv: messages match only with the same tag */
    /** A hash of anything else that must be equal on every rank (shapes, names); 0: none. */
    uint32_t fingerprint;
    int64_t timeout_ms; /**< > 0; the slot then returns TDDP_TIMEOUT */
    /** With events(), and for launch(): once the token is triggered, the slot returns TDDP_CANCELED
     * with the operation unfinished, and is called again with the same operation, perhaps on
     * another thread. NULL: never triggered. */
    tddp_cancel *cancel;
    /** 1: the slot runs on the thread that waits for the result and has nothing else to do: it
     * may spin. 0: it runs beside threads that compute. */
    int awaited;
    /** all_reduce of several buffers as one operation: their number; `output_parts` has them,
     * each in place. 0: a single buffer, as always for memory on which the backend works on the
     * host without copying it. */
    size_t bundled;
    /** finish() writes here how long the operation took on its device, in nanoseconds; NULL: not
     * measured. */
    int64_t *device_ns;
    /** The operation that this one implements a part of: ranks compare, and errors report, that
     * one. NULL: none. */
    const struct tddp_op *part_of;
    /** What prepare() has returned for this operation; NULL: nothing. */
    void *prepared;
    /** send, recv on a device: 1: it belongs to a batch of messages, which one launch() launches;
     * a batch may have one message, and may be answered by a batch of another size. */
    int batched;
} tddp_op;

/** What `rank` sends to `peer` in a collective with parts or a broadcast; `peer` may be itself.
 * `count` is 0 and `data` NULL where that is nothing, and for operations of other kinds. */
TDDP_API tddp_buffer tddp_op_sends(const tddp_op *op, int rank, int peer);

/** What `rank` receives from `peer`, likewise. */
TDDP_API tddp_buffer tddp_op_receives(const tddp_op *op, int rank, int peer);

/** Whether all parts that this rank knows of have the same number of elements, which is set: so has
 * its only buffer, where there are no parts. */
TDDP_API int tddp_op_is_uniform(const tddp_op *op, int size, size_t *count);

/** What create() gets. */
typedef struct tddp_backend_opts {
    size_t size; /**< sizeof(tddp_backend_opts) of the core */
    int rank;
    int world_size;
    tddp_store *store; /**< this group's own prefix; retain it to keep it after create() */
    int64_t timeout_ms;
    int device_index; /**< this rank's GPU for operations without memory; -1: the first */
    int device_bound; /**< 1: the group uses only that GPU, and its ranks may connect at once */
    /** Of a backend with decline(): its context of the group that this group is a subset of, if all
     * ranks of that one take part: by create(), or by decline() if they are not members. No
     * operation of it is running. NULL: there is none, or they don't take part. Valid during
     * create(). */
    void *parent;
    int same_host;     /**< 1 if every rank of the group runs on this host */
    const char *group; /**< the group's name, for messages; valid during create() */
    /** The numeric address at which other ranks reach this host: loopback with same_host,
     * otherwise the local address of the route to the store's server; NULL: unknown. Valid
     * during create(). */
    const char *address;
    /** The host of each rank, numbered from 0 in order of first appearance; NULL: unknown. Valid
     * during create(). */
    const int *hosts;
    /** The ranks' names in messages; NULL: their numbers. Valid during create(). */
    const int *names;
    /** To be called now and then while create() waits for other ranks: an error says that some will
     * not come; NULL: nothing is known of them. */
    tddp_status (*check)(void *data);
    void *check_data;
    /** The core's own: the shared memory that this group may have in common with others. */
    struct tddp_shm_fabric *fabric;
    /** The core's own: how all ranks of the group can be made to connect later; NULL: they can't.
     */
    struct tddp_on_demand *on_demand;
    /** The table whose create() is called: one function may serve several. */
    const struct tddp_backend_v1 *backend;
    /** Receives what the backend sees of other ranks for which operations wait in vain, until
     * destroy() returns. */
    tddp_observer observer;
    /** What events() is to return, unless the events are those of resources that it shares; valid
     * until destroy() has returned. NULL: one of its own. */
    struct tddp_eventcount *events;
} tddp_backend_opts;

/** What a backend supports: tddp_backend_v1.traits. */
enum {
    /** Shared memory may replace it between ranks of one host. */
    TDDP_BACKEND_SHARES_HOSTS = 1,
};

/** Runs one operation and returns when its result is in place. The text of TDDP_TIMEOUT and
 * TDDP_PEER_LOST names the rank that it waited for; the observer receives what is known of others.
 */
typedef tddp_status (*tddp_backend_run)(void *context, const tddp_op *op);

/** A backend: its name, what it supports, its functions. */
typedef struct tddp_backend_v1 {
    uint32_t abi;  /**< TDDP_BACKEND_ABI the module was built with */
    uint32_t size; /**< sizeof(tddp_backend_v1) the module was built with */
    const char *name;
    /** Bit (1 << tddp_device_type) for each kind of memory that it supports; libtddp copies memory
     * of the other kind, by the CUDA runtime. */
    uint32_t device_types;

    /** Connects this rank to its peers; blocks for at most opts->timeout_ms, or until canceled. */
    tddp_status (*create)(const tddp_backend_opts *opts, const tddp_wait *wait, void **context);

    /** Makes running and later operations fail soon, with TDDP_GROUP_FAILED or another error. Any
     * thread. */
    void (*abort)(void *context);

    /** Frees everything; no operation is running. With or without abort() before. */
    void (*destroy)(void *context);

    /**
     * Point to point; both NULL: not supported. post() starts a send or receive and returns at
     * once. Posts come one at a time, also beside a running operation, and messages to or from a
     * peer match in their order. `*op` and its memory stay valid until finish(), which is called
     * once for each request, on any thread, several at a time. It waits, frees the request, and
     * sets `*source` to the sender's rank after a successful receive. No finish() may depend on
     * another: a peer may need the one before it can do its part of the other. With events() it is
     * interrupted and called again like run(): see tddp_op.cancel.
     */
    tddp_status (*post)(void *context, const tddp_op *op, void **request);
    tddp_status (*finish)(void *context, void *request, int *source);

    uint32_t traits; /**< TDDP_BACKEND_SHARES_HOSTS or none */

    /** Memory that operations can use in place; both NULL: there is none. Any thread. `*handle`
     * is deallocated once, on any thread, maybe after destroy() or in a forked child. The memory
     * is zero-filled and aligned to 64 bytes. */
    tddp_status (*allocate)(void *context, size_t bytes, void **handle, void **data);
    void (*deallocate)(void *handle);

    /** Of a backend that connects hosts: tells the other ranks of that communicator, once, why this
     * rank takes no further part, if the failure was outside this backend; NULL: they notice when
     * it is gone. Any thread. */
    void (*report_failure)(void *context, tddp_status status, const char *text);

    /**
     * Operations on a device: bit (1 << kind) for each kind that is launched on a device's queue if
     * its memory is (or is copied to) a device's; a barrier, which has no memory, if its bit is
     * set. 0: none, and the three functions are NULL. Such an operation is posted, launched, tested
     * until it is complete, and finished:
     *
     * post() records the work that precedes the operation on the memory's stream; it has no number
     * yet. launch() puts it on its queue, on the thread that calls the operation: one collective of
     * a context at a time, in the order of their numbers, and messages beside them; or several
     * messages as one. The order of launches on a device is thus that of the program's calls, in
     * all groups; but an interrupted launch, which another thread continues, holds up only those
     * of its own group. It may block while ranks connect, until the operation's deadline, its token
     * (`cancel` of the first one) or abort(). order() makes later work on `stream` wait for the
     * operation; any thread, between launch() and finish(). test() tells at once whether the device
     * has completed a launched operation (`*complete`), or fails if it can't any more; one thread
     * at a time for a request. finish() does not wait; it is called once for each request, also if
     * launch() failed or was not called.
     */
    uint32_t launches;
    tddp_status (*launch)(void *context, void *const *requests, size_t count);
    tddp_status (*order)(void *context, void *request, void *stream);
    tddp_status (*test)(void *context, void *request, int *complete);

    /** This rank is not a member of the group that other ranks of this context are creating, as
     * tddp_backend_opts.parent describes; NULL: they don't need it. Blocks for at most the time
     * of `wait`. */
    tddp_status (*decline)(void *context, const tddp_wait *wait);

    /** Point to point: does what may block, until the deadline, before post(); NULL: nothing does.
     * Any thread, several at a time; `op` has no sequence number yet. After success post() is
     * called with `*prepared` in the operation, and takes ownership of it, also if it fails. */
    tddp_status (*prepare)(void *context, const tddp_op *op, void **prepared);

    /** What counts an event whenever an operation on the host may get on that has returned
     * TDDP_CANCELED; the same for all contexts that share their resources. One thread then tries
     * those of many contexts in turn. Only of libtddp's own backends; NULL: operations can't be
     * interrupted, so run() and finish() are called on a thread that is lent to the call
     * (src/backend/adapter.c); such a backend has no `launches`. */
    struct tddp_eventcount *(*events)(void *context);

    /** TDDP_OK while waiting for this rank may succeed, as far as it can tell at once: it has not
     * gone, left or failed; `rank` < 0: none of the others has. Else TDDP_PEER_LOST, with the rank
     * in the text. Any thread; NULL: it can't tell. */
    tddp_status (*check_peer)(void *context, int rank);

    /** For receives whose memory is chosen once their message is known; both NULL: there are none.
     * probe() waits until the message of a posted receive has arrived, and sets its source; then
     * the operation's `output`, `timeout_ms` and `cancel` may be set, and finish() called. If the
     * operation's token is triggered before, TDDP_CANCELED. discard() frees a request that finish()
     * is not called for; no operation is running, and the context may be destroyed. */
    tddp_status (*probe)(void *context, void *request, int *source);
    void (*discard)(void *request);

    /** Slots by kind; NULL: not supported, or only on a device, by launch(). `op_count`: how many
     * kinds the module knows. */
    uint32_t op_count;
    tddp_backend_run run[TDDP_OP_COUNT];
} tddp_backend_v1;

/** What a module exports as `tddp_backend_query`. */
typedef const tddp_backend_v1 *(*tddp_backend_query_fn)(uint32_t core_abi);

/** Registers a backend under its name, instead of a module. The table is kept, not copied.
 * Errors: TDDP_INVALID_ARGUMENT (wrong ABI, name taken, no name). */
TDDP_API TDDP_NODISCARD tddp_status tddp_backend_register(const tddp_backend_v1 *backend);

/** Finds a backend by name, loading its module if needed. Errors: TDDP_UNAVAILABLE: the text says
 * what was looked for, where, and how to get it; TDDP_INVALID_ARGUMENT: not a valid name. */
TDDP_API TDDP_NODISCARD tddp_status tddp_backend_find(const char *name,
                                                      const tddp_backend_v1 **out);

/** How many kinds of memory there are. */
enum { TDDP_DEVICE_TYPES = TDDP_CUDA + 1 };

/**
 * Finds the backends of a group, by the kind of memory that they are for: the one of that name, or
 * those of a name such as "cpu:gloo,cuda:nccl". An operation uses the one for its memory, a barrier
 * the CPU's. NULL: none is for this kind; its memory is copied for the other one. Errors:
 * TDDP_INVALID_ARGUMENT: an unknown device, one named twice, a backend that doesn't support the
 * memory; those of tddp_backend_find().
 */
TDDP_API TDDP_NODISCARD tddp_status
tddp_backends_find(const char *name, const tddp_backend_v1 *out[TDDP_DEVICE_TYPES]);

/* --- arithmetic, for backends that have none of their own ------------------------------------ */

/**
 * Whether `op` is defined for `dtype`, as PyTorch has it: AVG and PREMUL_SUM not for integers and
 * bool, MIN and MAX not for complex numbers, BAND, BOR and BXOR for integers and bool only. For
 * bool SUM and MAX mean "or", PRODUCT and MIN mean "and". Errors: TDDP_UNSUPPORTED,
 * TDDP_INVALID_ARGUMENT (no operation, no dtype).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reduce_check(tddp_reduce_op op, tddp_dtype dtype);

/** into[i] = into[i] op from[i] for `count` elements that do not overlap; AVG and PREMUL_SUM add.
 * float16 and bfloat16 are computed in float32 and rounded to nearest even each time; MIN and
 * MAX propagate NaN; integers wrap. Does nothing for an op that tddp_reduce_check() refuses. */
TDDP_API void tddp_combine(tddp_reduce_op op, tddp_dtype dtype, void *into, const void *from,
                           size_t count);

/** data[i] *= factor, for floating-point and complex dtypes; does nothing for others. */
TDDP_API void tddp_scale(tddp_dtype dtype, void *data, size_t count, double factor);

#ifdef __cplusplus
}
#endif

#endif
