// Activation checkpointing: segments that are recomputed in backward. The node in the outer graph
// saves the segment's inputs; its backward lets the host language rerun the segment with grad, then
// runs the backward of that graph, which accumulates the parameters' gradients, and returns the
// inputs' gradients. On the autograd thread that runs this part of backward.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <sstream>
#include <typeinfo>

#include <tddp/torch_checkpoint.h>

#include "torch/autograd/end_of_backward.h"
#include "torch/autograd/node.h"
#include "torch/autograd/saved.h"
#include "torch/checkpoint/checkpoint.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

at::Tensor rng_state()
{
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
}

void set_rng_state(const at::Tensor &state)
{
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
}

// Sets the generator's state, and restores the current one at the end of the scope.
class RngScope
{
  public:
    explicit RngScope(const at::Tensor &state)
    {
        if (state.defined()) {
            now_ = rng_state();
            set_rng_state(state);
        }
    }
    ~RngScope()
    {
        if (now_.defined()) {
            (void)guard([&] { set_rng_state(now_); });
        }
    }
    RngScope(const RngScope &) = delete;
    RngScope &operator=(const RngScope &) = delete;

  private:
    at::Tensor now_;
};

class CheckpointNode final : public torch::autograd::Node
{
  public:
    CheckpointNode(const tddp_checkpoint_ops &ops, void *state) : ops_(ops), state_(state) {}
    ~CheckpointNode() override
    {
        free_state();
    }
    CheckpointNode(const CheckpointNode &) = delete;
    CheckpointNode &operator=(const CheckpointNode &) = delete;

    void save_inputs(const std::vector<at::Tensor> &inputs, bool preserve_rng)
    {
        torch::autograd::edge_list edges;
        for (const at::Tensor &input : inputs) {
            inputs_.emplace_back(input, false);
            required_.push_back(input.requires_grad());
            edges.push_back(input.requires_grad() ? torch::autograd::impl::gradient_edge(input)
                                                  : torch::autograd::Edge());
        }
        set_next_edges(std::move(edges));
        if (preserve_rng) {
            rng_ = rng_state();
        }
    }
    void set_outputs(size_t output_count, std::vector<size_t> differentiable)
    {
        output_count_ = output_count;
        differentiable_ = std::move(differentiable);
    }
    // The caller keeps the ownership of its state.
    void release_ownership()
    {
        state_ = nullptr;
        ops_.free = nullptr;
    }
    variable_list apply(variable_list &&grads) override;
    void release_variables() override
    {
        inputs_.clear();
        rng_.reset();
        free_state();
    }
    std::string name() const override
    {
        return "CheckpointBackward";
    }

  private:
    void check_backward() const;
    std::vector<at::Tensor> detached_inputs();
    std::vector<at::Tensor> recompute(std::vector<at::Tensor> &inputs) const;
    void free_state()
    {
        if (ops_.free && !released_) {
            ops_.free(state_);
        }
        released_ = true;
    }

    tddp_checkpoint_ops ops_;
    void *state_;
    bool released_ = false;
    std::vector<Saved> inputs_;
    std::vector<bool> required_;
    at::Tensor rng_;
    size_t output_count_ = 0;
    std::vector<size_t> differentiable_; // outputs
};

void CheckpointNode::check_backward() const
{
    if (released_) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "backward through a checkpointed segment a second time: its inputs "
                                "are freed, call the first backward with retain_graph: true"));
    }
    if (at::GradMode::is_enabled()) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "a checkpointed segment has no second derivatives: call backward "
                                "without create_graph, or do not checkpoint it"));
    }
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "a checkpointed segment accumulates gradients of all its "
                                "parameters: it works with backward, not with gradients of "
                                "selected inputs"));
    }
}

std::vector<at::Tensor> CheckpointNode::detached_inputs()
{
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < inputs_.size(); i++) {
        const at::Tensor input = inputs_[i].unpack();
        inputs.push_back(input.defined() ? input.detach().set_requires_grad(required_[i]) : input);
    }
    return inputs;
}

thread_local int segments_computed_again;

class ComputedAgain
{
  public:
    ComputedAgain()
    {
        segments_computed_again++;
    }
    ~ComputedAgain()
    {
        segments_computed_again--;
    }
    ComputedAgain(const ComputedAgain &) = delete;
    ComputedAgain &operator=(const ComputedAgain &) = delete;
};

