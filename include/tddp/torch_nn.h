/**
 * @file torch_nn.h
 * @brief Parts of models and of training that look over all ranks: batch normalisation and the norm
 * of gradients (libtddp_torch).
 */
#ifndef TDDP_TORCH_NN_H
#define TDDP_TORCH_NN_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- batch normalisation over all ranks ------------------------------------------------------ */

typedef struct tddp_sync_batch_norm_opts {
    size_t size; /**< sizeof(tddp_sync_batch_norm_opts) */
    /** [C] each, or NULL: no affine part; no running statistics. Borrowed for the call. */
    const tddp_tensor *weight;
    const tddp_tensor *bias;
    const tddp_tensor *running_mean;
    const tddp_tensor *running_var;
    double momentum; /**< the share of this batch in the running statistics */
    double eps;
    tddp_blocking_region blocking_region;          /**< for waits in this call; NULL: just called */
    tddp_blocking_region backward_blocking_region; /**< the same within backward */
} tddp_sync_batch_norm_opts;

#define TDDP_SYNC_BATCH_NORM_OPTS_INIT                                                   \
    {                                                                                    \
        sizeof(tddp_sync_batch_norm_opts), NULL, NULL, NULL, NULL, 0.1, 1e-5, NULL, NULL \
    }

/**
 * Normalises `input` ([N, C] or [N, C, ...], float32 or float64) with the mean and the variance of
 * each channel over the batches of all ranks, which may differ in size (also 0 on some), and
 * updates the running statistics with them. A collective call, and so is the backward of its
 * result: there the sums that the gradient of the input needs are added up over the ranks, while
 * those of weight and bias stay this rank's own. The result keeps a reference to the group.
 * `output` is a fresh handle, which becomes one of the result.
 * Errors: TDDP_INVALID_ARGUMENT (shape or dtype; fewer than two values a channel on all ranks
 * together), TDDP_CANCELED (`blocking_region` was interrupted), those of tddp_all_gather();
 * backward ends with an exception that has the text of those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sync_batch_norm(tddp_group *group,
                                                         const tddp_tensor *input,
                                                         const tddp_sync_batch_norm_opts *opts,
                                                         tddp_tensor *output);

/* --- the norm of gradients ------------------------------------------------------------------- */

/**
 * The norm of all these tensors together, as if they were one vector: of order `norm_type` > 0, or
 * INFINITY for the largest absolute value. With a `group` also over all of its ranks, for tensors
 * that are parts of a whole (else NULL); a collective call, with no tensors as well. Sums are taken
 * in float64, in an order that does not depend on the number of threads.
 * Errors: TDDP_INVALID_ARGUMENT, those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_total_norm(const tddp_tensor *const *tensors, size_t count,
                                                    double norm_type, tddp_group *group,
                                                    const tddp_wait *wait, double *out);

/**
 * The same of the gradients of parameters, which are then scaled in place if their norm exceeds
 * `max_norm`: by max_norm / (norm + 1e-6). Parameters without a gradient are passed over. With
 * `error_if_nonfinite` a norm that is infinite or no number is TDDP_INVALID_ARGUMENT and nothing is
 * scaled. `*out` is the norm before.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_clip_grad_norm(const tddp_tensor *const *params,
                                                        size_t count, double max_norm,
                                                        double norm_type, int error_if_nonfinite,
                                                        tddp_group *group, const tddp_wait *wait,
                                                        double *out);

/** Scales gradients in place as tddp_clip_grad_norm() does, by a norm that is known. */
TDDP_API TDDP_NODISCARD tddp_status tddp_scale_gradients(const tddp_tensor *const *params,
                                                         size_t count, double max_norm,
                                                         double norm);

/** Brings each number of the gradients into -clip_value to clip_value, in place. */
TDDP_API TDDP_NODISCARD tddp_status tddp_clip_grad_value(const tddp_tensor *const *params,
                                                         size_t count, double clip_value);

#ifdef __cplusplus
}
#endif

#endif
