/**
 * @file torch_backward.h
 * @brief Backward from several tensors at once, its failures, and handles that release their
 * tensors early (libtddp_torch): for models that are run in stages.
 */
#ifndef TDDP_TORCH_BACKWARD_H
#define TDDP_TORCH_BACKWARD_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * One backward from all of these tensors, which require a gradient. It accumulates the gradients of
 * the leaves and frees the graph. `grads` are the tensors' own gradients, of the same shapes. On
 * the calling thread, as libtorch's backward, hooks and what they throw included. Errors: those of
 * the hooks; TDDP_INTERNAL (libtorch's).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_backward(const tddp_tensor *const *roots,
                                                  const tddp_tensor *const *grads, size_t count);

/**
 * The status of the latest failure whose text is in `text`, or TDDP_OK: libtorch's backward passes
 * on what a hook of this library throws, and a host that catches it may see the text alone.
 * Any thread.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_failure_status(const char *text);

/** Releases the handle's tensor, whose memory is freed if nothing else owns it. */
TDDP_API void tddp_tensor_reset(tddp_tensor *tensor);

#ifdef __cplusplus
}
#endif

#endif
