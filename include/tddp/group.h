/**
 * @file group.h
 * @brief Process groups: ranks that execute the same operations in the same order.
 *
 * Operations are queued and executed in order, by a thread that is lent to the queue or, where the
 * backend supports it, by a thread that waits for one of them (also tddp_op_args.inline_us); sends
 * and receives start at once, beside the queue and each other. Each call returns a tddp_work
 * through `work` (caller: tddp_work_release()); with `work` NULL it waits instead (as
 * tddp_work_wait() with NULL). Arguments are checked before anything is sent. An operation uses its
 * buffers' memory until its work is done; arrays of buffers are copied.
 *
 * Calls may come from several threads. The order in which operations queue must be the same on
 * every rank. Messages between two ranks with one tag match in the order of the calls, with one
 * exception: a receive from any source and one from a given rank that wait for the same tag at the
 * same time may get each other's messages.
 *
 * Each operation has its own timeout (tddp_op_args.timeout_ms), or the group's as it was when the
 * operation was queued, counted from the start of its execution: time in the queue does not count.
 * A failure that may leave the ranks out of step (all but TDDP_INVALID_ARGUMENT and
 * TDDP_UNSUPPORTED) fails the group on all ranks within moments: the failed rank notifies the
 * others through the store, whether they wait for it or not. Their running or next operation
 * returns TDDP_PEER_LOST or, after a mismatch, TDDP_MISMATCH; the text names the root cause with
 * the first failed rank's host, pid and operation. All other operations, queued and later, return
 * TDDP_GROUP_FAILED with the first failure's text. TDDP_TIMEOUT names the ranks that have arrived,
 * and the positions of the others.
 *
 * Statuses common to all operations: TDDP_INVALID_ARGUMENT, TDDP_UNSUPPORTED (this backend, dtype
 * or device), TDDP_TIMEOUT, TDDP_PEER_LOST, TDDP_MISMATCH, TDDP_GROUP_FAILED (an earlier operation
 * failed; the text says which: destroy the group), TDDP_GROUP_CLOSED, TDDP_FORKED.
 */
#ifndef TDDP_GROUP_H
#define TDDP_GROUP_H

#include <tddp/buffer.h>
#include <tddp/op.h>
#include <tddp/store.h>
#include <tddp/work.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A process group. Reference counted; any thread. */
typedef struct tddp_group tddp_group;

/** PyTorch's default: thirty minutes. */
#define TDDP_GROUP_DEFAULT_TIMEOUT_MS (30 * 60 * 1000)

/** Options of tddp_group_create(). Begin with TDDP_GROUP_OPTS_INIT. */
typedef struct tddp_group_opts {
    size_t size;         /**< sizeof(tddp_group_opts) */
    const char *backend; /**< "gloo", "nccl", "fake", a registered name, or one for each kind of
                              device: "cpu:gloo,cuda:nccl" */
    const char *name;    /**< the same on every rank, its keys in the store; NULL: "default_pg" */
    tddp_store *store;   /**< the group keeps a reference */
    int rank;
    int world_size;
    int64_t timeout_ms; /**< of creation and, by default, of each operation; <= 0: 30 min */
    int device_index;   /**< GPU of this rank, where no memory tells; -1: the first */
    int device_bound;   /**< 1: the group is for that GPU alone, whose ranks connect at once */
    /** The group of whose ranks this one consists, or NULL. The same choice on every rank. The two
     * share a failure detector (a thread and a connection to the store); the parent may be shut
     * down first. */
    tddp_group *parent;
    /** With a parent of the same backend: all of the parent's ranks take part, in the order in
     * which they create groups; ranks that are not in the group call tddp_group_decline(). It lets
     * a backend derive the group's resources from the parent's. */
    int split;
} tddp_group_opts;

/** The defaults: one rank, alone; backend and store have to be set. */
#define TDDP_GROUP_OPTS_INIT                                                                   \
    {                                                                                          \
        sizeof(tddp_group_opts), NULL, NULL, NULL, 0, 1, TDDP_GROUP_DEFAULT_TIMEOUT_MS, -1, 0, \
            NULL, 0                                                                            \
    }

