/**
 * @file torch_checkpoint.h
 * @brief Segments of a model that are computed again in backward, to save their activations.
 *
 * begin -> the host runs the segment without grad -> outputs. In backward the host runs it again,
 * with grad, on detached inputs, and that graph's own backward follows at once, inside the outer
 * one. Gradients of the segment's parameters are accumulated there, so data parallel sees them.
 */
#ifndef TDDP_TORCH_CHECKPOINT_H
#define TDDP_TORCH_CHECKPOINT_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tddp_checkpoint_ops {
    size_t size; /**< sizeof(tddp_checkpoint_ops) */

    /**
     * Runs the segment again: `inputs` are detached and require grad as they did; the tensors that
     * it returns are assigned to `outputs`, as many as before and in that order
     * (tddp_tensor_assign). On the thread that runs this part of backward: for tensors on the CPU
     * the one that called it.
     */
    tddp_status (*again)(void *state, tddp_tensor *const *inputs, size_t input_count,
                         tddp_tensor *const *outputs, size_t output_count);

    /** Once the graph is freed, or backward is through without retain_graph. Any thread. */
    void (*free)(void *state);
} tddp_checkpoint_ops;

typedef struct tddp_checkpoint tddp_checkpoint;

/**
 * Remembers the segment's inputs and, with `preserve_rng`, the state of the CPU's random numbers,
 * which the second run then begins with. Takes over `state` if it returns TDDP_OK. Caller:
 * tddp_checkpoint_outputs(), tddp_checkpoint_free(). Errors: TDDP_INVALID_ARGUMENT,
 * TDDP_OUT_OF_MEMORY, TDDP_INTERNAL.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_checkpoint_begin(tddp_tensor *const *inputs,
                                                          size_t input_count, int preserve_rng,
                                                          const tddp_checkpoint_ops *ops,
                                                          void *state, tddp_checkpoint **out);

/** What the first run gave: those of `outputs` that can have gradients become tensors whose
 *  backward runs the segment again. The handles are fresh ones of the caller's. Once. */
TDDP_API TDDP_NODISCARD tddp_status tddp_checkpoint_outputs(tddp_checkpoint *checkpoint,
                                                            tddp_tensor *const *outputs,
                                                            size_t output_count);

/** Lets go of it; the graph keeps what it needs. NULL is fine. */
TDDP_API void tddp_checkpoint_free(tddp_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif

#endif
