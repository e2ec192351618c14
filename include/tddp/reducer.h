/**
 * @file reducer.h
 * @brief Gradient buckets, assigned as in PyTorch and reduced while backward still runs.
 *
 * The reducer identifies parameters by number and gradients by address; it doesn't know tensors. It
 * owns the memory of the buckets: each parameter's gradient is a slice of a bucket. Its owner (the
 * libtorch shim, or a test) keeps gradients in those slices and marks each ready.
 *
 *     prepare -> mark_ready (each parameter once, any order, any thread) -> finish -> prepare ...
 *
 * One such iteration ("round" in the names below) belongs to one synchronized backward. A bucket is
 * launched, that is, submitted to the group, once all its parameters are ready and all buckets
 * before it are launched, so every rank submits them in the same order. After the first iteration
 * the buckets are rebuilt in the order in which rank 0's gradients became ready. From then on
 * mark_ready allocates nothing and holds one lock briefly.
 *
 * Three options change this:
 *   - find_unused: an iteration may not use all parameters. prepare -> set_unused -> mark_ready of
 *     the others -> finish; the map of used parameters is reduced with the buckets;
 *   - static_graph: the graph is the same in every iteration. The first iteration counts how often
 *     each parameter is marked ready, and finish launches its buckets; later ones expect the same
 *     counts;
 *   - a communication hook replaces the average, in stages.
 *
 * The host doesn't wait for buckets on devices. A bucket is launched on the current stream of the
 * launching thread, after that stream has waited for all streams that were current when its
 * gradients were marked ready; finish has the current stream of its thread wait for the averages. A
 * later failure is returned by the next prepare.
 */
#ifndef TDDP_REDUCER_H
#define TDDP_REDUCER_H

#include <tddp/comm_hook.h>
#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The buckets of one model. */
typedef struct tddp_reducer tddp_reducer;

/** PyTorch's kDefaultFirstBucketBytes. */
#define TDDP_FIRST_BUCKET_BYTES (1024 * 1024)
/** PyTorch's kDefaultBucketBytesCap. */
#define TDDP_BUCKET_CAP_BYTES (25 * 1024 * 1024)

/** Options of tddp_reducer_create(). Begin with TDDP_REDUCER_OPTS_INIT. */
typedef struct tddp_reducer_opts {
    size_t size; /**< sizeof(tddp_reducer_opts) */
    /** Bytes of the first, second ... bucket, copied; the last repeats. NULL, 0: PyTorch's. */
    const size_t *limits;
    size_t limit_count;
    int find_unused;  /**< iterations may not use all parameters: tddp_reducer_set_unused() */
    int static_graph; /**< the graph is the same in each iteration; find_unused is ignored */
    int skip_unused;  /**< buckets that no rank uses are not reduced; needs one of the two above */
    int describe;     /**< ranks also compare the names and shapes in each bucket */
    /** For parameters on devices; NULL if all are on the CPU. */
    const tddp_device_memory_ops *device;
} tddp_reducer_opts;

/** The defaults: PyTorch's sizes, all parameters used. */
#define TDDP_REDUCER_OPTS_INIT                               \
    {                                                        \
        sizeof(tddp_reducer_opts), NULL, 0, 0, 0, 0, 0, NULL \
    }

/** As TDDP_REDUCER_OPTS_INIT, for languages without C's macros. `size`: of the caller's struct. */
TDDP_API void tddp_reducer_opts_init(tddp_reducer_opts *opts, size_t size);

/**
 * Compares the parameters over all ranks (number, shapes, dtypes, sparse gradients, distribution
 * over devices) and the options; a difference is TDDP_MISMATCH on every rank, and its text names
 * the parameter and both ranks. Then makes the first buckets: as in PyTorch, one per dtype and
 * device, because the order is unknown yet; with find_unused and no static_graph by `limits`, and
 * these are never rebuilt. Memory starts zeroed. Sparse parameters are compared and marked ready as
 * the others, but are in no bucket: the caller averages their gradients. Copies `params` with their
 * names and dims, and retains the group. Caller: tddp_reducer_free(). Errors: TDDP_INVALID_ARGUMENT
 * (a parameter whose dtype has no gradient; options that contradict each other; a memory
 * table without a callback), TDDP_UNSUPPORTED (a parameter on a device, and no table), those of
 * tddp_all_gather(), and those of the table.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_create(tddp_group *group, const tddp_param *params,
                                                        size_t count, const tddp_reducer_opts *opts,
                                                        const tddp_wait *wait, tddp_reducer **out);

/** Frees the reducer. Memory that tddp_flat_memory references or pending buckets hold lives as long
 *  as they do; pending buckets also hold the hook, which may then be freed on a thread of the
 *  group's. Never waits. NULL is allowed. */
