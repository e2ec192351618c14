/**
 * @file torch_parallel.h
 * @brief A differentiable broadcast of tensors to several devices (libtddp_torch).
 *
 * A process that uses several devices needs a model's parameters on each of them, and the sum of
 * their gradients on the parameters' device. Small tensors are copied together, in flat chunks,
 * because a copy between devices has a high fixed cost.
 */
#ifndef TDDP_TORCH_PARALLEL_H
#define TDDP_TORCH_PARALLEL_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Options of the copies. Begin with TDDP_REPLICATE_OPTS_INIT. */
typedef struct tddp_replicate_opts {
    size_t size;  /**< sizeof(tddp_replicate_opts) */
    size_t limit; /**< bytes of a flat chunk; a larger tensor has its own */
    int apart;    /**< also copy to the tensors' own device; else outputs there share the tensors'
                   * memory */
    int detached; /**< without autograd, as under no_grad: for buffers */
    const char *home; /**< the device that all tensors must be on; NULL: the first one's */
} tddp_replicate_opts;

/** The defaults: chunks of 25 MiB, with autograd. */
#define TDDP_REPLICATE_OPTS_INIT                                          \
    {                                                                     \
        sizeof(tddp_replicate_opts), (size_t)25 * 1024 * 1024, 0, 0, NULL \
    }

/**
 * Copies `tensors`, which are on one device, in any dtypes, to each of `devices` ("cpu", "cuda:1";
 * one may occur several times). Output `d * count + i` is a new handle of the caller's, which is
 * assigned tensor i on device d, with the original's strides if that has no gaps.
 *
 * If grad is on, outputs of tensors that require grad require grad too: backward sums the gradients
 * of all devices on the tensors' device. One node of the graph does so for the tensors of a chunk;
 * autograd calls it once for all devices, for GPUs on a thread of autograd's, and it never acquires
 * a lock of the host language. A device without a gradient for a tensor counts as zeros; if no
 * device has one, neither has the tensor. With create_graph, and for sparse gradients, tensors are
 * summed one by one. Outputs that share a tensor's memory are views of it.
 *
 * In a library that is built for CUDA, NCCL copies chunks to different GPUs if libtorch includes
 * it, and from three GPUs on also sums gradients: between two there is nothing to reduce.
 *
 * Errors: TDDP_INVALID_ARGUMENT (a tensor that is undefined or on another device; a device that is
 * not available: the texts name it), TDDP_INTERNAL (libtorch's text).
 * Outputs are set only on success.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_replicate(const tddp_tensor *const *tensors, size_t count,
                                                   const char *const *devices, size_t device_count,
                                                   const tddp_replicate_opts *opts,
                                                   tddp_tensor *const *outputs);

#ifdef __cplusplus
}
#endif

#endif
