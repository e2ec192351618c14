/**
 * @file torch.h
 * @brief libtorch's tensors and autograd, in plain C signatures (libtddp_torch).
 *
 * A tddp_tensor is libtorch's own `at::Tensor`, seen from C: whoever has an `at::Tensor *` casts
 * it. It is borrowed for the call; what must last takes its own reference inside. No C++ exception
 * leaves these functions: it becomes a status and its text.
 */
#ifndef TDDP_TORCH_H
#define TDDP_TORCH_H

#include <tddp/reducer.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tddp_tensor tddp_tensor;

/** libtorch's version this library was built with, "1.13.1". Static. */
TDDP_API const char *tddp_torch_version(void);

/** The stream on which the calling thread puts work for a device, as a cudaStream_t: for
 * tddp_work_order(). NULL is CUDA's default stream; it is NULL for the CPU, and in a build against
 * a libtorch without CUDA. Errors: those of libtorch (no such device). */
TDDP_API TDDP_NODISCARD tddp_status tddp_torch_stream(tddp_device_type type, int32_t index,
                                                      void **out);

/**
 * The memory of a dense, contiguous tensor, for a collective.
 * Errors: TDDP_INVALID_ARGUMENT (undefined; not contiguous: the text tells the cure),
 * TDDP_UNSUPPORTED (sparse, quantized, a dtype or device that collectives do not know).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_buffer(const tddp_tensor *tensor, tddp_buffer *out);

/** A new reference to the same tensor, so that its memory outlives the caller's handle while an
 * operation runs; ended with tddp_tensor_release(). NULL if memory is short. */
TDDP_API tddp_tensor *tddp_tensor_retain(const tddp_tensor *tensor);
TDDP_API void tddp_tensor_release(tddp_tensor *tensor);

/** The handle `into` (of a fresh tensor of the host's) becomes another handle of `from`. Errors:
 *  TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_assign(tddp_tensor *into, const tddp_tensor *from);

/** Copies the elements of `from`, of any layout and dtype, to those of `into`, which has as many;
 *  autograd sees nothing of it. Errors: TDDP_INVALID_ARGUMENT (another number of elements). */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_copy(tddp_tensor *into, const tddp_tensor *from);

/**
 * A tensor of these sizes in memory of the group's, which its operations work on where it lies:
 * tddp_group_memory_create(). Its elements are zero. It keeps the memory alive, also beyond the
 * group's end. `into` is an existing handle that is assigned. Errors: TDDP_INVALID_ARGUMENT (no
 * group; a negative size, no dtype, more bytes than there can be), TDDP_OUT_OF_MEMORY, TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_empty_shared(tddp_group *group, const int64_t *dims,
                                                             size_t ndim, tddp_dtype dtype,
                                                             tddp_tensor *into);

/* --- distributed data parallel --------------------------------------------------------------- */

typedef struct tddp_ddp tddp_ddp;

/**
 * How a host language runs a part that blocks, so that its own threads run meanwhile: calls
 * `body(data, wait)` without the host's lock, on this thread or another, and returns its status. An
 * interrupt ends the body through `wait->cancel`; after TDDP_CANCELED, or TDDP_TIMEOUT of a `wait`
 * with a time, it may be called again. No exception or jump leaves either function.
 */
typedef tddp_status (*tddp_blocking_region)(tddp_status (*body)(void *data, const tddp_wait *wait),
                                            void *data);

#define TDDP_DDP_SPARSE 1u  /**< the gradient is a sparse tensor */
#define TDDP_DDP_DELAYED 2u /**< it goes into its bucket together with that of `delayed_by` */

typedef struct tddp_ddp_param {
    const tddp_tensor *tensor;
    const char *name; /**< for messages; copied. NULL: its number */
    unsigned flags;
} tddp_ddp_param;

typedef struct tddp_ddp_opts {
    size_t size; /**< sizeof(tddp_ddp_opts) */
    tddp_reducer_opts reducer;
    int init_sync;        /**< broadcast from rank 0 at construction; compared is always */
    int gradients_apart;  /**< gradients are tensors of their own, copied into the buckets and out;
                           * else they live in the buckets */
    ptrdiff_t delayed_by; /**< the parameter that those with TDDP_DDP_DELAYED wait for; -1: none */
    const tddp_tensor *const *watched; /**< further tensors whose requires_grad is watched */
    size_t watched_count;
    tddp_blocking_region blocking_region; /**< for waits within backward; NULL: just called */
    int (*host_here)(void); /**< whether this thread may run the host's code now, for hooks with
                             * `on_caller`; NULL: any may */
} tddp_ddp_opts;

#define TDDP_DDP_OPTS_INIT                                                           \
    {                                                                                \
        sizeof(tddp_ddp_opts), TDDP_REDUCER_OPTS_INIT, 1, 0, -1, NULL, 0, NULL, NULL \
    }

/**
 * Ties parameters to a process group: compares them over the ranks, broadcasts parameters and
 * buffers from rank 0 (init_sync), makes the buckets and hooks each parameter's gradient.
 * `params` are leaves that require grad, in the order of the model; `buffers` are broadcast only.
 * Keeps references to all. Parameters may be on the CPU, on CUDA's devices, on several: buckets lie
 * with their parameters, and those on devices in memory of libtorch's unless opts->reducer.device
 * tells otherwise. At the end of backward the streams of the thread that called it wait for them,
 * and not the host. Caller: tddp_ddp_free(). Errors: those of tddp_reducer_create() and
 * tddp_broadcast(); TDDP_INVALID_ARGUMENT (no parameters; not a leaf; does not require grad: the
 * text names it; delayed_by out of range).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_create(tddp_group *group, const tddp_ddp_param *params,
                                                    size_t param_count, tddp_tensor *const *buffers,
                                                    size_t buffer_count, const tddp_ddp_opts *opts,
                                                    const tddp_wait *wait, tddp_ddp **out);

/** Removes the hooks and frees. Gradients stay valid. NULL is fine. */
TDDP_API void tddp_ddp_free(tddp_ddp *ddp);