TDDP_API void tddp_reducer_free(tddp_reducer *reducer);

/** The address of parameter `index`'s gradient. It changes only in tddp_reducer_rebuild(). NULL if
 * `index` is out of range or sparse. */
TDDP_API void *tddp_reducer_gradient(tddp_reducer *reducer, size_t index);

/** The memory of the current buckets, borrowed until they are rebuilt: a caller that keeps tensors
 *  in it retains it. */
TDDP_API tddp_flat_memory *tddp_reducer_memory(const tddp_reducer *reducer);

/**
 * Sets the communication hook, which replaces the average. Once, before the first iteration.
 * Retains the hook. All ranks must set the same one: the first operation of the first iteration
 * compares the names. A failed hook has the effect of a failed operation.
 * Errors: TDDP_INVALID_ARGUMENT (NULL; there is one; too late; a divisor is set), TDDP_UNSUPPORTED
 * (parameters on a device that the hook does not take).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_set_hook(tddp_reducer *reducer,
                                                          tddp_comm_hook *hook);

/**
 * From the next prepared iteration on gradients are sums divided by `ranks` instead of the world
 * size, for uneven inputs: the same on every rank, also on joined ones.
 * Errors: TDDP_INVALID_ARGUMENT (not 1 to the world's size; there is a hook).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_set_divisor(tddp_reducer *reducer, int ranks);

/**
 * Starts an iteration: no parameter is ready. Called from forward, on whose current streams the
 * gradients' memory is in order.
 * Errors: TDDP_INVALID_ARGUMENT if only some parameters became ready in the previous iteration: the
 * text names the others (at most ten) and says what to do. After a failed iteration this and all
 * later calls return its status: the ranks are out of step.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_prepare(tddp_reducer *reducer);

/**
 * With find_unused, after prepare: the parameters that this iteration doesn't use. The iteration's
 * first mark_ready, or finish, marks them ready, so a forward without a backward launches nothing;
 * their slices then contain what this rank adds to the average, normally zeros. With skip_unused
 * every rank calls this in every iteration, even without unused parameters, and it waits until all
 * ranks have called it; if `wait` ended before (TDDP_TIMEOUT, TDDP_CANCELED), call it again. With
 * static_graph, which finds unused parameters by itself, this only records, for buckets on devices,
 * that their slices were written on the calling thread's stream. Errors: TDDP_INVALID_ARGUMENT
 * (without find_unused; outside an iteration or after its first mark_ready; out of range), and
 * those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_set_unused(tddp_reducer *reducer,
                                                            const size_t *unused, size_t count,
                                                            const tddp_wait *wait);

/** Parameter `index` got a gradient outside an iteration (under no_sync), which the next iteration
 * averages: there it counts as used by this rank, even if set_unused lists it. Any thread. */
TDDP_API void tddp_reducer_note_used(tddp_reducer *reducer, size_t index);

