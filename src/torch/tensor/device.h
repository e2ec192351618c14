// libtorch's devices and streams.
#ifndef TDDP_TORCH_DEVICE_H
#define TDDP_TORCH_DEVICE_H

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <tddp/buffer.h>

namespace tddp_torch
{

// A tensor's device, in the collectives' terms; throws TDDP_UNSUPPORTED for other devices. With
// TDDP_STAND_IN_CUDA=1 CPU tensors count as GPU 0's: this tests the logic of devices in host
// memory, with stand-ins for CUDA and NCCL.
void device_of(const at::Tensor &tensor, tddp_device_type *type, int32_t *index);

// This thread's current stream of a device: a cudaStream_t, where NULL is CUDA's default stream.
// NULL for the CPU, and in a build without CUDA.
void *current_stream(tddp_device_type type, int32_t index);
void *current_stream(const at::Tensor &tensor);

// A stream of libtorch's as a cudaStream_t; NULL for others than CUDA's.
void *native_stream(const c10::Stream &stream);

// libtorch's name of the device.
c10::Device device_named(tddp_device_type type, int32_t index);

// The calling thread's current streams of those devices that have streams, for another thread that
// continues its work with c10::MultiStreamGuard.
std::vector<c10::Stream> current_streams(const std::vector<c10::Device> &devices);

} // namespace tddp_torch

#endif
