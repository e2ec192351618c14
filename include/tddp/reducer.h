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
 */
#ifndef TDDP_REDUCER_H
#define TDDP_REDUCER_H

#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tddp_reducer tddp_reducer;

/** PyTorch's kDefaultFirstBucketBytes and kDefaultBucketBytesCap. */
#define TDDP_FIRST_BUCKET_BYTES (1024 * 1024)
#define TDDP_BUCKET_CAP_BYTES (25 * 1024 * 1024)

typedef struct tddp_reducer_param {
    const char *name; /**< for messages; copied */
    size_t count;     /**< elements of the gradient */
    tddp_dtype dtype;
    tddp_device_type device_type;
    int32_t device_index;
    const int64_t *dims; /**< shape, compared across ranks; copied */
    size_t ndim;
} tddp_reducer_param;

typedef struct tddp_reducer_opts {
    size_t size; /**< sizeof(tddp_reducer_opts) */
    size_t first_bucket_bytes;
    size_t bucket_cap_bytes;
    int describe; /**< ranks compare the names and shapes in each bucket as well */
} tddp_reducer_opts;

#define TDDP_REDUCER_OPTS_INIT                                                       \
    {                                                                                \
        sizeof(tddp_reducer_opts), TDDP_FIRST_BUCKET_BYTES, TDDP_BUCKET_CAP_BYTES, 0 \
    }

/**
 * Assigns parameters to buckets the way PyTorch's compute_bucket_assignment_by_size does: in the
 * order given, one open bucket per dtype and device, closed once it holds at least the current
 * limit; each dtype and device walks through `limits` on its own and the last limit repeats; the
 * result is ordered by smallest parameter number. Writes to `bucket_of[count]` each parameter's
 * bucket and to `*bucket_count` their number. Pure: no group, no memory kept. Errors:
 * TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_plan(const tddp_reducer_param *params,
                                                      size_t count, const size_t *limits,
                                                      size_t limit_count, size_t *bucket_of,
                                                      size_t *bucket_count);

/**
 * Compares the parameters over all ranks (number, shapes, dtypes, and the bucket sizes asked for; a
 * difference is TDDP_MISMATCH on every rank and its text names the parameter and both ranks), then
 * makes the first buckets: as PyTorch, one per dtype and device, for nothing is known of the order
 * yet. Memory starts zeroed. Keeps a reference to the group. Caller: tddp_reducer_free().
 * Errors: TDDP_INVALID_ARGUMENT (no parameters; one whose dtype has no gradient), TDDP_UNSUPPORTED
 * (a parameter that is not on the CPU), and those of tddp_all_gather().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_create(tddp_group *group,
                                                        const tddp_reducer_param *params,
                                                        size_t count, const tddp_reducer_opts *opts,
                                                        const tddp_wait *wait, tddp_reducer **out);

/** Frees all but the memory that tddp_reducer_memory references, or buckets still under way, hold;
 *  those go on and their memory follows them. Never waits. NULL is fine. */
TDDP_API void tddp_reducer_free(tddp_reducer *reducer);

/** Where parameter `index`'s gradient lies now. It moves when the buckets are rebuilt, which is
 * only inside tddp_reducer_rebuild(). NULL if `index` is out of range. */
TDDP_API void *tddp_reducer_gradient(tddp_reducer *reducer, size_t index);

/** The memory behind the current buckets, reference counted apart from the reducer, for those whose
 *  tensors may outlive it. */
typedef struct tddp_reducer_memory tddp_reducer_memory;
TDDP_API tddp_reducer_memory *tddp_reducer_memory_retain(tddp_reducer *reducer);
TDDP_API void tddp_reducer_memory_release(tddp_reducer_memory *memory);

/**
 * Starts a round: every parameter is unready again. Called from forward.
 * Errors: TDDP_INVALID_ARGUMENT if some parameters of the round before became ready but others
 * never did: the text names those (at most ten) and says what to do. After a round that failed,
 * this and all later calls return its status: the ranks are out of step.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_prepare(tddp_reducer *reducer);

/**
 * Parameter `index`'s gradient lies complete in its slice. Hands over the buckets that this
 * completes.
 * `*all_launched` is set to 1 if it was the last of the round, else 0.
 * Errors: TDDP_INVALID_ARGUMENT (out of range; ready twice in a round: the text names it), and
 * those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_mark_ready(tddp_reducer *reducer, size_t index,
                                                            int *all_launched);

/** Waits until every bucket handed over in this round is averaged over the ranks. Returns the first
 *  failure. If `wait` ended before the operations did (TDDP_TIMEOUT, TDDP_CANCELED), call it again,
 *  or let tddp_reducer_prepare() do so. */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_finish(tddp_reducer *reducer,
                                                        const tddp_wait *wait);

/**
 * After the first finished round, once: takes rank 0's order of readiness, plans the buckets anew
 * with [first_bucket_bytes, bucket_cap_bytes] and moves the gradients, contents included.
 * `*rebuilt` is 1 if it did, and the owner must point its gradients to their new places. A
 * collective call, on the thread that runs forward. Errors: TDDP_OUT_OF_MEMORY and those of
 * tddp_broadcast(); after TDDP_CANCELED or TDDP_OUT_OF_MEMORY the next call takes it up again.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_reducer_rebuild(tddp_reducer *reducer,
                                                         const tddp_wait *wait, int *rebuilt);

/** The buckets as they are: their number, and bytes of the gradients in bucket `i` (0 if out of
 *  range). */
TDDP_API size_t tddp_reducer_bucket_count(const tddp_reducer *reducer);
TDDP_API size_t tddp_reducer_bucket_bytes(const tddp_reducer *reducer, size_t i);

/** Which bucket parameter `index` is in; (size_t)-1 if out of range. */
TDDP_API size_t tddp_reducer_bucket_of(const tddp_reducer *reducer, size_t index);

#ifdef __cplusplus
}
#endif

#endif
