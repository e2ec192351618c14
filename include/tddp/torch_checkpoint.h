/**
 * @file torch_checkpoint.h
 * @brief Activation checkpointing: segments of a model that are recomputed in backward.
 *
 * begin -> the host runs the segment without grad -> outputs. In backward the host runs it again,
 * with grad, on detached inputs, and that graph's backward runs at once, inside the outer one. It
 * accumulates the gradients of the segment's parameters, so data parallel's hooks run.
 */
#ifndef TDDP_TORCH_CHECKPOINT_H
#define TDDP_TORCH_CHECKPOINT_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The host's part of a segment. */
typedef struct tddp_checkpoint_ops {
    size_t size; /**< sizeof(tddp_checkpoint_ops) */

    /**
     * Runs the segment again. `inputs` are detached, with the original requires_grad; assigns the
     * segment's outputs to `outputs`, in the same number and order (tddp_tensor_assign). On the
     * thread that runs this part of backward: for tensors on the CPU the one that called backward.
     */
    tddp_status (*again)(void *state, tddp_tensor *const *inputs, size_t input_count,
                         tddp_tensor *const *outputs, size_t output_count);

    /** Frees the state when the graph is freed, or after a backward without retain_graph. Any
     *  thread. */
    void (*free)(void *state);
} tddp_checkpoint_ops;

/** A segment between its first run and its outputs. */
typedef struct tddp_checkpoint tddp_checkpoint;

/**
 * Saves the segment's inputs and, with `preserve_rng`, the state of the CPU's random number
 * generator, with which the second run starts. Owns `state` if it returns TDDP_OK. Caller:
 * tddp_checkpoint_outputs(), tddp_checkpoint_free(). Errors: TDDP_INVALID_ARGUMENT,
 * TDDP_OUT_OF_MEMORY, TDDP_INTERNAL.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_checkpoint_begin(tddp_tensor *const *inputs,
                                                          size_t input_count, int preserve_rng,
                                                          const tddp_checkpoint_ops *ops,
                                                          void *state, tddp_checkpoint **out);

/** After the first run: replaces those of its `outputs` that can have gradients by tensors whose
 *  backward runs the segment again. The handles are new ones of the caller's. Once. */
TDDP_API TDDP_NODISCARD tddp_status tddp_checkpoint_outputs(tddp_checkpoint *checkpoint,
                                                            tddp_tensor *const *outputs,
                                                            size_t output_count);

/** Frees the handle; the graph keeps what it needs. NULL is allowed. */
TDDP_API void tddp_checkpoint_free(tddp_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif

#endif
