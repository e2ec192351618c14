// What a node of our own saves for backward.
#ifndef TDDP_TORCH_SAVED_H
#define TDDP_TORCH_SAVED_H

#include <torch/csrc/autograd/saved_variable.h>

#include "torch/autograd/node.h"

namespace tddp_torch
{

// With hooks (see saved_tensors.h) libtorch's part of it refers to a leaf's accumulator without
// owning it, and fails in backward if that is destroyed. Edges own it; those of this node may lead
// to other tensors alone, or be made later. So it is owned here.
class Saved
{
  public:
    Saved() = default;
    Saved(const at::Tensor &tensor, bool is_output)
        : accumulator_(accumulator_of(tensor)), variable_(tensor, is_output)
    {
    }
    // `saved_for`: the node, if it may be an output.
    at::Tensor unpack(NodePointer saved_for = nullptr) const
    {
        return variable_.unpack(std::move(saved_for));
    }
    void reset_data()
    {
        variable_.reset_data();
        accumulator_ = nullptr;
    }

  private:
    static NodePointer accumulator_of(const at::Tensor &tensor)
    {
        return tensor.defined() && tensor.requires_grad() && tensor.is_leaf()
                   ? torch::autograd::impl::grad_accumulator(tensor)
                   : nullptr;
    }

    NodePointer accumulator_;
    torch::autograd::SavedVariable variable_;
};

} // namespace tddp_torch

#endif
