/**
 * @file torch_function.h
 * @brief Functions whose backward is the host language's (libtddp_torch).
 *
 * The host runs forward without grad, then calls tddp_function_apply(), which connects forward's
 * outputs to its inputs in autograd's graph. Lists have one element for each argument or result of
 * the host's function; NULL is one that is not a tensor.
 */
#ifndef TDDP_TORCH_FUNCTION_H
#define TDDP_TORCH_FUNCTION_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What backward gets and returns. Borrowed for the call. */
typedef struct tddp_function_backward {
    size_t size;               /**< sizeof(tddp_function_backward) */
    tddp_tensor *const *saved; /**< the saved tensors */
    size_t saved_count;
    tddp_tensor *const *grads; /**< the gradient of each output; NULL: none */
    size_t grad_count;
    tddp_tensor *const *result; /**< the gradient of each input, to be assigned
                                 *   (tddp_tensor_assign); those that are not have none */
    size_t result_count;
} tddp_function_backward;

/** The host's part of a function. */
typedef struct tddp_function_ops {
    size_t size; /**< sizeof(tddp_function_ops) */

    /** Computes gradients, with grad on if they shall have gradients (create_graph). On the thread
     *  that runs this part of backward: for tensors on the CPU the one that called backward. */
    tddp_status (*backward)(void *state, const tddp_function_backward *call);

    /** Frees the state when the graph is freed, or after a backward without retain_graph. Any
     *  thread. */
    void (*free)(void *state);
} tddp_function_ops;

/** What forward got and returned. Borrowed for the call. */
typedef struct tddp_function_forward {
    size_t size;                /**< sizeof(tddp_function_forward) */
    const char *name;           /**< for messages; copied */
    tddp_tensor *const *inputs; /**< forward's arguments */
    size_t input_count;
    tddp_tensor *const *outputs; /**< forward's results, in handles of the caller's, which are
                                  *   assigned tensors with a history */
    size_t output_count;
    const unsigned char *non_differentiable; /**< for each output whether it has no gradient; NULL:
                                              *   each may have one, if its dtype can */
    tddp_tensor *const *saved;               /**< for backward; inputs, outputs or others */
    size_t saved_count;
    int materialize_grads; /**< whether undefined gradients of outputs are zeros for backward */
} tddp_function_forward;

/**
 * Gives forward's outputs a history. Without grad, or if no input requires a gradient, outputs have
 * none, and the state is freed. Owns `state` if it returns TDDP_OK. A tensor in `saved` that is
 * changed in place before backward is an error there, and so are gradients of other shapes and
 * dtypes than their inputs. Errors: TDDP_INVALID_ARGUMENT, TDDP_UNSUPPORTED (an output that has a
 * gradient is not on the CPU), TDDP_OUT_OF_MEMORY, TDDP_INTERNAL.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_function_apply(const tddp_function_forward *forward,
                                                        const tddp_function_ops *ops, void *state);

#ifdef __cplusplus
}
#endif

#endif
