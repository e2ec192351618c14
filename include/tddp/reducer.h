/**
 * @file reducer.h
 * @brief Gradient buckets: planned as PyTorch plans them, reduced while backward still runs.
 *
 * The reducer knows parameters by number and gradients by address; it never sees a tensor. It owns
 * the memory of the buckets: each parameter's gradient is a slice of one. Its owner (the libtorch
 * shim, or a test) makes gradients live in those slices and reports each as it becomes ready.
 *
 *     prepare -> mark_ready (each parameter once, any order, any thread) -> finish -> prepare ...
 *
 * A bucket is handed to the group once all its parameters are ready and all buckets before it have
 * been handed over, so every rank hands them over in the same order. After the first round the
 * buckets are rebuilt in the order in which rank 0's gradients became ready. After that round
 * mark_ready allocates nothing and holds one lock briefly.
 *
 * Three things may differ from that plain life:
 *   - parameters that a round does not reach (find_unused): prepare -> set_unused -> mark_ready of
 *     the others -> finish; a map of who used what is reduced with the buckets;
 *   - a graph that is the same in every round (static_graph): the first round counts how often each
 *     parameter is reported and hands over in finish, later ones expect those counts;
 *   - a communication hook, which does with each bucket what it likes, in stages.
 *
 * Buckets on a device are not waited for by the host. A bucket is handed over on the current stream
 * of the thread that hands it over, which first waits for all streams that were current where its
 * gradients were reported; finish has the current stream of its thread wait for the averages. What
 * fails after that is told by the next prepare.
 */
#ifndef TDDP_REDUCER_H
#define TDDP_REDUCER_H

#include <tddp/comm_hook.h>
#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tddp_reducer tddp_reducer;

/** PyTorch's kDefaultFirstBucketBytes and kDefaultBucketBytesCap. */
#define TDDP_FIRST_BUCKET_BYTES (1024 * 1024)
#define TDDP_BUCKET_CAP_BYTES (25 * 1024 * 1024)

typedef struct tddp_reducer_opts {
    size_t size; /**< sizeof(tddp_reducer_opts) */
    /** Bytes of the first, second ... bucket, copied; the last repeats. NULL, 0: PyTorch's. */
    const size_t *limits;
    size_t limit_count;
    int find_unused;  /**< rounds may leave parameters out: tddp_reducer_set_unused() */
    int static_graph; /**< every round is like the first one; find_unused is then not needed */
    int skip_unused;  /**< buckets that no rank uses are not reduced; with one of the two above */
    int describe;     /**< ranks compare the names and shapes in each bucket as well */
    /** For parameters on devices; NULL if all are on the CPU. */
    const tddp_device_memory_ops *device;
} tddp_reducer_opts;

#define TDDP_REDUCER_OPTS_INIT                               \
    {                                                        \
        sizeof(tddp_reducer_opts), NULL, 0, 0, 0, 0, 0, NULL \
    }

/** As TDDP_REDUCER_OPTS_INIT, for languages without C's macros. `size`: of the caller's struct. */
TDDP_API void tddp_reducer_opts_init(tddp_reducer_opts *opts, size_t size);

/**
 * Compares the parameters over all ranks (number, shapes, dtypes, sparse ones, how they are spread
 * over devices, and the options; a difference is TDDP_MISMATCH on every rank and its text names the
 * parameter and both ranks), then
 * makes the first buckets: as PyTorch, one per dtype and device, for nothing is known of the order
 * yet; with find_unused and no static_graph by `limits`, and then for good. Memory starts zeroed.
 * Sparse parameters are compared and counted as the others, but are in no bucket: the caller
 * that reports them averages them. Copies `params` with their names and dims, and keeps a reference
 * to the group. Caller: tddp_reducer_free(). Errors: TDDP_INVALID_ARGUMENT (no parameters; one
 * whose dtype has no gradient; options that contradict each other; a memory table that lacks a
 * call), TDDP_UNSUPPORTED (a parameter on a device, and no table), those of tddp_all_gather(), and
 * those of the table.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_create(tddp_group *group, const tddp_param *params,
                                                        size_t count, const tddp_reducer_opts *opts,
                                                        const tddp_wait *wait, tddp_reducer **out);

/** Frees all but what tddp_flat_memory references, or buckets still under way, hold; those go on
 *  and their memory and hook follow them: the hook may then be freed on a thread of the group's.
 *  Never waits. NULL is fine. */