/** As TDDP_GROUP_OPTS_INIT, for languages without C's macros. `size`: of the caller's struct. */
TDDP_API void tddp_group_opts_init(tddp_group_opts *opts, size_t size);

/**
 * Joins this rank with the world_size - 1 others. Blocks until all have arrived; every ten seconds
 * a log line names the missing ranks. A name can be reused on the same store once all ranks have
 * shut the earlier group down. Caller: tddp_group_release(), on no thread that runs a work's
 * callback. Errors: TDDP_INVALID_ARGUMENT (also: the rank is taken), TDDP_UNAVAILABLE (no such
 * backend), TDDP_TIMEOUT (the text names the missing ranks), TDDP_CANCELED, TDDP_PEER_LOST,
 * TDDP_NETWORK, those of the store.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_create(const tddp_group_opts *opts,
                                                      const tddp_wait *wait, tddp_group **out);

/**
 * Takes part in the creation of a group from this one, with tddp_group_opts.split, without being a
 * rank of it. Waits until nothing of this group is queued. NULL waits as long as the group's
 * timeout. Errors: those of tddp_group_create().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_decline(tddp_group *parent, const tddp_wait *wait);

/**
 * Waits until nothing is under way or queued, well or not. NULL waits as long as the group's
 * timeout. Errors: TDDP_TIMEOUT, TDDP_CANCELED, TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_drain(tddp_group *group, const tddp_wait *wait);

/**
 * Ends the group: operations under way and queued get up to `drain_ms` to finish, then they are
 * aborted with TDDP_GROUP_CLOSED; the connections end. Other threads may
 * call meanwhile, and later: operations then return TDDP_GROUP_CLOSED. Twice is harmless. In a
 * forked child it has no effect.
 */
TDDP_API void tddp_group_shutdown(tddp_group *group, int64_t drain_ms);

/**
 * tddp_group_shutdown(), after which the process that hosts the group's TCP store waits until all
 * ranks have shut the group down, no other process is connected to the store, or `wait` is over.
 * Other processes, and groups with a parent, do not wait. A second call does not wait either.
 * Errors: those of tddp_store_await_clients(), TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_shutdown_host(tddp_group *group, int64_t drain_ms,
                                                             const tddp_wait *wait);

/**
 * Says why this rank is about to shut the group down before its time, an exception's class and
 * text for instance: ranks whose operations fail for want of this one name it. Copied, and cut at
 * some hundred bytes; NULL or "": there is no reason. Any thread, before the shutdown. Errors:
 * TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_set_leave_reason(tddp_group *group,
                                                                const char *reason);

/** One more reference: tddp_group_release(). */
TDDP_API tddp_group *tddp_group_retain(tddp_group *group);

/** One reference less; the last one shuts the group down without draining and frees it. NULL is
 * fine. */
TDDP_API void tddp_group_release(tddp_group *group);

/** The same, but never waits: the last reference's shutdown runs on a thread of the library, for
 * which the process's exit waits. For garbage collectors, destructors, and callbacks of works. */
TDDP_API void tddp_group_release_async(tddp_group *group);

/** This rank's place in the group. As the attributes below: any thread, also once it has failed or
 *  was shut down. */
TDDP_API int tddp_group_rank(const tddp_group *group);
/** How many ranks there are. */
TDDP_API int tddp_group_world_size(const tddp_group *group);
TDDP_API const char *tddp_group_name(const tddp_group *group);    /**< lives as long as the group */
TDDP_API const char *tddp_group_backend(const tddp_group *group); /**< likewise */
/** Whether it was shut down. */
TDDP_API int tddp_group_closed(const tddp_group *group);

/** A rank's host and process, as it published them when it joined. Texts live as long as the group.
 */
typedef struct tddp_peer {
    const char *host;    /**< the host's name */
    const char *host_id; /**< equal for ranks that reach each other over loopback */
    int64_t pid;
    int global_rank; /**< in the group that this one was made from (`parent`), and that one's... */
} tddp_peer;

/** Errors: TDDP_INVALID_ARGUMENT. */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_peer(const tddp_group *group, int rank,
                                                    tddp_peer *out);

/** Whether a rank's process is known to have ended, which can be observed on its own host only.
 * Errors: TDDP_INVALID_ARGUMENT. */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_peer_ended(const tddp_group *group, int rank,
                                                          int *out);

