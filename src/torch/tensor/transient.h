// Memory that comes and goes under a tensor: that of sharded parameters.
#ifndef TDDP_TORCH_TRANSIENT_H
#define TDDP_TORCH_TRANSIENT_H

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace tddp_torch
{

// Memory that others own, at `data`, or none, for a storage that is recognized by it.
at::DataPtr transient_memory(void *data, c10::Device device);
// Whether the tensor's storage has such memory.
bool is_transient(const at::Tensor &tensor);

} // namespace tddp_torch

#endif
