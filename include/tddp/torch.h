/**
 * @file torch.h
 * @brief libtorch's tensors and autograd, in plain C signatures (libtddp_torch).
 *
 * A tddp_tensor is libtorch's `at::Tensor`: a C++ caller casts an `at::Tensor *`. It is borrowed
 * for the call; functions that keep a tensor take their own reference. Functions convert C++
 * exceptions to a status and its text.
 */
#ifndef TDDP_TORCH_H
#define TDDP_TORCH_H

#include <tddp/reducer.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A tensor of libtorch, an `at::Tensor`. */
typedef struct tddp_tensor tddp_tensor;

/** The libtorch version that this library was built with, "1.13.1". Static. */
TDDP_API const char *tddp_torch_version(void);

/** The calling thread's current stream of a device, as a cudaStream_t, for tddp_work_order(). NULL
 * is CUDA's default stream; always NULL for the CPU, and in a build against a libtorch without
 * CUDA. Errors: those of libtorch (no such device). */
TDDP_API TDDP_NODISCARD tddp_status tddp_torch_stream(tddp_device_type type, int32_t index,
                                                      void **out);

/** From now on a device of CUDA that is named without an index means this one, in the calling
 * thread. Errors: those of libtorch (no such GPU, no CUDA). */
TDDP_API TDDP_NODISCARD tddp_status tddp_torch_set_device(int32_t index);

/**
 * The memory of a dense, contiguous tensor, for a collective.
 * Errors: TDDP_INVALID_ARGUMENT (undefined; not contiguous: the text says what to do),
 * TDDP_UNSUPPORTED (sparse, quantized, a dtype or device that collectives don't support).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_buffer(const tddp_tensor *tensor, tddp_buffer *out);

/** To be called once for each operation that writes into a tensor's memory, after it has begun:
 * from then on autograd refuses a backward that needs what the tensor was before. Errors: those of
 * libtorch. */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_written(const tddp_tensor *tensor);

/** A new reference to the same tensor, so that its memory outlives the caller's handle while an
 * operation runs. Caller: tddp_tensor_release(). NULL: out of memory. */
TDDP_API tddp_tensor *tddp_tensor_retain(const tddp_tensor *tensor);
/** Drops a reference that tddp_tensor_retain() made. NULL is fine. */
TDDP_API void tddp_tensor_release(tddp_tensor *tensor);

/** Makes the handle `into`, of a new tensor of the caller's, refer to the same tensor as `from`.
 *  Errors: TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_assign(tddp_tensor *into, const tddp_tensor *from);

/** Copies the elements of `from`, of any layout and dtype, to `into`, without autograd. Errors:
 *  TDDP_INVALID_ARGUMENT (a different number of elements). */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_copy(tddp_tensor *into, const tddp_tensor *from);

/**
 * Makes a zeroed tensor in the group's memory, on which operations work in place:
 * tddp_group_memory_create(). It keeps the memory alive, also after the group's destruction.
 * Assigns the existing handle `into`. Errors: TDDP_INVALID_ARGUMENT (no group; a negative size, an
 * invalid dtype, too many bytes), TDDP_OUT_OF_MEMORY, TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_tensor_empty_shared(tddp_group *group, const int64_t *dims,
                                                             size_t ndim, tddp_dtype dtype,
                                                             tddp_tensor *into);

/* --- distributed data parallel --------------------------------------------------------------- */

/** The data parallel parameters of one model. */
typedef struct tddp_ddp tddp_ddp;

/**
 * A host language's blocking region, in which its other threads can run: calls `body(data, wait)`
 * without the host's lock, on this thread or another, and returns its status. An interrupt ends the
 * body through `wait->cancel`; after TDDP_CANCELED, or TDDP_TIMEOUT of a `wait` with a timeout, it
 * may call the body again. Neither function may be left by an exception or longjmp.
 */
typedef tddp_status (*tddp_blocking_region)(tddp_status (*body)(void *data, const tddp_wait *wait),
                                            void *data);

#define TDDP_DDP_SPARSE 1u  /**< the gradient is a sparse tensor */
#define TDDP_DDP_DELAYED 2u /**< it is marked ready together with that of `delayed_by` */

