/**
 * @file comm_hook.h
 * @brief What is done with a bucket of gradients in place of averaging it as it is.
 *
 * A hook is called with a bucket once all its gradients are in place, starts an operation, and is
 * called again when that is done, stage after stage, until the bucket holds what every rank shall
 * have as its gradients: the average, if the hook does not mean otherwise. All ranks have the same
 * hook, so they start the same operations in the same order.
 */
#ifndef TDDP_COMM_HOOK_H
#define TDDP_COMM_HOOK_H

#include <tddp/flat.h>
#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A bucket as its hook sees it. Borrowed for the call, except `buffer.data`, which stays where it
 * is until the bucket is done. */
typedef struct tddp_bucket {
    size_t index;    /**< buckets of a round are handed over in this order, from 0 */
    size_t count;    /**< how many buckets there are */
    uint64_t round;  /**< backward passes before this one whose gradients were handed over */
    uint64_t layout; /**< differs whenever buckets were planned anew; state kept by bucket ends */
    tddp_buffer buffer; /**< all gradients with the padding between them, which is zero; real
                         * numbers (complex gradients are twice as many) */
    size_t gradient_count;
    const tddp_flat_slice *gradients;     /**< in the order in which they lie */
    const tddp_device_memory_ops *device; /**< for memory where the buffer lies; NULL: on the CPU */
    /** What the ranks are to compare of the bucket, for the first operation that the hook starts at
     * this stage (tddp_op_args.description); NULL: nothing. */
    const char *description;
} tddp_bucket;

typedef struct tddp_comm_hook_ops {
    size_t size;      /**< sizeof(tddp_comm_hook_ops) */
    const char *name; /**< for messages and logging data; static */

    /**
     * Whether `run` may be called only on the thread that runs backward, as code of a host language
     * must be. Else it is called for stage 0 by whatever thread completes the bucket, with the
     * reducer's lock held, and later by the one that waits for the round.
     */
    int on_caller;

    /**
     * Stage 0: the bucket's gradients are in place. Stage n + 1: the work that stage n gave is done
     * and went well. Sets `*work` to an operation started on the bucket's buffer or on memory of
     * the hook's own (whose release is the hook's; it lives until the work is done), or leaves it
     * NULL; sets `*again` to 1 to be called with the next stage, else the bucket is done when the
     * work is. Stages of several buckets alternate: stage n + 1 of a bucket comes after stage n of
     * all, in the order of the buckets. Only a hook with `on_caller` waits at stage 0. It may also
     * return TDDP_CANCELED where the host interrupts it: the next tddp_reducer_finish() calls it
     * with that stage again, and no later bucket is handed over before.
     */
    tddp_status (*run)(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                       tddp_work **work, int *again);

    /** Frees the state, once nobody has the hook and all works it started are done. */
    void (*free)(void *state);

    /** What else makes two hooks of that name differ, as text: the ranks compare it with the name
     *  in the first round. Copied; NULL: nothing. */
    const char *settings;

    /** Bit (1 << tddp_device_type) for each kind of memory that its buckets may lie in; 0: the
     *  CPU's alone. On a device a stage's work is done to those who come on the buffer's stream,
     *  the current one, and not to the host; `on_caller` is not for devices. */
    uint32_t device_types;
} tddp_comm_hook_ops;

typedef struct tddp_comm_hook tddp_comm_hook;

/** Makes a hook of one's own; `ops` is copied, its settings too. Takes over `state` if it returns
 * TDDP_OK. Caller: tddp_comm_hook_release(). Errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY. */
TDDP_API TDDP_NODISCARD tddp_status tddp_comm_hook_make(const tddp_comm_hook_ops *ops, void *state,
                                                        tddp_comm_hook **out);
TDDP_API tddp_comm_hook *tddp_comm_hook_retain(tddp_comm_hook *hook);
TDDP_API void tddp_comm_hook_release(tddp_comm_hook *hook);
TDDP_API const char *tddp_comm_hook_name(const tddp_comm_hook *hook);
/** "" if there are none. Borrowed from the hook. */
TDDP_API const char *tddp_comm_hook_settings(const tddp_comm_hook *hook);
TDDP_API int tddp_comm_hook_on_caller(const tddp_comm_hook *hook);
/** Whether it takes buckets in that memory. */
TDDP_API int tddp_comm_hook_takes(const tddp_comm_hook *hook, tddp_device_type type);

/** Calls the hook's `run`: for reducers, and for hooks around another. A work that is under way
 *  keeps the hook: whoever lets go of both early uses tddp_work_on_done(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_comm_hook_run(tddp_comm_hook *hook, tddp_group *group,
                                                       const tddp_bucket *bucket, int stage,
                                                       tddp_work **work, int *again);

#ifdef __cplusplus
}
#endif

#endif