/* --- memory that is reduced where it lies ------------------------------------------------------
 */

/** Memory for buffers that a group's operations work on in place, without copies between. */
typedef struct tddp_group_memory tddp_group_memory;

/**
 * Takes `bytes` (more than 0) of memory for operations of this group: zero, at a multiple of 64
 * bytes. Shared with the other ranks of this host where the group has shared memory, else plain
 * memory; either way any operation takes it. Each rank for itself: others need not call. It may
 * outlive the group: tddp_group_memory_release(). A forked child has a copy as of the fork, which
 * fork() makes. Errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY, TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_memory_create(tddp_group *group, size_t bytes,
                                                             tddp_group_memory **out);
/** Where it is. */
TDDP_API void *tddp_group_memory_data(const tddp_group_memory *memory);
/** Whether it is shared. */
TDDP_API int tddp_group_memory_shared(const tddp_group_memory *memory);
/** Any thread; no operation may be using it. NULL is fine. */
TDDP_API void tddp_group_memory_release(tddp_group_memory *memory);

/**
 * Whether fork() makes those copies; at first it does. A host whose runtime also forks to start
 * programs, which use none of this memory, disables it, and enables it around forks whose child
 * goes on: both calls count, of all threads together. A child without copies ends when it uses the
 * memory. The process's, of all its groups. Any thread; also before there is a group.
 */
TDDP_API void tddp_fork_copies_enable(void);
/** Takes one tddp_fork_copies_enable() back, or what holds at first. */
TDDP_API void tddp_fork_copies_disable(void);

/** What carries this rank's operations: "shm", "gloo", "shm+gloo" (shared memory within hosts, Gloo
 * between them; "ucx" in its place where TDDP_HOSTS says so), one for each kind of device ("cpu:shm,cuda:nccl"), or another backend's name.
 * Static. */
TDDP_API const char *tddp_group_carrier(const tddp_group *group);

/** The default time of its operations, in milliseconds. Any thread. */
TDDP_API int64_t tddp_group_timeout(const tddp_group *group);
/** Sets it for operations that are queued later: more than 0. Any thread. Errors:
 * TDDP_INVALID_ARGUMENT. */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_set_timeout(tddp_group *group, int64_t timeout_ms);

/** The group's part of the store, for coordination beside the collectives; the caller releases it.
 * NULL once the group is shut down, since the store's host may end then, and in a forked child. Any
 * thread. */
TDDP_API tddp_store *tddp_group_store(tddp_group *group);

/* --- operations --------------------------------------------------------------------------------
 */

/** Bytes of a description with its NUL; longer ones are cut. */
#define TDDP_DESCRIPTION_BYTES 256

/**
 * An operation: its memory, its arguments, its options. Begin with TDDP_OP_ARGS_INIT; fields that
 * the kind does not use are not looked at. all_gather, reduce_scatter and all_reduce take one piece
 * of memory in place of a list where the list is NULL.
 */
typedef struct tddp_op_args {
    size_t size; /**< sizeof(tddp_op_args) */
    tddp_op_kind kind;
    tddp_buffer input;  /**< all_gather, gather, reduce_scatter, send: sent by this rank */
    tddp_buffer output; /**< scatter, all_gather, reduce_scatter, recv: received; all_reduce,
                           reduce, broadcast: both, in place */
    /** One for each rank: scatter at its root, reduce_scatter, all_to_all. Copied. */
    const tddp_buffer *inputs;
    size_t input_count;
    /** One for each rank: gather at its root, all_gather, all_to_all. all_reduce: any number,
     * combined in one operation, each in place. Copied. */
    const tddp_buffer *outputs;
    size_t output_count;
    tddp_reduce_op reduce; /**< all_reduce, reduce, reduce_scatter */
    double premul;         /**< this rank's factor of TDDP_REDUCE_PREMUL_SUM */
    int root;              /**< broadcast, reduce, gather, scatter */
    int peer;              /**< send: to whom; recv: from whom, or TDDP_ANY_SOURCE */
    uint32_t tag;          /**< send, recv */
    int64_t timeout_ms;    /**< <= 0: the group's */
    /** What else must be equal on every rank: shapes or names, as text. Operations whose texts
     * differ are TDDP_MISMATCH, which shows both; one without a text agrees with all. Copied. */
    const char *description;
    /**
     * Executes the operation on the calling thread, within the call, if the backend allows that and
     * no other operation is ahead of it: 0: no; negative: until it is done; else it waits that long
     * for other ranks. Once it is done, the call sets `*work` to NULL: there is nothing to wait for
     * or to release. An operation that is not done then is queued as a work, and another thread
     * goes on with it; one that has failed is a work that returns its failure. Under a limit (of at
     * most a second) an operation that moves more than 4 MiB is only queued: limits are for callers
     * that hold a lock. Without a `work` to return, calls execute what they can in any case. A send
     * or receive over shared memory that would not have to wait, of 64 KiB at most, is finished
     * within the call also with 0; elsewhere sends and receives do not look at it. They always have
     * a work.
     */
    int64_t inline_us;
    tddp_cancel *cancel; /**< ends the execution within the call; borrowed until it returns */
} tddp_op_args;

