// Devices as libtorch knows them.
#ifndef TDDP_TORCH_DEVICE_H
#define TDDP_TORCH_DEVICE_H

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <tddp/buffer.h>

namespace tddp_torch
{

// Where a tensor lies, as the collectives name it; throws TDDP_UNSUPPORTED for devices that they do
// not know. With TDDP_STAND_IN_CUDA=1 the CPU's tensors count as those of GPU 0: the logic of
// devices is tested so, on host memory, with stand-ins for CUDA and NCCL.
void device_of(const at::Tensor &tensor, tddp_device_type *type, int32_t *index);

// The stream on which this thread puts work for a device: a cudaStream_t, where NULL is CUDA's
// default stream. NULL for the CPU, and in a build without CUDA.
void *current_stream(tddp_device_type type, int32_t index);
void *current_stream(const at::Tensor &tensor);

// Where libtorch has what lies there.
c10::Device device_named(tddp_device_type type, int32_t index);

// The calling thread's streams of those devices that have any, for a thread that goes on with its
// work: c10::MultiStreamGuard.
std::vector<c10::Stream> current_streams(const std::vector<c10::Device> &devices);

} // namespace tddp_torch

#endif
