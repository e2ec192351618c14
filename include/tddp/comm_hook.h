/**
 * @file comm_hook.h
 * @brief Communication hooks, which replace the average of a gradient bucket.
 *
 * The reducer calls a hook with a bucket once all its gradients are ready. The hook starts an
 * operation, and is called again when that has completed, stage after stage, until the bucket
 * contains the gradients that every rank shall have, normally the average. All ranks have the same
 * hook, so they start the same operations in the same order.
 */
#ifndef TDDP_COMM_HOOK_H
#define TDDP_COMM_HOOK_H

#include <tddp/flat.h>
#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A hook's view of a bucket. Borrowed for the call, except `buffer.data`, which is valid until the
 * bucket's last stage is completed. */
typedef struct tddp_bucket {
    size_t index;       /**< from 0; buckets of an iteration are launched in this order */
    size_t count;       /**< the number of buckets */
    uint64_t iteration; /**< its number, from 0 */
    uint64_t layout;    /**< changes when buckets are rebuilt, which invalidates per-bucket state */
    tddp_buffer buffer; /**< all gradients with the padding between them, which is zero; real
                         * numbers (a complex gradient has two for each element) */
    size_t gradient_count;
    const tddp_flat_slice *gradients;     /**< in the order of their offsets */
    const tddp_device_memory_ops *device; /**< memory on the buffer's device; NULL: the CPU */
    /** The text that ranks compare with the first operation that the hook starts at this stage
     * (tddp_op_args.description); NULL: none. */
    const char *description;
} tddp_bucket;

/** A hook's callbacks. Programs that were compiled against an older version may pass a smaller
 *  struct: the callbacks that it lacks have their default, 0. */
typedef struct tddp_comm_hook_ops {
    size_t size;      /**< sizeof(tddp_comm_hook_ops) */
    const char *name; /**< for messages and logging data; static */

    /**
     * Whether `run` may be called only on the thread that runs backward, as code of a host language
     * requires. Else stage 0 is called, under the reducer's lock, by the thread that marks the
     * bucket's last gradient ready, and later stages by the thread that calls finish.
     */
    int on_caller;

    /**
     * Stage 0: the bucket's gradients are ready. Stage n + 1: the work of stage n has completed
     * with TDDP_OK. Sets `*work` to an operation on the bucket's buffer or on memory of the hook
     * (which must stay valid until the work completes, and which the hook frees), or leaves it
     * NULL. Sets `*again` to 1 to be called with the next stage; else the bucket is complete when
     * the work is. The stages of several buckets alternate: stage n + 1 of a bucket runs after
     * stage n of all buckets, in the order of the buckets. Only a hook with `on_caller` may wait in
     * stage 0. It may also return TDDP_CANCELED if the host interrupts it: the next
     * tddp_reducer_finish() calls that stage again before it launches another bucket.
     */
    tddp_status (*run)(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                       tddp_work **work, int *again);

    /** Frees the state, after the last release of the hook and the completion of all its works.
     *  NULL: nothing to free. */
    void (*free)(void *state);

    /** The hook's settings as text: the ranks compare them, and the name, in the first iteration.
     *  Copied; NULL: none. */
    const char *settings;

    /** Bit (1 << tddp_device_type) for each kind of device that the hook supports; 0: the CPU only.
     *  On a device a stage's work has completed for later work on the buffer's stream, which is the
     *  current one, not for the host. */
    uint32_t device_types;
} tddp_comm_hook_ops;

/** A communication hook. Reference counted; any thread. */
typedef struct tddp_comm_hook tddp_comm_hook;

/** Makes a hook from callbacks. Copies `ops` and its settings; owns `state` if it returns TDDP_OK.
 * Caller: tddp_comm_hook_release(). Errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY. */
TDDP_API TDDP_NODISCARD tddp_status tddp_comm_hook_make(const tddp_comm_hook_ops *ops, void *state,
                                                        tddp_comm_hook **out);
/** One more reference: tddp_comm_hook_release(). */
TDDP_API tddp_comm_hook *tddp_comm_hook_retain(tddp_comm_hook *hook);
/** One reference less. NULL is fine. */
TDDP_API void tddp_comm_hook_release(tddp_comm_hook *hook);
/** Its name. Borrowed from the hook. */
TDDP_API const char *tddp_comm_hook_name(const tddp_comm_hook *hook);
/** "" if there are none. Borrowed from the hook. */
TDDP_API const char *tddp_comm_hook_settings(const tddp_comm_hook *hook);
/** Whether it runs only on the thread that runs backward. */
TDDP_API int tddp_comm_hook_on_caller(const tddp_comm_hook *hook);
/** Whether the hook supports buckets on devices of that type. */
TDDP_API int tddp_comm_hook_takes(const tddp_comm_hook *hook, tddp_device_type type);

/** Calls the hook's `run`: for reducers, and for hooks that wrap another. The hook must live until
 *  its works complete: a caller that releases both before uses tddp_work_on_done(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_comm_hook_run(tddp_comm_hook *hook, tddp_group *group,
                                                       const tddp_bucket *bucket, int stage,
                                                       tddp_work **work, int *again);

#ifdef __cplusplus
}
#endif

#endif