std::vector<at::Tensor> CheckpointNode::recompute(std::vector<at::Tensor> &inputs) const
{
    std::vector<at::Tensor> outputs(output_count_);
    std::vector<tddp_tensor *> in;
    std::vector<tddp_tensor *> out;
    for (at::Tensor &input : inputs) {
        in.push_back(reinterpret_cast<tddp_tensor *>(&input));
    }
    for (at::Tensor &output : outputs) {
        out.push_back(reinterpret_cast<tddp_tensor *>(&output));
    }
    const RngScope random(rng_);
    const at::AutoGradMode with_grad(true);
    const ComputedAgain scope;
    check(ops_.again(state_, in.data(), in.size(), out.data(), out.size()));
    return outputs;
}

// A gradient has the shape of forward's output. Autograd would silently sum it to a smaller shape.
void check_shape(size_t number, const at::Tensor &again, const at::Tensor &grad)
{
    if (again.sizes() != grad.sizes()) {
        std::ostringstream text;
        text << "output " << number << " of a checkpointed segment has the shape " << again.sizes()
             << " in backward, but " << grad.sizes()
             << " in forward: the segment must compute the same each time";
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "%s", text.str().c_str()));
    }
}

variable_list CheckpointNode::apply(variable_list &&grads)
{
    check_backward();
    std::vector<at::Tensor> inputs = detached_inputs();
    bool any_defined = false;
    for (const at::Tensor &grad : grads) {
        any_defined = any_defined || grad.defined();
    }
    if (!any_defined) {
        return variable_list(inputs.size());
    }
    const std::vector<at::Tensor> outputs = recompute(inputs);
    variable_list roots;
    variable_list root_grads;
    for (size_t i = 0; i < differentiable_.size(); i++) {
        const at::Tensor &output = outputs[differentiable_[i]];
        if (grads[i].defined() && output.defined() && output.requires_grad()) {
            check_shape(differentiable_[i], output, grads[i]);
            roots.push_back(output);
            root_grads.push_back(grads[i]);
        }
    }
    if (!roots.empty()) {
        NestedBackward nested;
        torch::autograd::backward(roots, root_grads);
        nested.close();
    }
    variable_list result;
    for (size_t i = 0; i < inputs.size(); i++) {
        result.push_back(required_[i] ? inputs[i].grad() : at::Tensor());
    }
    return result;
}

} // namespace

bool recomputing()
{
    return segments_computed_again > 0;
}

bool is_checkpoint(const torch::autograd::Node &node)
{
    return typeid(node) == typeid(CheckpointNode);
}

} // namespace tddp_torch

struct tddp_checkpoint {
    tddp_torch::NodePointer node;
};

tddp_status tddp_checkpoint_begin(tddp_tensor *const *inputs, size_t input_count, int preserve_rng,
                                  const tddp_checkpoint_ops *ops, void *state,
                                  tddp_checkpoint **out)
{
    using namespace tddp_torch;
    return guard([&] {
        if (!ops || ops->size != sizeof *ops || !ops->again) {
            throw Failure(
                tddp_fail(TDDP_INVALID_ARGUMENT, "ops without size or again: expected both"));
        }
        std::vector<at::Tensor> tensors;
        for (size_t i = 0; i < input_count; i++) {
            tensors.push_back(tensor_of(inputs[i]));
        }
        auto made = std::make_unique<tddp_checkpoint>();
        made->node = make_node<CheckpointNode>(*ops, state);
        auto &node = static_cast<CheckpointNode &>(*made->node);
        try {
            node.save_inputs(tensors, preserve_rng != 0);
        } catch (...) {
            node.release_ownership();
            throw;
        }
        *out = made.release();
    });
}

tddp_status tddp_checkpoint_outputs(tddp_checkpoint *checkpoint, tddp_tensor *const *outputs,
                                    size_t output_count)
{
    using namespace tddp_torch;
    return guard([&] {
        std::vector<size_t> differentiable;
        for (size_t i = 0; i < output_count; i++) {
            at::Tensor &output = *reinterpret_cast<at::Tensor *>(outputs[i]);
            if (!can_have_gradient(output)) {
                continue;
            }
            differentiable.push_back(i);
            at::Tensor alias = output.detach();
            alias.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
            torch::autograd::create_gradient_edge(alias, checkpoint->node);
            output = std::move(alias);
        }
        static_cast<CheckpointNode &>(*checkpoint->node)
            .set_outputs(output_count, std::move(differentiable));
    });
}

void tddp_checkpoint_free(tddp_checkpoint *checkpoint)
{
    delete checkpoint;
}
