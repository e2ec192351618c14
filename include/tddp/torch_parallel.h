/**
 * @file torch_parallel.h
 * @brief Tensors of one device on several others, and their gradients back (libtddp_torch).
 *
 * One process that uses several devices needs a model's parameters on each of them, and the sum of
 * their gradients where the parameters are. Small tensors travel together, as parts of flat pieces:
 * what a copy between devices costs is mostly that it is one.
 */
#ifndef TDDP_TORCH_PARALLEL_H
#define TDDP_TORCH_PARALLEL_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tddp_replicate_opts {
    size_t size;  /**< sizeof(tddp_replicate_opts) */
    size_t limit; /**< bytes of a flat piece; a larger tensor goes alone */
    int apart;    /**< on the tensors' own device, too, there are copies, made as for another one;
                   * else what is there shares the tensors' memory */
    int detached; /**< autograd sees nothing of it, as under no_grad: for buffers */
    const char *home; /**< where the tensors are expected to lie; NULL: where the first one does */
} tddp_replicate_opts;

#define TDDP_REPLICATE_OPTS_INIT                                          \
    {                                                                     \
        sizeof(tddp_replicate_opts), (size_t)25 * 1024 * 1024, 0, 0, NULL \
    }

/**
 * Gives each of `devices` ("cpu", "cuda:1"; one may come several times) its own of `tensors`, which
 * lie on one device, in any dtypes. Output `d * count + i` is a fresh handle of the caller's, which
 * becomes tensor i on device d, with the elements' order in memory that it had, if it had no gaps.
 *
 * Those of tensors that require grad do so, too, where grad is on: backward adds up what comes back
 * from the devices on the tensors' own one. One node of the graph does that for the tensors of a
 * piece; it is called once for all devices, on autograd's own thread where they are GPUs, and never
 * asks for a lock of the host language's. A device from which no gradient came for a tensor counts
 * as zeros, and if it came from none the tensor gets none. With create_graph, and where gradients
 * are sparse, they are taken one by one. What shares a tensor's memory is a view of it.
 *
 * In a library that is built for CUDA pieces go to different GPUs by NCCL, if libtorch has it, and
 * from three GPUs on they come back by it: between two there is nothing to add.
 *
 * Errors: TDDP_INVALID_ARGUMENT (a tensor that is undefined or lies elsewhere; a device that is not
 * there: the texts name it), TDDP_INTERNAL (libtorch's text).
 * Outputs are set only if all could be made.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_replicate(const tddp_tensor *const *tensors, size_t count,
                                                   const char *const *devices, size_t device_count,
                                                   const tddp_replicate_opts *opts,
                                                   tddp_tensor *const *outputs);

#ifdef __cplusplus
}
#endif

#endif
