/**
 * @file backend.h
 * @brief The table by which a backend carries out what process groups ask of it (ABI 1).
 *
 * A backend is named ("gloo", "nccl", "fake", your own). libtddp looks for it among those
 * registered, then for a module `tddp_backend_<name>.so` in TDDP_BACKEND_PATH, beside libtddp and
 * on the system's library path, and never unloads it. A module exports
 *
 *     const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);
 *
 * which returns NULL if it does not know that ABI, or if something that it needs is not here: it
 * says what with tddp_fail(), and is asked again the next time. It links libtddp for the store and
 * tddp_fail().
 *
 * Threads: create() and destroy() run on the thread that makes or destroys the group; the
 * operations of one group run one at a time, in the same order on every rank, on the group's
 * progress thread; sends and receives are posted from any thread and finished on threads of the
 * group's, and so are all operations on the memory of a device with TDDP_BACKEND_QUEUES; abort()
 * may come from any thread meanwhile. No slot may throw, or run code of a host language.
 */
#ifndef TDDP_BACKEND_H
#define TDDP_BACKEND_H

#include <tddp/buffer.h>
#include <tddp/op.h>
#include <tddp/store.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TDDP_BACKEND_ABI 1u

/* Whether it is between two ranks rather than all: posted, not run. */
static inline int tddp_op_is_p2p(tddp_op_kind kind)
{
    return kind == TDDP_OP_SEND || kind == TDDP_OP_RECV;
}

/**
 * One operation, checked by the group: dtypes agree, sizes fit, root, peer and op are in range.
 *
 * Operations with a piece for each rank have them in `input_parts` (reduce_scatter, scatter at the
 * root, all_to_all) and `output_parts` (all_gather, gather at the root, all_to_all): world_size
 * buffers, by rank, that live as long as the operation; NULL for all other operations and ranks.
 * Where the parts lie end to end in one piece of memory, `input` or `output` is the whole of it;
 * else its data is NULL and its count the sum. Parts of all_gather, gather, scatter and all_to_all
 * may differ in size, and whether both ends agree is found out with the operation.
 */
typedef struct tddp_op {
    tddp_op_kind kind;
    /** Counts the group's operations from 1; equal on every rank. Point to point: counts this
     * rank's sends and receives, apart from the others. */
    uint64_t sequence;
    /** What this rank gives. all_reduce, reduce, broadcast: the same memory as output. gather: the
     * own piece; scatter: at the root as described above, elsewhere empty; send: the message. */
    tddp_buffer input;
    /** What this rank gets. gather: at the root as described above, elsewhere empty; reduce: at
     * ranks other than the root its contents stay; recv: where the message goes. */
    tddp_buffer output;
    const tddp_buffer *input_parts;
    const tddp_buffer *output_parts;
    tddp_reduce_op reduce; /**< all_reduce, reduce, reduce_scatter */
    double premul; /**< this rank's factor of TDDP_REDUCE_PREMUL_SUM; may differ between ranks */
    int root;      /**< broadcast, reduce, gather, scatter: a rank of this group */
    int peer;      /**< send: to whom; recv: from whom, or TDDP_ANY_SOURCE */
    uint32_t tag;  /**< send, recv: messages match only those of the same tag */
    /** Of what else must be equal on every rank (shapes, names), 0 if nothing is to be compared. */
    uint32_t fingerprint;
    int64_t timeout_ms; /**< > 0; the slot returns TDDP_TIMEOUT when it is over */
    /** For backends with TDDP_BACKEND_RESUMES: once it is triggered the slot may return
     * TDDP_CANCELED with the operation unfinished, and is then called again with the same one.
     * NULL: nobody will. */
    tddp_cancel *cancel;
    /** 1: the slot runs on the thread that waits for the result, which has nothing else to do: it
     * may spin. 0: on a thread beside those that compute. */
    int awaited;
    /** all_reduce of several buffers as one operation: their number; `output_parts` has them, each
     * in place. 0: it is of one. */
    size_t bundled;
    /** Where finish() leaves how long the operation took on its device, in nanoseconds; NULL:
     * nobody asks. */
    int64_t *device_ns;
    /** The operation that this one carries out a part of; its facts are what ranks compare, and
     * what they are told of, in place of this one's. NULL: none. */
    const struct tddp_op *part_of;
} tddp_op;