/** The defaults: an all_reduce that sums, without memory. */
#define TDDP_OP_ARGS_INIT                                                                        \
    {                                                                                            \
        sizeof(tddp_op_args), TDDP_OP_ALL_REDUCE, {NULL, 0, TDDP_UINT8, TDDP_CPU, 0, NULL},      \
            {NULL, 0, TDDP_UINT8, TDDP_CPU, 0, NULL}, NULL, 0, NULL, 0, TDDP_REDUCE_SUM, 1.0, 0, \
            0, 0, 0, NULL, 0, NULL                                                               \
    }

/** As TDDP_OP_ARGS_INIT, for languages without C's macros. `size`: of the caller's struct. */
TDDP_API void tddp_op_args_init(tddp_op_args *args, size_t size);

/** Whether tddp_submit() may block although it returns a work: operations on a device are launched
 * on the thread that calls, and a launch may wait for other ranks, to connect, until the
 * operation's timeout. Once `cancel` is triggered another thread goes on with it. A caller that
 * holds a lock, such as a language's, releases it for such a call. Any thread. */
TDDP_API int tddp_submit_blocks(const tddp_group *group, const tddp_op_args *args);

/** Submits an operation of any kind with its options. The functions below do the same without
 * options. `*work`: NULL if the operation is done; see inline_us. */
TDDP_API TDDP_NODISCARD tddp_status tddp_submit(tddp_group *group, const tddp_op_args *args,
                                                tddp_work **work);

/** Combines `buffer` over all ranks, in place. `premul` is this rank's factor for
 * TDDP_REDUCE_PREMUL_SUM, also below; it may differ between ranks. */
TDDP_API TDDP_NODISCARD tddp_status tddp_all_reduce(tddp_group *group, tddp_buffer buffer,
                                                    tddp_reduce_op op, double premul,
                                                    tddp_work **work);

/** Combines several buffers of one dtype in one operation, each in place; at least one. After a
 * failure some may hold results and others not. */
TDDP_API TDDP_NODISCARD tddp_status tddp_all_reduce_coalesced(tddp_group *group,
                                                              const tddp_buffer *buffers,
                                                              size_t count, tddp_reduce_op op,
                                                              double premul, tddp_work **work);

/** Combines `buffer` over all ranks into that of rank `root`; the others' stay as they are. */
TDDP_API TDDP_NODISCARD tddp_status tddp_reduce(tddp_group *group, tddp_buffer buffer,
                                                tddp_reduce_op op, double premul, int root,
                                                tddp_work **work);

/** Copies `buffer` of rank `root` of the group to all others'. */
TDDP_API TDDP_NODISCARD tddp_status tddp_broadcast(tddp_group *group, tddp_buffer buffer, int root,
                                                   tddp_work **work);

/** Done when every rank has entered it. */
TDDP_API TDDP_NODISCARD tddp_status tddp_barrier(tddp_group *group, tddp_work **work);

/** `output` (world_size times as large) receives every rank's `input`, by rank. */
TDDP_API TDDP_NODISCARD tddp_status tddp_all_gather(tddp_group *group, tddp_buffer input,
                                                    tddp_buffer output, tddp_work **work);