TDDP_API void tddp_reducer_free(tddp_reducer *reducer);

/** Where parameter `index`'s gradient lies now. It moves when the buckets are rebuilt, which is
 * only inside tddp_reducer_rebuild(). NULL if `index` is out of range or sparse. */
TDDP_API void *tddp_reducer_gradient(tddp_reducer *reducer, size_t index);

/** The memory behind the current buckets, borrowed until they are rebuilt: a caller that keeps
 *  tensors on it retains it. */
TDDP_API tddp_flat_memory *tddp_reducer_memory(const tddp_reducer *reducer);

/**
 * What is done with buckets in place of averaging them. Once, before the first round. Retained. All
 * ranks have the same one: the first operation of the first round compares the names. A hook that
 * fails breaks the reducer as a failed operation does.
 * Errors: TDDP_INVALID_ARGUMENT (NULL; there is one; too late; a divisor is set), TDDP_UNSUPPORTED
 * (parameters on a device that the hook does not take).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_set_hook(tddp_reducer *reducer,
                                                          tddp_comm_hook *hook);

/**
 * From the next prepared round on gradients are sums divided by `ranks` in place of the world's
 * size, for ranks that have no more data: the same on every rank, also on those that shadow.
 * Errors: TDDP_INVALID_ARGUMENT (not 1 to the world's size; there is a hook).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_set_divisor(tddp_reducer *reducer, int ranks);

/**
 * Starts a round: every parameter is unready again. Called from forward, on whose current streams
 * the gradients' memory is in order.
 * Errors: TDDP_INVALID_ARGUMENT if some parameters of the round before became ready but others
 * never did: the text names those (at most ten) and says what to do. After a round that failed,
 * this and all later calls return its status: the ranks are out of step.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_prepare(tddp_reducer *reducer);

/**
 * With find_unused, after prepare: the parameters that this round will not reach. They count as
 * ready with the first mark_ready of the round, or in finish, so that a forward without a backward
 * starts nothing; by then their slices hold what this rank adds to the average, zeros as a rule.
 * With skip_unused every rank calls this in every round, also with none, and it waits until all
 * have; if `wait` ended before (TDDP_TIMEOUT, TDDP_CANCELED), call it again. A static_graph finds
 * out by itself: this then only notes, for buckets on devices, that their slices were written on
 * the calling thread's stream. Errors: TDDP_INVALID_ARGUMENT (without find_unused; outside a round
 * or after its first mark_ready; out of range), and those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_set_unused(tddp_reducer *reducer,
                                                            const size_t *unused, size_t count,
                                                            const tddp_wait *wait);

/** Parameter `index` got a gradient that no round saw (under no_sync) and the next one averages: it
 * counts as used by this rank there, even if set_unused lists it. Any thread. */
TDDP_API void tddp_reducer_note_used(tddp_reducer *reducer, size_t index);