typedef struct tddp_backend_opts {
    size_t size; /**< sizeof(tddp_backend_opts) of the core */
    int rank;
    int world_size;
    tddp_store *store; /**< this group's own prefix; retain it to keep it after create() */
    int64_t timeout_ms;
    int device_index; /**< GPU for this rank, where no memory tells; -1: the first */
    int device_bound; /**< 1: the group is for that GPU alone, and its ranks may connect at once */
    /** This backend's context of the group whose ranks this one's are some of, where all of its
     * ranks take part in the making: by create(), or by decline() where they are not in it. No
     * operation of it is under way. NULL: none is, or they do not. Valid during create(). */
    void *parent;
    int same_host;     /**< 1 if every rank of the group runs on this host */
    const char *group; /**< the group's name, for messages; valid during create() */
    /** Numeric address at which the other ranks reach this host: loopback with same_host, else the
     * one on the way to the store's server; NULL if nothing tells. Valid during create(). */
    const char *address;
    /** The host of each rank, numbered from 0 as they first come in the order of ranks; NULL: not
     * known. Valid during create(). */
    const int *hosts;
    /** What the ranks are called in messages; NULL: as they are numbered. Valid during create(). */
    const int *names;
} tddp_backend_opts;

/* What a backend bears. */
enum {
    /** Operations may be run by any thread, one at a time, and stopped half way; see
     * tddp_op.cancel. */
    TDDP_BACKEND_RESUMES = 1,
    /** Between ranks of one host shared memory may take its place. */
    TDDP_BACKEND_SHARES_HOSTS = 2,
    /** Operations on the memory of a device (all but those of the CPU) are put on a queue of the
     * device's, where several may be on their way; see launch(). Barriers are run. */
    TDDP_BACKEND_QUEUES = 4,
};

/** Carries out one operation and returns when its result is in place. TDDP_TIMEOUT and
 * TDDP_PEER_LOST name the ranks that are waited for, by what tddp_fail() is given. */
typedef tddp_status (*tddp_backend_run)(void *context, const tddp_op *op);

