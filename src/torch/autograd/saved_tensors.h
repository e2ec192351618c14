// What operations save for backward, through hooks. libtorch asks autograd's engine for these
// hooks, whose own has none.
#ifndef TDDP_TORCH_SAVED_TENSORS_H
#define TDDP_TORCH_SAVED_TENSORS_H

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "torch/tensor/transient.h"

namespace tddp_torch
{

// One saved tensor: an alias of it, because an output that its own node kept would never be freed;
// a leaf itself.
// Memory that comes and goes is brought back when backward reads it, whatever way backward has
// come.
class SavedTensor : public torch::autograd::SavedVariableHooks
{
  public:
    SavedTensor() = default;
    SavedTensor(const SavedTensor &) = delete;
    SavedTensor &operator=(const SavedTensor &) = delete;

    void call_pack_hook(const at::Tensor &tensor) override;
    at::Tensor call_unpack_hook() override;

  private:
    at::Tensor saved_;
    int64_t version_ = 0;
    std::shared_ptr<TransientUse> use_; // of memory that comes and goes
};

using SavedTensorMaker = std::function<std::unique_ptr<SavedTensor>()>;

// From the first call on autograd's engine is one that differs in these hooks alone. Returns false
// if another library has replaced it, as Python does.
bool install_saved_tensors();

// Between these calls operations of this thread save tensors that the innermost `maker` makes;
// where there is none, and keeping has begun, plain ones. Both nest.
void begin_moving(SavedTensorMaker maker);
void end_moving();
void begin_keeping();
void end_keeping();

} // namespace tddp_torch

#endif