/**
 * Parameter `index`'s gradient lies complete in its slice. Hands over the buckets that this
 * completes, but for those that tddp_reducer_finish() executes itself (the round's last one, and
 * all where the group's thread has no core of its own); if the hook may only run on the caller's
 * thread, tddp_reducer_hand_over() does. With
 * static_graph a parameter is ready at its last expected call; in the first round none is.
 * `*all_ready` is set to 1 if it was the last of the round, else 0.
 * Errors: TDDP_INVALID_ARGUMENT (out of range; ready twice in a round, or more often than in the
 * first one with static_graph: the text names it), and those of tddp_all_reduce() or the hook.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_mark_ready(tddp_reducer *reducer, size_t index,
                                                            int *all_ready);

/**
 * For hooks that run on the caller's thread: gives them the buckets that are complete, in order.
 * Only on the thread that runs backward; no lock is held meanwhile. `*all_handed_over` is set to 1
 * if these were the last of the round, else 0. Errors: those of the hook.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_hand_over(tddp_reducer *reducer,
                                                           int *all_handed_over);

/**
 * Ends the round: counts as ready what set_unused left, with static_graph in its first round all;
 * hands over what is complete and was not; waits until every bucket handed over is averaged, or
 * has gone through all stages of the hook; for buckets on devices the thread's current streams do
 * the waiting. If parameters are missing, prepare complains of them.
 * Returns the first failure. If `wait` ended before the operations did (TDDP_TIMEOUT,
 * TDDP_CANCELED; it may have ended before this call), all complete buckets are handed over all the
 * same and the other ranks get this one's part: call it again, or let tddp_reducer_prepare() do
 * so.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_finish(tddp_reducer *reducer,
                                                        const tddp_wait *wait);

/**
 * Waits until no operation of the round is under way, and does nothing else: for owners who hold a
 * lock of the host's in finish, as a hook with `on_caller` needs it, and let go of it where finish,
 * given no time, says TDDP_TIMEOUT. `*any` is set to 1 if there was one, else 0. How they ended is
 * told by the next finish. Errors: TDDP_TIMEOUT, TDDP_CANCELED (they are under way still).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_await_works(tddp_reducer *reducer,
                                                             const tddp_wait *wait, int *any);

/**
 * A round of a rank without data, in place of mark_ready and finish: zeroes its buckets, hands over
 * all, waits. After rebuild and prepare, as on the other ranks. If `wait` ended before, call it or
 * finish again. Errors: TDDP_INVALID_ARGUMENT (not prepared; gradients are ready already) and those
 * of tddp_reducer_finish().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_shadow(tddp_reducer *reducer,
                                                        const tddp_wait *wait);

/**
 * After the first finished round, once: takes rank 0's order of readiness (if it only shadowed:
 * from the last parameter to the first), plans the buckets anew by `limits` and moves the
 * gradients, contents included. Never with find_unused, unless static_graph.
 * `*rebuilt` is 1 if it did, and the owner must point its gradients to their new places. A
 * collective call, on the thread that runs forward. Errors: TDDP_OUT_OF_MEMORY and those of
 * tddp_broadcast(); after TDDP_CANCELED or TDDP_OUT_OF_MEMORY the next call takes it up again.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_rebuild(tddp_reducer *reducer,
                                                         const tddp_wait *wait, int *rebuilt);

/** After finish: whether any rank used parameter `index` in this round. 1 if nobody looked: without
 *  find_unused and static_graph. */
TDDP_API int tddp_reducer_used(const tddp_reducer *reducer, size_t index);

/** What put the ranks out of step for good, so that every call fails; TDDP_OK if nothing did. On
 * the thread that runs forward. */
TDDP_API tddp_status tddp_reducer_failure(const tddp_reducer *reducer);

/** The buckets as they are: their number, and bytes of the gradients in bucket `i` (0 if out of
 *  range). */
TDDP_API size_t tddp_reducer_bucket_count(const tddp_reducer *reducer);
TDDP_API size_t tddp_reducer_bucket_bytes(const tddp_reducer *reducer, size_t i);

/** Which bucket parameter `index` is in; (size_t)-1 if out of range or sparse. */
TDDP_API size_t tddp_reducer_bucket_of(const tddp_reducer *reducer, size_t index);

/** The parameters in bucket `bucket` as they lie in it: their number (0 if out of range); at most
 *  `room` of them are written to `out`. */
TDDP_API size_t tddp_reducer_bucket_params(const tddp_reducer *reducer, size_t bucket, size_t *out,
                                           size_t room);

/** Parameters in the order in which they became ready in the last finished round: their number, 0
 *  before; at most `room` of them are written to `out`. */
TDDP_API size_t tddp_reducer_order(const tddp_reducer *reducer, size_t *out, size_t room);

/** Whether buckets have their final layout by a rebuild; how many rounds were finished. */
TDDP_API int tddp_reducer_rebuilt(const tddp_reducer *reducer);
TDDP_API uint64_t tddp_reducer_rounds(const tddp_reducer *reducer);

/** Moments of the last finished round on the monotonic clock, in nanoseconds; 0: did not come. */
typedef struct tddp_reducer_times {
    int64_t prepared_ns;     /**< forward began */
    int64_t first_ready_ns;  /**< the first gradient was there */
    int64_t last_ready_ns;   /**< the last one */
    int64_t first_launch_ns; /**< the first bucket was handed over */
    int64_t finished_ns;     /**< all were averaged */
    uint64_t rounds;         /**< finished ones, this included */
} tddp_reducer_times;

/** On the thread that runs forward, as the questions above. */
TDDP_API void tddp_reducer_times_of(const tddp_reducer *reducer, tddp_reducer_times *out);

#ifdef __cplusplus
}
#endif

#endif
