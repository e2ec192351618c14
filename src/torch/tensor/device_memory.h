// Gradient buckets on devices: memory that libtorch allocates, for <tddp/reducer.h>.
#ifndef TDDP_TORCH_DEVICE_MEMORY_H
#define TDDP_TORCH_DEVICE_MEMORY_H

#include <tddp/reducer.h>

namespace tddp_torch
{

// Any thread; static.
const tddp_device_memory_ops *device_memory();

} // namespace tddp_torch

#endif
