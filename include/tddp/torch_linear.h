/**
 * @file torch_linear.h
 * @brief Linear layers of which each rank has a part, and weights' gradients that are computed
 * later (libtddp_torch).
 *
 * input * weight^T + bias, in three forms. Column: the ranks divide the weight's rows, so that each
 * computes its part of the result's features. Row: they divide its columns, so that each has a
 * summand of the result, from its part of the input's features. Plain: nothing is divided. With a
 * sequence dimension what all ranks would have in common outside of a column and a row layer is
 * divided too, along that dimension of the tensors.
 *
 *                   forward                      backward, on the input's gradient
 *   column          -                            all_reduce
 *   row             all_reduce                   -
 *   with a sequence dimension:
 *   column          all_gather of the input      reduce_scatter
 *   row             reduce_scatter               all_gather of the result's gradient
 *
 * Outside of these layers all ranks compute the same, or the same of different parts, and the same
 * loss. Every rank calls the same functions in the same order, with tensors of the same shapes that
 * require gradients on all ranks or on none.
 */
#ifndef TDDP_TORCH_LINEAR_H
#define TDDP_TORCH_LINEAR_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** How a layer is divided: not, by its outputs, by its inputs. */
typedef enum tddp_linear_form {
    TDDP_LINEAR_PLAIN,
    TDDP_LINEAR_COLUMN,
    TDDP_LINEAR_ROW,
} tddp_linear_form;

/** Instead of a sequence dimension. */
#define TDDP_LINEAR_NO_SEQUENCE (-1)

/** A linear layer. Begin with TDDP_LINEAR_OPTS_INIT. */
typedef struct tddp_linear_opts {
    size_t size; /**< sizeof(tddp_linear_opts) */
    tddp_linear_form form;
    tddp_group *group;    /**< retained by the graph. NULL, or of one rank: as the plain form */
    int64_t sequence_dim; /**< not negative, not the last one; TDDP_LINEAR_NO_SEQUENCE: none */
    tddp_blocking_region blocking_region;          /**< for waits in this call; NULL: none */
    tddp_blocking_region backward_blocking_region; /**< for waits in backward; NULL: none */
} tddp_linear_opts;

/** The defaults: the plain form. */
#define TDDP_LINEAR_OPTS_INIT                                                                  \
    {                                                                                          \
        sizeof(tddp_linear_opts), TDDP_LINEAR_PLAIN, NULL, TDDP_LINEAR_NO_SEQUENCE, NULL, NULL \
    }

/**
 * Computes a linear layer and assigns `output`, a new handle of the caller's, with the graph that
 * computes the gradients. `input` is [..., features] of any number of dimensions, `weight` [out,
 * features], `bias` [out] or NULL: in the column form `out` is this rank's part, in the row form
 * `features` is, and the bias is the same on all ranks and added once, to the sum. With a sequence
 * dimension other than 0 the result has the strides of a transposed tensor. The plain form computes
 * what libtorch's linear does, with the same bits.
 *
 * Backward computes gradients only of what requires one: nothing is sent for an input that doesn't.
 * The column form with a sequence dimension keeps the gathered input until then. The bias's
 * gradient is the same on all ranks in the row form. With create_graph gradients have gradients, at
 * the cost of one more collective for a gathered input or a bias in the row form with a sequence
 * dimension.
 *
 * Errors: TDDP_INVALID_ARGUMENT (shapes, dtypes or devices that do not fit together, a sequence
 * dimension that the tensor doesn't have, or that the ranks do not divide evenly; the text names
 * them), TDDP_CANCELED (`blocking_region` was interrupted), those of the group's operations;
 * backward throws an exception with their text.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_linear(const tddp_tensor *input, const tddp_tensor *weight,
                                                const tddp_tensor *bias,
                                                const tddp_linear_opts *opts, tddp_tensor *output);

/* --- weights' gradients, later --------------------------------------------------------------- */

/** Gradients of weights and biases that are still to be computed. */
typedef struct tddp_weight_gradients tddp_weight_gradients;

/** Caller: tddp_weight_gradients_free(). NULL: out of memory. */
TDDP_API tddp_weight_gradients *tddp_weight_gradients_create(void);

/** Also frees what tddp_weight_gradients_run() has not used: those gradients are never computed.
 * NULL is allowed. */
TDDP_API void tddp_weight_gradients_free(tddp_weight_gradients *gradients);

/**
 * From now on a backward that this thread calls leaves the gradients of the weights and biases of
 * tddp_linear() to `gradients`, which keeps what they are computed from; until
 * tddp_weight_gradients_end() on the same thread. Within another's begin and end the inner one
 * counts. Gradients are computed at once, as always, of tensors that are no leaves, with
 * create_graph, and in a backward that computes gradients of selected tensors.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_weight_gradients_begin(tddp_weight_gradients *gradients);

/** Errors: TDDP_INVALID_ARGUMENT (the last begin on this thread was another's). */
TDDP_API TDDP_NODISCARD tddp_status tddp_weight_gradients_end(tddp_weight_gradients *gradients);

/**
 * Computes the gradients, in the order in which backward left them, and accumulates them: a
 * backward of its own, with its hooks and its end. What was kept is freed step by step, and also if
 * it fails. Again it has nothing to do. Any thread, one at a time, not between begin and end.
 * Errors: what libtorch or a hook throws.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_weight_gradients_run(tddp_weight_gradients *gradients);

#ifdef __cplusplus
}
#endif

#endif