/** A parameter of tddp_ddp_create(). */
typedef struct tddp_ddp_param {
    const tddp_tensor *tensor;
    const char *name; /**< for messages; copied. NULL: its number */
    unsigned flags;
} tddp_ddp_param;

/** Options of tddp_ddp_create(). Begin with TDDP_DDP_OPTS_INIT. */
typedef struct tddp_ddp_opts {
    size_t size; /**< sizeof(tddp_ddp_opts) */
    tddp_reducer_opts reducer;
    int init_sync;        /**< broadcast from rank 0 at construction; shapes are always compared */
    int gradients_apart;  /**< gradients are separate tensors, copied into the buckets and out; else
                           * they are views of the buckets */
    ptrdiff_t delayed_by; /**< the parameter that those with TDDP_DDP_DELAYED wait for; -1: none */
    const tddp_tensor *const *watched; /**< further tensors whose requires_grad is watched */
    size_t watched_count;
    tddp_blocking_region blocking_region; /**< for waits within backward; NULL: none */
    int (*host_here)(void); /**< whether this thread may run the host's code now, for hooks with
                             * `on_caller`; NULL: every thread may */
} tddp_ddp_opts;

/** The defaults: rank 0's values everywhere, gradients in the buckets. */
#define TDDP_DDP_OPTS_INIT                                                           \
    {                                                                                \
        sizeof(tddp_ddp_opts), TDDP_REDUCER_OPTS_INIT, 1, 0, -1, NULL, 0, NULL, NULL \
    }

/**
 * Makes parameters data parallel over a process group: compares them over the ranks, broadcasts
 * parameters and buffers from rank 0 (init_sync), makes the buckets and hooks each parameter's
 * gradient. `params` are leaves that require grad, in the order of the model; `buffers` are
 * broadcast only. Retains all of them. Parameters may be on the CPU and on several CUDA devices: a
 * bucket is on its parameters' device, in libtorch's memory unless opts->reducer.device allocates
 * it. At the end of backward the streams of the thread that called it wait for the buckets on
 * devices, not the host. Caller: tddp_ddp_free(). Errors: those of tddp_reducer_create() and
 * tddp_broadcast(); TDDP_INVALID_ARGUMENT (not a leaf; does not require grad: the text names it;
 * delayed_by out of range). Without parameters, as while all are frozen, there is nothing to
 * average: iterations do nothing, buffers are broadcast.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_create(tddp_group *group, const tddp_ddp_param *params,
                                                    size_t param_count, tddp_tensor *const *buffers,
                                                    size_t buffer_count, const tddp_ddp_opts *opts,
                                                    const tddp_wait *wait, tddp_ddp **out);

/** Removes the hooks and frees `ddp`. Gradients stay valid. NULL is allowed. */
TDDP_API void tddp_ddp_free(tddp_ddp *ddp);

/** Whether a parameter or watched tensor has changed since construction: its requires_grad, dtype
 *  or device. The owner must then make a new tddp_ddp. */
TDDP_API int tddp_ddp_stale(const tddp_ddp *ddp);

/**
 * Before forward: suspends the hooks until tddp_ddp_arm(). Gradients of a backward inside forward
 * are only accumulated locally. tddp_ddp_prepare() does this too; this function is for a forward
 * that is not prepared, such as one without grad.
 */
TDDP_API void tddp_ddp_suspend(tddp_ddp *ddp);

/**
 * Before each forward: suspends the hooks, rebuilds the buckets after the first iteration, and
 * prepares an iteration. With `sync` 0 (no_sync) it prepares none: gradients are only accumulated
 * locally, unless the iteration of an earlier forward is still open. Errors: those of
 * tddp_reducer_prepare() and tddp_reducer_rebuild().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_prepare(tddp_ddp *ddp, int sync,
                                                     const tddp_wait *wait);

/**
 * After each forward, also one that failed (`completed` 0: its iteration is not opened). While an
 * iteration is open backward averages gradients, whichever forward they belong to, and its last
 * gradient ends the iteration. Later gradients are accumulated locally, with one warning per model
 * unless a forward with `sync` 0 preceded them.
 *
 * Backward fails with an error that names the parameter if its gradient requires a gradient
 * (create_graph), is marked ready twice, or is sparse or dense against its flag.
 */
TDDP_API void tddp_ddp_arm(tddp_ddp *ddp, int completed);