/**
 * Marks parameter `index`'s gradient ready: it is complete in its slice. Launches the buckets that
 * this completes, except those that tddp_reducer_finish() executes itself (the last one; all of
 * them if there are fewer than two cores for each rank). If the hook must run on the caller's
 * thread, tddp_reducer_hand_over() launches them instead. With static_graph a parameter is ready at
 * its last expected call; in the first iteration none is.
 * `*all_ready` is set to 1 if all parameters are ready, else 0.
 * Errors: TDDP_INVALID_ARGUMENT (out of range; ready twice in an iteration, or with static_graph
 * more often than in the first one: the text names it), and those of tddp_all_reduce() or the hook.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_mark_ready(tddp_reducer *reducer, size_t index,
                                                            int *all_ready);

/**
 * For hooks that run on the caller's thread: launches the ready buckets, in order. Only on the
 * thread that runs backward; no lock is held while the hook runs. `*all_handed_over` is set to 1 if
 * all buckets are launched, else 0. Errors: those of the hook.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_hand_over(tddp_reducer *reducer,
                                                           int *all_handed_over);

/**
 * Ends the iteration: marks unused parameters ready (with static_graph in the first iteration, all
 * parameters); launches the ready buckets; waits until every launched bucket is averaged, or has
 * passed all stages of the hook. For buckets on devices the thread's current streams wait. If
 * gradients are missing, the next prepare fails.
 * Returns the first failure. If `wait` ended before the operations did (TDDP_TIMEOUT,
 * TDDP_CANCELED; it may have ended before this call), all ready buckets are launched nevertheless,
 * so the other ranks don't wait for this one: call it again, or let tddp_reducer_prepare() do so.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_finish(tddp_reducer *reducer,
                                                        const tddp_wait *wait);

/**
 * Waits until no operation of the iteration is pending, and does nothing else. For owners that call
 * finish while holding a lock of the host language, as a hook with `on_caller` requires: they call
 * finish with timeout 0, and when it returns TDDP_TIMEOUT, release the lock and call this. `*any`
 * is set to 1 if an operation was pending, else 0. The next finish returns the operations' status.
 * Errors: TDDP_TIMEOUT, TDDP_CANCELED (operations are still pending).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_await_works(tddp_reducer *reducer,
                                                             const tddp_wait *wait, int *any);

/**
 * The iteration of a joined rank, which has no data left, in place of mark_ready and finish: zeroes
 * its buckets, launches all, waits. After rebuild and prepare, as on the other ranks. If `wait`
 * ended before, call it or finish again. Errors: TDDP_INVALID_ARGUMENT (not prepared; gradients are
 * ready already) and those of tddp_reducer_finish().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_shadow(tddp_reducer *reducer,
                                                        const tddp_wait *wait);

/**
 * After the first finished iteration, once: rebuilds the buckets by `limits`, in the order in which
 * rank 0's gradients became ready (if rank 0 had joined: from the last parameter to the first), and
 * copies the gradients. Never with find_unused, unless static_graph. `*rebuilt` is set to 1 if it
 * did: the owner must then update its gradients' addresses. A collective call, on the thread that
 * runs forward. Errors: TDDP_OUT_OF_MEMORY and those of tddp_broadcast(); after TDDP_CANCELED or
 * TDDP_OUT_OF_MEMORY the next call continues.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_rebuild(tddp_reducer *reducer,
                                                         const tddp_wait *wait, int *rebuilt);

/** After finish: whether any rank used parameter `index` in this iteration. Always 1 without
 *  find_unused and static_graph. */
TDDP_API int tddp_reducer_used(const tddp_reducer *reducer, size_t index);

/** The permanent failure with which every call fails; TDDP_OK if there is none. On the thread that
 * runs forward. */
TDDP_API tddp_status tddp_reducer_failure(const tddp_reducer *reducer);

/** The number of buckets. */
TDDP_API size_t tddp_reducer_bucket_count(const tddp_reducer *reducer);
/** The bytes of the gradients in bucket `i`; 0 if out of range. */
TDDP_API size_t tddp_reducer_bucket_bytes(const tddp_reducer *reducer, size_t i);

/** Which bucket parameter `index` is in; (size_t)-1 if out of range or sparse. */
TDDP_API size_t tddp_reducer_bucket_of(const tddp_reducer *reducer, size_t index);

/** The parameters in bucket `bucket`, in the order of their slices: returns their number (0 if out
 *  of range) and writes at most `room` of them to `out`. */
TDDP_API size_t tddp_reducer_bucket_params(const tddp_reducer *reducer, size_t bucket, size_t *out,
                                           size_t room);

/** The parameters in the order in which they became ready in the last finished iteration: returns
 *  their number (0 before the first) and writes at most `room` of them to `out`. */
TDDP_API size_t tddp_reducer_order(const tddp_reducer *reducer, size_t *out, size_t room);

/** Whether the buckets were rebuilt. */
TDDP_API int tddp_reducer_rebuilt(const tddp_reducer *reducer);
/** How many iterations were finished. */
TDDP_API uint64_t tddp_reducer_rounds(const tddp_reducer *reducer);

/** Times of the last finished iteration on the monotonic clock, in nanoseconds; 0: didn't occur. */
typedef struct tddp_reducer_times {
    int64_t prepared_ns;     /**< forward began */
    int64_t first_ready_ns;  /**< the first gradient was ready */
    int64_t last_ready_ns;   /**< the last gradient was ready */
    int64_t first_launch_ns; /**< the first bucket was launched */
    int64_t finished_ns;     /**< all buckets were averaged */
    uint64_t iterations;     /**< finished iterations, including this one */
} tddp_reducer_times;

/** On the thread that runs forward, like the getters above. */
TDDP_API void tddp_reducer_times_of(const tddp_reducer *reducer, tddp_reducer_times *out);

#ifdef __cplusplus
}
#endif

#endif
