// What autograd's graph owns of a fully sharded model: hooks, which hold the model weakly.
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

// One forward of a unit. Backward has come to it when it has come to an output, and has passed it
// when the gradients of all its inputs are there. Of one without inputs that need a gradient the
// latter is not known. Nothing follows from when the graph is destroyed, which a garbage collector
// decides on each rank for itself. The hooks own it.
class Forward
{
  public:
    Forward(std::weak_ptr<ShardedModel> model, size_t unit, size_t inputs)
        : model_(std::move(model)), unit_(unit), inputs_(inputs)
    {
    }
    void output_reached()
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (!model) {
            return;
        }
        model->outputs_reached(unit_);
        if (backward_ != model->backward_number()) {
            backward_ = model->backward_number();
            left_ = inputs_;
            model->forward_reached(unit_, inputs_ > 0);
        }
    }
    void input_passed()
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (model && backward_ == model->backward_number() && left_ > 0 && --left_ == 0) {
            model->forward_passed(unit_);
        }
    }

  private:
    std::weak_ptr<ShardedModel> model_;
    size_t unit_;
    size_t inputs_;
    size_t left_ = 0;
    uint64_t backward_ = 0; // the last that came to it
};

} // namespace tddp_torch

#endif