/** Whether a forward with `sync` 1 completed and its gradients are not all averaged yet. */
TDDP_API int tddp_ddp_round_open(const tddp_ddp *ddp);

/**
 * Finishes an iteration whose backward was interrupted while it waited; else does nothing. If
 * tddp_ddp_hook_here(), this runs the host's code, so call it on a thread of the host's before
 * tddp_ddp_prepare(), which otherwise does the same. `sync` as there: with 0 a failed iteration is
 * ignored. Errors: those of tddp_reducer_finish().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_finish_due(tddp_ddp *ddp, int sync,
                                                        const tddp_wait *wait);

/**
 * Whether the next tddp_ddp_prepare() may wait for other ranks: until the buckets are rebuilt, and
 * after a backward that was interrupted. If not, it takes microseconds.
 */
TDDP_API int tddp_ddp_prepare_waits(const tddp_ddp *ddp);

/** Whether the prepared forward's outputs must be passed to tddp_ddp_outputs(): always with
 *  find_unused; in the first iteration with static_graph. */
TDDP_API int tddp_ddp_wants_outputs(const tddp_ddp *ddp);

/**
 * After forward: replaces each output that requires grad by a tensor with the same memory (a view:
 * with a copy), whose backward runs first. It finds the parameters that the loss depends on, and
 * queues the callback at the end of backward, also if this rank uses no parameter, or some only
 * within a checkpointed segment. The handles are new ones of the caller's. Does nothing unless
 * tddp_ddp_wants_outputs(), or if grad is off. Errors: TDDP_INTERNAL, TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_outputs(tddp_ddp *ddp, tddp_tensor *const *outputs,
                                                     size_t count);

/** Sets the communication hook: tddp_reducer_set_hook(). Sparse gradients are always averaged.
 * With parameters on devices backward ends on a thread of autograd's: a hook with `on_caller` then
 * runs in tddp_ddp_finish_backward(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_set_hook(tddp_ddp *ddp, tddp_comm_hook *hook);

/** Whether the hook has `on_caller`: the end of backward and tddp_ddp_shadow() then run the host's
 *  code on the calling thread. */
TDDP_API int tddp_ddp_hook_here(const tddp_ddp *ddp);

/** Whether a parameter is on a device. */
TDDP_API int tddp_ddp_on_devices(const tddp_ddp *ddp);

/**
 * After backward, on the thread that called it: with a hook that has `on_caller`, and parameters on
 * devices, runs the hook for all buckets and finishes the iteration. Does nothing for other models,
 * and if their backward did not run. The next tddp_ddp_prepare() fails if this was left out.
 * Errors: those of tddp_reducer_finish().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_finish_backward(tddp_ddp *ddp);

/** For uneven inputs: tddp_reducer_set_divisor(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_set_divisor(tddp_ddp *ddp, int ranks);
/** After prepare, the iteration of a joined rank: tddp_reducer_shadow(), and the same for sparse
 *  gradients. */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_shadow(tddp_ddp *ddp, const tddp_wait *wait);

/**
 * For hooks with `on_caller`, while one is called with `bucket`: the bucket's memory as a flat
 * tensor that keeps the memory alive (a complex gradient has two real numbers for each element).
 * Assigns the existing handle `into`. Errors:
 * TDDP_INVALID_ARGUMENT (this thread is not calling a hook; out of range).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_bucket_tensor(const tddp_bucket *bucket,
                                                           tddp_tensor *into);
/** The same for the bucket's gradient `i`, in the parameter's shape. */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_gradient_tensor(const tddp_bucket *bucket, size_t i,
                                                             tddp_tensor *into);

/**
 * Broadcasts the buffers from rank `root` of the group, coalesced. Invisible to autograd: no
 * history, no new version. If `wait` ended before the operations did (TDDP_TIMEOUT, TDDP_CANCELED),
 * the next call with the same root continues. Errors: those of tddp_broadcast().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_sync_buffers(tddp_ddp *ddp, int root,
                                                          const tddp_wait *wait);

/** The reducer, borrowed, for its getters. */
TDDP_API const tddp_reducer *tddp_ddp_reducer(const tddp_ddp *ddp);

#ifdef __cplusplus
}
#endif

#endif
