// Recognizes checkpointed segments in a graph.
#ifndef TDDP_TORCH_CHECKPOINT_NODE_H
#define TDDP_TORCH_CHECKPOINT_NODE_H

#include <torch/csrc/autograd/function.h>

namespace tddp_torch
{

bool is_checkpoint(const torch::autograd::Node &node);

// Whether this thread computes a segment again, within backward.
bool recomputing();

} // namespace tddp_torch

#endif