/** Whether some parameter or watched tensor is not what it was at construction: it requires a
 *  gradient now, or no longer, or has another dtype or device. Its owner makes a new tddp_ddp. */
TDDP_API int tddp_ddp_stale(const tddp_ddp *ddp);

/**
 * Before forward: suspends the hooks until tddp_ddp_arm(). Gradients of a backward inside forward
 * are only accumulated locally. tddp_ddp_prepare() does this too; this call is for a forward that
 * is not prepared, as one without grad.
 */
TDDP_API void tddp_ddp_suspend(tddp_ddp *ddp);

/**
 * Before each forward whose gradients shall be averaged: suspends the hooks, rebuilds the buckets
 * when it is time and opens a round. With `sync` 0 (no_sync) it opens none: gradients are only
 * accumulated locally, unless the round of an earlier forward is still open. Errors: those of
 * tddp_reducer_prepare() and tddp_reducer_rebuild().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_prepare(tddp_ddp *ddp, int sync,
                                                     const tddp_wait *wait);

/**
 * After each forward, also one that failed (`completed` 0: its round is not opened). While a round
 * is open backward averages gradients, whichever forward they belong to, and its last gradient
 * closes the round. Later gradients are accumulated locally, which is logged once a model as a
 * warning unless a forward with `sync` 0 came before them.
 *
 * Backward then ends in an error that names the parameter if its gradient requires a gradient
 * (create_graph), became ready twice, or is sparse or dense against its flag.
 */
TDDP_API void tddp_ddp_arm(tddp_ddp *ddp, int completed);

/** Whether a forward with `sync` 1 completed and its gradients are not all averaged yet. */
TDDP_API int tddp_ddp_round_open(const tddp_ddp *ddp);

/**
 * Finishes a round whose backward was interrupted while it waited; else does nothing. Where
 * tddp_ddp_hook_here() this runs the host's code, so call it on a thread of the host's before
 * tddp_ddp_prepare(), which otherwise does the same. `sync` as there: with 0 a round that has
 * failed is forgotten. Errors: those of tddp_reducer_finish().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_finish_due(tddp_ddp *ddp, int sync,
                                                        const tddp_wait *wait);

/**
 * Whether the next tddp_ddp_prepare() may wait for other ranks: until the buckets are rebuilt, and
 * after a backward that was interrupted. If not, it takes microseconds.
 */
TDDP_API int tddp_ddp_prepare_waits(const tddp_ddp *ddp);

/** Whether the prepared forward's outputs must pass tddp_ddp_outputs(): always with find_unused; in
 *  its first round with static_graph. */
TDDP_API int tddp_ddp_wants_outputs(const tddp_ddp *ddp);

/**
 * After forward: each of the outputs that requires grad becomes another tensor, with the same
 * memory (a view: with a copy), through which backward passes first. There it learns which
 * parameters the loss depends on, and that its end is to be waited for, though none may be used on
 * this rank or some only within a checkpointed segment. The handles are fresh ones of the caller's.
 * Nothing happens if it is not wanted, or grad is off. Errors: TDDP_INTERNAL, TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_outputs(tddp_ddp *ddp, tddp_tensor *const *outputs,
                                                     size_t count);

/** What is done with buckets in place of averaging them: tddp_reducer_set_hook(). Sparse gradients
 *  are averaged in any case. Hooks with `on_caller` are for parameters on the CPU alone, as
 * backward ends on threads of its own where some are on a device. */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_set_hook(tddp_ddp *ddp, tddp_comm_hook *hook);

/** Whether the hook has `on_caller`: the end of backward and tddp_ddp_shadow() then run the host's
 *  code on their own thread. */
TDDP_API int tddp_ddp_hook_here(const tddp_ddp *ddp);

/** For uneven inputs: tddp_reducer_set_divisor(), and a round of a rank without data, after
 *  prepare: tddp_reducer_shadow() and what belongs to sparse gradients. */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_set_divisor(tddp_ddp *ddp, int ranks);
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_shadow(tddp_ddp *ddp, const tddp_wait *wait);

/**
 * For hooks with `on_caller`, while one is called with `bucket`: its memory as a flat tensor that
 * keeps the memory alive (complex gradients: real numbers, twice as many), and gradient `i` of it
 * in its parameter's shape. `into` is an existing handle that is assigned. Errors:
 * TDDP_INVALID_ARGUMENT (no hook is being called by this thread; out of range).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_bucket_tensor(const tddp_bucket *bucket,
                                                           tddp_tensor *into);
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_gradient_tensor(const tddp_bucket *bucket, size_t i,
                                                             tddp_tensor *into);

/**
 * Broadcasts the buffers from rank `root` of the group, coalesced. Autograd sees nothing of it: no
 * history, no new version. If `wait` ended before the operations did (TDDP_TIMEOUT, TDDP_CANCELED),
 * the next call with the same root continues. Errors: those of tddp_broadcast().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_sync_buffers(tddp_ddp *ddp, int root,
                                                          const tddp_wait *wait);

/** The reducer, borrowed: bucket sizes and the like. */
TDDP_API const tddp_reducer *tddp_ddp_reducer(const tddp_ddp *ddp);

#ifdef __cplusplus
}
#endif

#endif
