/**
 * @file torch_nn.h
 * @brief Synchronized batch normalization, divided cross entropy; norms and unscaling of gradients
 * over all ranks (libtddp_torch).
 */
#ifndef TDDP_TORCH_NN_H
#define TDDP_TORCH_NN_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- batch normalization over all ranks ------------------------------------------------------ */

/** A batch norm. Begin with TDDP_SYNC_BATCH_NORM_OPTS_INIT. */
typedef struct tddp_sync_batch_norm_opts {
    size_t size; /**< sizeof(tddp_sync_batch_norm_opts) */
    /** [C] each, or NULL: no affine part; no running statistics. Borrowed for the call. */
    const tddp_tensor *weight;
    const tddp_tensor *bias;
    const tddp_tensor *running_mean;
    const tddp_tensor *running_var;
    double momentum; /**< the weight of this batch in the running statistics */
    double eps;
    tddp_blocking_region blocking_region;          /**< for waits in this call; NULL: none */
    tddp_blocking_region backward_blocking_region; /**< for waits in backward; NULL: none */
} tddp_sync_batch_norm_opts;

/** The defaults: PyTorch's, without parameters and statistics. */
#define TDDP_SYNC_BATCH_NORM_OPTS_INIT                                                   \
    {                                                                                    \
        sizeof(tddp_sync_batch_norm_opts), NULL, NULL, NULL, NULL, 0.1, 1e-5, NULL, NULL \
    }

/**
 * Normalizes `input` ([N, C] or [N, C, ...], float32 or float64) with the mean and the variance of
 * each channel over the batches of all ranks, which may differ in size (also 0 on some), and
 * updates the running statistics. A collective call, and so is the backward of its result: it sums
 * over the ranks what the input's gradient needs, while the gradients of weight and bias are
 * local. The result retains the group. Assigns `output`, a new handle of the caller's.
 * Errors: TDDP_INVALID_ARGUMENT (shape or dtype; fewer than two values per channel over all ranks),
 * TDDP_CANCELED (`blocking_region` was interrupted), those of tddp_all_gather(); backward throws an
 * exception with the text of those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sync_batch_norm(tddp_group *group,
                                                         const tddp_tensor *input,
                                                         const tddp_sync_batch_norm_opts *opts,
                                                         tddp_tensor *output);

/* --- cross entropy over classes that the ranks divide -------------------------------------------
 */

/**
 * Gives `losses` ([rows], without a history), the cross entropies of logits whose classes the ranks
 * divide, the graph that computes the gradient of `logits` ([rows, classes of this rank], which
 * require one): of `shares`, the logits' exponentials divided by the sum of all ranks' ones, less
 * `ones` ([rows]; 1 where this rank has the row's target, else 0) at `places` ([rows], int64).
 * Backward of it sends nothing. With create_graph gradients have gradients, and all ranks make that
 * backward, a collective call. The graph retains the group. Errors: TDDP_INVALID_ARGUMENT; backward
 * throws an exception with the text of those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status
tddp_cross_entropy_graph(tddp_group *group, const tddp_tensor *logits, const tddp_tensor *shares,
                         const tddp_tensor *places, const tddp_tensor *ones,
                         tddp_blocking_region backward_region, tddp_tensor *losses);

/* --- the norm of gradients ------------------------------------------------------------------- */

/**
 * The norm of all these tensors, as if they were one vector: of order `norm_type` > 0, or INFINITY
 * for the largest absolute value. With a `group` (else NULL) also over its ranks, for sharded
 * tensors: then a collective call, also for a rank without tensors. Sums are in float64, in an
 * order that doesn't depend on the number of threads. Errors: TDDP_INVALID_ARGUMENT, those of
 * tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_total_norm(const tddp_tensor *const *tensors, size_t count,
                                                    double norm_type, tddp_group *group,
                                                    const tddp_wait *wait, double *out);

/**
 * The norm of the parameters' gradients, which are scaled in place by max_norm / (norm + 1e-6) if
 * it exceeds `max_norm`. Skips parameters without a gradient. With `error_if_nonfinite` a norm that
 * is infinite or NaN is TDDP_INVALID_ARGUMENT, and nothing is scaled. `*out` is the norm before the
 * scaling.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_clip_grad_norm(const tddp_tensor *const *params,
                                                        size_t count, double max_norm,
                                                        double norm_type, int error_if_nonfinite,
                                                        tddp_group *group, const tddp_wait *wait,
                                                        double *out);

/** Scales gradients in place as tddp_clip_grad_norm() does, with a given norm. */
TDDP_API TDDP_NODISCARD tddp_status tddp_scale_gradients(const tddp_tensor *const *params,
                                                         size_t count, double max_norm,
                                                         double norm);

/** Clamps each element of the gradients to [-clip_value, clip_value], in place. */
TDDP_API TDDP_NODISCARD tddp_status tddp_clip_grad_value(const tddp_tensor *const *params,
                                                         size_t count, double clip_value);

/* --- the scale of a loss --------------------------------------------------------------------- */

/** What tddp_unscale_gradients() found. */
typedef enum tddp_gradients {
    TDDP_GRADIENTS_NONE,     /**< no rank has a gradient */
    TDDP_GRADIENTS_FINITE,   /**< all gradients of all ranks were finite */
    TDDP_GRADIENTS_NONFINITE /**< a gradient of a rank had an element that was infinite or NaN */
} tddp_gradients;

/**
 * Multiplies the parameters' gradients in place by `factor`, and finds out whether all elements
 * were finite before: dense gradients on the CPU are read and written once. With a `group` (else
 * NULL) its ranks agree on that: a collective call, also for a rank without gradients. Skips
 * parameters without a gradient. Errors: TDDP_UNSUPPORTED (a gradient in float16, in which finite
 * values would be lost: nothing is changed), those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_unscale_gradients(const tddp_tensor *const *params,
                                                           size_t count, double factor,
                                                           tddp_group *group, const tddp_wait *wait,
                                                           tddp_gradients *out);

#ifdef __cplusplus
}
#endif

#endif
