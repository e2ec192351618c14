/**
 * @file torch_optim.h
 * @brief Fused optimizer steps: all parameters of all groups in one call (libtddp_torch).
 *
 * Each parameter, its gradient and its state are read and written once, where the unfused form
 * makes a pass over memory for each term of the formula. Whatever cannot be taken that way (other
 * devices, complex numbers, memory in another order than the parameter's, sparse gradients, state
 * of another dtype) goes through libtorch's own operations with the same formula. float16 and
 * bfloat16 are computed in float32. Parameters get a new version, so autograd notices the change;
 * gradients stay as they are.
 *
 * Any thread, but one at a time for the same parameters. Large ones are shared out over libtorch's
 * threads. Arguments are checked before anything is changed.
 */
#ifndef TDDP_TORCH_OPTIM_H
#define TDDP_TORCH_OPTIM_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** How many tensors of state a parameter has at most. */
#define TDDP_OPTIM_STATES 3

/** One parameter of a step. One without a gradient is passed over. The same parameter may come
 * again: it is stepped again. */
typedef struct tddp_optim_slot {
    const tddp_tensor *param;
    /** SGD with momentum: its buffer. Adam: the averages of the gradient and of its square, and
     * with amsgrad the largest of the latter so far. NULL: not used. In the parameter's shape. */
    const tddp_tensor *state[TDDP_OPTIM_STATES];
    int64_t step; /**< Adam: the number of this step, the first is 1. SGD with momentum: 1 has the
                       buffer filled, whatever it holds; later ones continue it */
    size_t group; /**< index into the settings */
} tddp_optim_slot;

typedef struct tddp_sgd_settings {
    double lr;
    double momentum; /**< 0: no buffer */
    double dampening;
    double weight_decay;
    int nesterov;
} tddp_sgd_settings;

typedef struct tddp_adam_settings {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int amsgrad;
    int decoupled; /**< AdamW: the parameter decays by itself, not through the gradient */
} tddp_adam_settings;

/**
 * A step of SGD on each slot that has a gradient.
 * Errors: TDDP_INVALID_ARGUMENT (state that is missing or of another shape: the text says of which
 * slot), TDDP_UNSUPPORTED (weight_decay with a sparse gradient), TDDP_INTERNAL (libtorch's text).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sgd_step(const tddp_sgd_settings *settings,
                                                  size_t group_count, const tddp_optim_slot *slots,
                                                  size_t count);

/** The same of Adam or AdamW. A sparse gradient is TDDP_UNSUPPORTED. */
TDDP_API TDDP_NODISCARD tddp_status tddp_adam_step(const tddp_adam_settings *settings,
                                                   size_t group_count, const tddp_optim_slot *slots,
                                                   size_t count);

/** Whether a parameter has a gradient, and whether that is sparse. Never fails. */
TDDP_API int tddp_has_gradient(const tddp_tensor *param);
TDDP_API int tddp_has_sparse_gradient(const tddp_tensor *param);

/**
 * Forgets the gradients of these parameters, so that the next backward stores its own in place of
 * adding to them; with `set_to_none` 0 they are kept, detached from their history, and filled with
 * zeros.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_zero_gradients(const tddp_tensor *const *params,
                                                        size_t count, int set_to_none);

#ifdef __cplusplus
}
#endif

#endif