/** `outputs[r]`, one for each rank, receives rank r's `input`, which has as many elements. */
TDDP_API TDDP_NODISCARD tddp_status tddp_all_gather_list(tddp_group *group, tddp_buffer input,
                                                         const tddp_buffer *outputs, size_t count,
                                                         tddp_work **work);

/** At rank `root`, `outputs[r]` receives rank r's `input`; elsewhere `outputs` is NULL, `count` 0.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_gather(tddp_group *group, tddp_buffer input,
                                                const tddp_buffer *outputs, size_t count, int root,
                                                tddp_work **work);

/** Rank r's `output` receives `inputs[r]` of rank `root`; elsewhere `inputs` is NULL, `count` 0. */
TDDP_API TDDP_NODISCARD tddp_status tddp_scatter(tddp_group *group, tddp_buffer output,
                                                 const tddp_buffer *inputs, size_t count, int root,
                                                 tddp_work **work);

/** Combines `input` (world_size times as large) over all ranks; rank r gets part r in `output`. */
TDDP_API TDDP_NODISCARD tddp_status tddp_reduce_scatter(tddp_group *group, tddp_buffer input,
                                                        tddp_buffer output, tddp_reduce_op op,
                                                        double premul, tddp_work **work);

/** Combines `inputs[r]`, one for each rank, over all ranks; rank r gets the result in `output`.
 * Part r has as many elements as rank r's output. */
TDDP_API TDDP_NODISCARD tddp_status tddp_reduce_scatter_list(tddp_group *group,
                                                             const tddp_buffer *inputs,
                                                             size_t count, tddp_buffer output,
                                                             tddp_reduce_op op, double premul,
                                                             tddp_work **work);

/** `inputs[r]` goes to rank r's `outputs[own rank]`, which has as many elements. */
TDDP_API TDDP_NODISCARD tddp_status tddp_all_to_all(tddp_group *group, const tddp_buffer *inputs,
                                                    const tddp_buffer *outputs, size_t count,
                                                    tddp_work **work);

/** Sends `buffer` to rank `peer`, which receives as many elements of the same dtype and tag. The
 * work is done when the memory may be used again. To oneself: TDDP_INVALID_ARGUMENT. */
TDDP_API TDDP_NODISCARD tddp_status tddp_send(tddp_group *group, tddp_buffer buffer, int peer,
                                              uint32_t tag, tddp_work **work);

/** Receives into `buffer` from rank `peer` or TDDP_ANY_SOURCE; tddp_work_source() says from whom.
 * For both at a time with one tag see above.
 * Another size or dtype than was sent: TDDP_MISMATCH. From any source it is TDDP_PEER_LOST when a
 * rank is lost, which might have been the sender; ranks that have destroyed the group are ignored
 * until none is left. */
TDDP_API TDDP_NODISCARD tddp_status tddp_recv(tddp_group *group, tddp_buffer buffer, int peer,
                                              uint32_t tag, tddp_work **work);

/**
 * Sends and receives of a group begun as one: all of them begin, or with an error none. `messages`
 * lie one after the other, each a send or a recv; `works` gets as many, each to be waited for. On a
 * GPU by NCCL they are one launch, in which no message waits for another, so that ranks that send
 * to each other need no order; it is on the communicator of all ranks, so if it is the group's
 * first operation there, all ranks must take part in one. Elsewhere they are the same as messages
 * begun one by one. Some in a device's memory and some not: TDDP_INVALID_ARGUMENT.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_batch_send_recv(tddp_group *group,
                                                         const tddp_op_args *messages, size_t count,
                                                         tddp_work **works);

/**
 * A barrier that names the missing ranks: rank 0 waits for the others, at most `timeout_ms` (<= 0:
 * the group's), and sends all of them the outcome. With `wait_all_ranks` it names all missing
 * ranks, else the first. It uses the store, beside the queue, and the group can be used after it
 * failed. The order of these calls must be the same on every rank. Errors: TDDP_TIMEOUT,
 * TDDP_PEER_LOST (the process of a missing rank has ended), TDDP_GROUP_FAILED, TDDP_CANCELED, those
 * of the store.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_monitored_barrier(tddp_group *group, int64_t timeout_ms,
                                                           int wait_all_ranks,
                                                           const tddp_wait *wait);

#ifdef __cplusplus
}
#endif

#endif
