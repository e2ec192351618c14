// The way back of a replication: what replicate.cc makes for the outputs of a piece.
#ifndef TDDP_TORCH_REPLICATE_H
#define TDDP_TORCH_REPLICATE_H

#include <vector>

#include "torch/autograd/node.h"
#include "torch/data_parallel/pieces.h"

namespace tddp_torch
{

// A node that adds up the gradients of tensors of these forms on `home`. Its outputs are those of
// the first of so many devices, then those of the second...; its next edges the tensors'.
NodePointer replicate_node(std::vector<Form> forms, at::Device home, size_t devices);

} // namespace tddp_torch

#endif
