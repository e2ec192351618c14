/**
 * @file torch_optim.h
 * @brief Fused optimizer steps: all parameters of all groups in one call (libtddp_torch).
 *
 * Each parameter, its gradient and its state are read and written once, while unfused optimizers
 * make a pass over memory for each term of the formula. Parameters that the kernels don't support
 * (other devices, complex numbers, a gradient or state with another memory layout, sparse
 * gradients, state of another dtype) are stepped by libtorch's operations with the same formula.
 * float16 and bfloat16 are computed in float32. A step increments parameters' versions, so autograd
 * detects the change; gradients are unchanged.
 *
 * Any thread, but one at a time for the same parameters. Large parameters are distributed over
 * libtorch's threads. Arguments are checked before anything is changed.
 */
#ifndef TDDP_TORCH_OPTIM_H
#define TDDP_TORCH_OPTIM_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The maximum number of state tensors of a parameter. */
#define TDDP_OPTIM_STATES 3

/** One parameter of a step. A parameter without a gradient is skipped. A parameter that occurs
 * several times is stepped several times. */
typedef struct tddp_optim_slot {
    const tddp_tensor *param;
    /** SGD with momentum: the momentum buffer. Adam: the averages of the gradient and of its
     * square, and with amsgrad the maximum of the latter. NULL: not used. In the parameter's shape.
     */
    const tddp_tensor *state[TDDP_OPTIM_STATES];
    int64_t step; /**< Adam: the number of this step, from 1. SGD with momentum: 1 initializes the
                       buffer; later steps update it */
    size_t group; /**< index into the settings */
} tddp_optim_slot;

/** The settings of a group of parameters. */
typedef struct tddp_sgd_settings {
    double lr;
    double momentum; /**< 0: no buffer */
    double dampening;
    double weight_decay;
    int nesterov;
} tddp_sgd_settings;

/** The settings of a group of parameters. */
typedef struct tddp_adam_settings {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int amsgrad;
    int decoupled; /**< AdamW: weight decay applies to the parameter, not to the gradient */
} tddp_adam_settings;

/**
 * A step of SGD on each slot with a gradient.
 * Errors: TDDP_INVALID_ARGUMENT (state that is missing or of another shape: the text names the
 * slot), TDDP_UNSUPPORTED (weight_decay with a sparse gradient), TDDP_INTERNAL (libtorch's text).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sgd_step(const tddp_sgd_settings *settings,
                                                  size_t group_count, const tddp_optim_slot *slots,
                                                  size_t count);

/** The same for Adam or AdamW. A sparse gradient is TDDP_UNSUPPORTED. */
TDDP_API TDDP_NODISCARD tddp_status tddp_adam_step(const tddp_adam_settings *settings,
                                                   size_t group_count, const tddp_optim_slot *slots,
                                                   size_t count);

/** Whether a parameter has a gradient. Never fails. */
TDDP_API int tddp_has_gradient(const tddp_tensor *param);
/** Whether it has one that is sparse. Never fails. */
TDDP_API int tddp_has_sparse_gradient(const tddp_tensor *param);

/**
 * Resets the gradients of these parameters to undefined tensors; with `set_to_none` 0 detaches and
 * zeroes them instead.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_zero_gradients(const tddp_tensor *const *params,
                                                        size_t count, int set_to_none);

#ifdef __cplusplus
}
#endif

#endif
