// The backward node of a replicated chunk.
#ifndef TDDP_TORCH_REPLICATE_H
#define TDDP_TORCH_REPLICATE_H

#include <vector>

#include "torch/autograd/node.h"
#include "torch/data_parallel/flatten.h"

namespace tddp_torch
{

// Makes a node that sums the gradients of tensors with these layouts on `device`. Its outputs are
// the tensors of the first of `devices` devices, then those of the second...; the caller sets its
// next edges to the tensors'.
NodePointer replicate_node(std::vector<TensorLayout> layouts, at::Device device, size_t devices);

} // namespace tddp_torch

#endif