typedef struct tddp_backend_v1 {
    uint32_t abi;  /**< TDDP_BACKEND_ABI the module was built with */
    uint32_t size; /**< sizeof(tddp_backend_v1) the module was built with */
    const char *name;
    uint32_t device_types; /**< bit (1 << tddp_device_type) for each kind of memory it takes; the
                                group copies what is of the other kind, by the CUDA runtime */

    /** Connects this rank to its peers; blocks at most opts->timeout_ms or until cancelled. */
    tddp_status (*create)(const tddp_backend_opts *opts, const tddp_wait *wait, void **context);

    /** Makes the running and all later operations fail soon, with TDDP_GROUP_FAILED or what they
     * meet. Any thread. */
    void (*abort)(void *context);

    /** Frees everything; no operation is running. After abort() or without. */
    void (*destroy)(void *context);

    /**
     * Point to point; both NULL: not supported. post() begins a send or receive and returns at
     * once; posts come one at a time, in the order in which the messages to or from one peer match,
     * beside a running operation. `*op` and its memory live until finish(), which is called once
     * for each request, on any thread, several at a time: it waits, frees the request, and sets
     * `*source` to the sender's rank for a receive that went well. No finish() may be kept waiting
     * for another: a peer may need the one to be able to do its part in the other.
     */
    tddp_status (*post)(void *context, const tddp_op *op, void **request);
    tddp_status (*finish)(void *context, void *request, int *source);

    uint32_t traits; /**< TDDP_BACKEND_RESUMES and so on */

    /**
     * Memory that operations reduce where it lies; both NULL: there is none. Called on any thread;
     * `*handle` is given back once, on any thread, maybe after destroy() or in a forked child. The
     * memory is zero, and begins at a multiple of 64 bytes.
     */
    tddp_status (*allocate)(void *context, size_t bytes, void **handle, void **data);
    void (*deallocate)(void *handle);

    /** Tells the other ranks, once, why this one takes part in nothing any more, where it was not
     * this backend that failed; NULL: they find out when it is gone. Any thread. */
    void (*report_failure)(void *context, tddp_status status, const char *text);

    /**
     * With TDDP_BACKEND_QUEUES, else NULL. An operation on the memory of a device, of all ranks or
     * between two, is posted, launched, awaited and finished. post() notes what the memory's stream
     * has to do before, and never blocks. launch() puts the operation on its queue: those of all
     * ranks one at a time, in the order of their numbers, on the progress thread; it may block
     * until the deadline. order() has what is put on `stream` from then on wait for the operation;
     * any thread, between launch() and finish(). await() returns once the device is done with it,
     * or with what went wrong. finish() waits for nothing then; it is called once for each request,
     * also after a launch() that failed or never was.
     */
    tddp_status (*launch)(void *context, void *request);
    tddp_status (*order)(void *context, void *request, void *stream);
    tddp_status (*await)(void *context, void *request);

    /** This rank is in none of the group that others of this context's make from it, as
     * tddp_backend_opts.parent says; NULL: they do not need it. Blocks at most as long as `wait`
     * says. */
    tddp_status (*decline)(void *context, const tddp_wait *wait);

    /** Slots by kind; NULL: not supported. `op_count` says how many the module knows. */
    uint32_t op_count;
    tddp_backend_run run[TDDP_OP_COUNT];
} tddp_backend_v1;

/** What a module exports as `tddp_backend_query`. */
typedef const tddp_backend_v1 *(*tddp_backend_query_fn)(uint32_t core_abi);

/**
 * Makes a backend known under its name, in place of a module. The table is kept, not copied.
 * Errors: TDDP_INVALID_ARGUMENT (wrong ABI, name taken, no name).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_backend_register(const tddp_backend_v1 *backend);

/**
 * Finds a backend by name, loading its module if needed. A name such as "cpu:gloo,cuda:nccl" asks
 * for one for each kind of device: operations go to the one of their memory, barriers to the CPU's.
 * Where only one is named, or the one for cuda takes no CUDA memory, that of the other kind is
 * copied.
 * Errors: TDDP_UNAVAILABLE: the text says what was looked for, where, and how to get it;
 * TDDP_INVALID_ARGUMENT: no such name can be.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_backend_find(const char *name,
                                                      const tddp_backend_v1 **out);

/* --- arithmetic, for backends that have none of their own ------------------------------------- */

/**
 * Whether `op` is defined for `dtype`, as PyTorch has it: AVG and PREMUL_SUM not for integers and
 * bool, MIN and MAX not for complex numbers, BAND, BOR and BXOR for integers and bool only. For
 * bool SUM and MAX mean "or", PRODUCT and MIN mean "and". Errors: TDDP_UNSUPPORTED,
 * TDDP_INVALID_ARGUMENT (no operation, no dtype).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reduce_check(tddp_reduce_op op, tddp_dtype dtype);

/**
 * into[i] = into[i] op from[i] for `count` elements that do not overlap; AVG and PREMUL_SUM add.
 * float16 and bfloat16 are computed in float32 and rounded to nearest even each time; MIN and MAX
 * hand NaN on; integers wrap. Nothing happens for an op that tddp_reduce_check() refuses.
 */
TDDP_API void tddp_combine(tddp_reduce_op op, tddp_dtype dtype, void *into, const void *from,
                           size_t count);

/** data[i] *= factor, for floating-point and complex dtypes; nothing happens for others. */
TDDP_API void tddp_scale(tddp_dtype dtype, void *data, size_t count, double factor);

#ifdef __cplusplus
}
#endif

#endif
