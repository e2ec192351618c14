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

// One forward of a unit, until backward has the gradients of all its inputs, or the graph is
// destroyed. Of one without inputs that need a gradient nothing else is known. The hooks own it.
class Forward
{
  public:
    Forward(std::weak_ptr<ShardedModel> model, size_t unit, size_t inputs)
        : model_(std::move(model)), unit_(unit), left_(inputs), has_inputs_(inputs > 0)
    {
    }
    ~Forward()
    {
        close();
    }
    Forward(const Forward &) = delete;
    Forward &operator=(const Forward &) = delete;
    void input_passed()
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (left_ > 0 && --left_ == 0 && model) {
            close();
            model->inputs_passed(unit_);
        }
    }

  private:
    void close()
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (!closed_ && model) {
            model->forward_closed(unit_, has_inputs_);
        }
        closed_ = true;
    }

    std::weak_ptr<ShardedModel> model_;
    size_t unit_;
    size_t left_;
    bool has_inputs_;
    bool closed_ = false;
};

} // namespace tddp_torch

#endif
