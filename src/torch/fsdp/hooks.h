// What autograd's graph owns of a fully sharded model: hooks. Those on outputs keep the model, as
// saved parameters do; those on parameters, which are the model's own, don't.
#ifndef TDDP_TORCH_FSDP_HOOKS_H
#define TDDP_TORCH_FSDP_HOOKS_H

#include <memory>

#include <torch/csrc/autograd/function_hook.h>

#include "torch/fsdp/model.h"

namespace tddp_torch
{

class ArrivedHook final : public torch::autograd::FunctionPostHook
{
  public:
    ArrivedHook(std::weak_ptr<ShardedModel> model, size_t unit, size_t index)
        : model_(std::move(model)), unit_(unit), index_(index)
    {
    }
    torch::autograd::variable_list operator()(const torch::autograd::variable_list &outputs,
                                              const torch::autograd::variable_list &inputs) override
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (model && !inputs.empty() && inputs[0].defined()) {
            model->gradient_arrived(unit_, index_);
        }
        return outputs;
    }

  private:
    std::weak_ptr<ShardedModel> model_;
    size_t unit_;
    size_t index_;
};

// One forward of a unit, to which backward comes by any of its outputs, or by what reads one of its
// parameters. Nothing follows from when the graph is destroyed, which a garbage collector decides
// on each rank for itself. The hooks on outputs and the saved parameters own it.
class Forward final : public TransientUse
{
  public:
    Forward(std::shared_ptr<ShardedModel> model, size_t unit, Position entered, Position left)
        : model_(std::move(model)), unit_(unit), entered_(entered), left_(left)
    {
    }
    Position entered() const
    {
        return entered_;
    }
    void leave(Position left)
    {
        left_ = left;
    }
    void output_reached()
    {
        model_->begin_backward();
        if (backward_ != model_->backward_number()) {
            reached();
        }
    }
    void bring_back() override
    {
        if (!model_->unit(unit_).placed()) {
            model_->begin_backward();
            reached();
        }
    }

  private:
    void reached()
    {
        backward_ = model_->backward_number();
        model_->forward_reached(unit_, entered_, left_);
    }

    std::shared_ptr<ShardedModel> model_;
    size_t unit_;
    Position entered_;
    Position left_;
    uint64_t backward_ = 0; // the last that came to it
};

} // namespace tddp_torch

#endif
