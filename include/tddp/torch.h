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

/* --- distributed data parallel --------------------------------------------------------------- */

typedef struct tddp_ddp tddp_ddp;

/**
 * Waits for a condition that another thread brings about: `body(data)` blocks and returns a status;
 * it can be ended early through `cancel`. A host language replaces this to let its own threads run
 * meanwhile.
 */
typedef tddp_status (*tddp_wait_through)(tddp_status (*body)(void *data, tddp_cancel *cancel),
                                         void *data);

typedef struct tddp_ddp_opts {
    size_t size; /**< sizeof(tddp_ddp_opts) */
    tddp_reducer_opts reducer;
    int init_sync;             /**< broadcast from rank 0 at construction; compared is always */
    tddp_wait_through through; /**< how to wait at the end of backward; NULL: plainly */
} tddp_ddp_opts;

#define TDDP_DDP_OPTS_INIT                                     \
    {                                                          \
        sizeof(tddp_ddp_opts), TDDP_REDUCER_OPTS_INIT, 1, NULL \
    }

/**
 * Ties parameters to a process group: compares them over the ranks, broadcasts parameters and
 * buffers from rank 0 (init_sync), makes the buckets and hooks each parameter's gradient.
 * `params` are leaves that require grad, in the order of the model; `buffers` are broadcast only.
 * Keeps references to all. Caller: tddp_ddp_free(). Errors: those of tddp_reducer_create() and
 * tddp_broadcast(); TDDP_INVALID_ARGUMENT (no parameters; not a leaf; does not require grad: the
 * text names it).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_create(tddp_group *group, tddp_tensor *const *params,
                                                    const char *const *names, size_t param_count,
                                                    tddp_tensor *const *buffers,
                                                    size_t buffer_count, const tddp_ddp_opts *opts,
                                                    const tddp_wait *wait, tddp_ddp **out);

/** Removes the hooks and frees. Gradients stay valid. NULL is fine. */
TDDP_API void tddp_ddp_free(tddp_ddp *ddp);

/**
 * Before each forward whose gradients shall be averaged: rebuilds the buckets when it is time and
 * arms the hooks. With `sync` 0 (no_sync) gradients are only accumulated locally until a forward
 * with `sync` 1; so they are by a backward that no forward prepared, or once all of its gradients
 * were averaged. Errors: those of tddp_reducer_prepare() and tddp_reducer_rebuild().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_prepare(tddp_ddp *ddp, int sync,
                                                     const tddp_wait *wait);

/**
 * Whether the next tddp_ddp_prepare() may wait for other ranks: until the buckets are rebuilt, and
 * after a backward that was interrupted. If not, it takes microseconds.
 */
TDDP_API int tddp_ddp_prepare_waits(const tddp_ddp *ddp);

/** Broadcasts the buffers from rank `root` of the group, coalesced. Autograd sees nothing of it: no
 *  history, no new version. Errors: those of tddp_broadcast(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_ddp_sync_buffers(tddp_ddp *ddp, int root,
                                                          const tddp_wait *wait);

/** The reducer, borrowed: bucket sizes and the like. */
TDDP_API const tddp_reducer *tddp_ddp_reducer(const tddp_ddp *ddp);

#ifdef __cplusplus
}
#endif

#endif
