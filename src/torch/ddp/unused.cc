// Finds the parameters that a loss depends on. forward's outputs pass through a GradientSyncNode,
// which autograd runs first; it traverses the graph behind it. On the thread that runs forward, and
// in backward on autograd's.
#include <typeinfo>
#include <unordered_set>

#include <ATen/core/grad_mode.h>

#include "torch/checkpoint/checkpoint.h"
#include "torch/ddp/core.h"

namespace tddp_torch
{

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

namespace
{

class GradientSyncNode final : public torch::autograd::Node
{
  public:
    explicit GradientSyncNode(std::shared_ptr<Core> core) : core_(std::move(core)) {}
    variable_list apply(variable_list &&grads) override
    {
        edge_list wanted;
        for (size_t i = 0; i < grads.size(); i++) {
            if (grads[i].defined() && next_edge(i).is_valid()) {
                wanted.push_back(next_edge(i));
            }
        }
        core_->backward_started(wanted);
        return std::move(grads);
    }
    std::string name() const override
    {
        return "GradientSyncBackward";
    }

  private:
    std::shared_ptr<Core> core_;
};

// A tensor with the same elements and no history. It shares the output's memory and version
// counter, so autograd detects an in-place change of an output that is saved for backward. A view
// is copied instead: an in-place change would also change its base, unknown to the base's history.
at::Tensor alias_of(const at::Tensor &output)
{
    const at::NoGradGuard no_grad;
    at::Tensor alias = output.is_view() ? output.clone() : output.detach();
    alias.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
    return alias;
}

} // namespace

void Core::set_accumulators(const std::vector<NodePointer> &accumulators)
{
    for (size_t i = 0; i < accumulators.size(); i++) {
        accumulators_.emplace(accumulators[i].get(), i);
    }
}

bool Core::wants_outputs() const
{
    return armed() && (find_unused_ || first_static_iteration());
}

void Core::hook_outputs(const std::vector<at::Tensor *> &outputs)
{
    if (!wants_outputs() || !at::GradMode::is_enabled()) {
        return;
    }
    forwards_++;
    std::vector<at::Tensor *> differentiable;
    edge_list edges;
    for (at::Tensor *output : outputs) {
        if (output->defined() && output->requires_grad()) {
            differentiable.push_back(output);
            edges.push_back(torch::autograd::impl::gradient_edge(*output));
        }
    }
    if (edges.empty()) {
        return;
    }
    const NodePointer node = make_node<GradientSyncNode>(shared_from_this());
    node->set_next_edges(std::move(edges));
    for (at::Tensor *output : differentiable) {
        at::Tensor alias = alias_of(*output);
        torch::autograd::create_gradient_edge(alias, node);
        *output = std::move(alias);
    }
}

void Core::backward_started(const edge_list &edges)
{
    if (!armed()) {
        return;
    }
    queue_end_of_backward(false);
    if (!find_unused_) {
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(lock_);
        if (unused_known_) {
            return;
        }
    }
    // After several forwards the loss may also depend on other forwards' outputs.
    std::vector<char> reached(params_.size());
    if (forwards_ == 1 && find_reached_params(edges, reached)) {
        set_unused(find_unused_params(reached));
    }
}

// Marks the parameters that the edges reach. Returns false if the graph contains a checkpointed
// segment, whose parameters are only known when it is recomputed.
bool Core::find_reached_params(const edge_list &edges, std::vector<char> &reached) const
{
    std::vector<const torch::autograd::Node *> waiting;
    std::unordered_set<const torch::autograd::Node *> seen;
    size_t missing = params_.size();
    const auto meet = [&](const Edge &edge) {
        const torch::autograd::Node *node = edge.function.get();
        if (node && seen.insert(node).second) {
            waiting.push_back(node);
        }
    };
    for (const Edge &edge : edges) {
        meet(edge);
    }
    while (!waiting.empty() && missing > 0) {
        const torch::autograd::Node *node = waiting.back();
        waiting.pop_back();
        const auto found = accumulators_.find(node);
        if (found != accumulators_.end()) {
            reached[found->second] = 1;
            missing--;
        } else if (is_checkpoint(*node)) {
            return false;
        }
        for (const Edge &edge : node->next_edges()) {
            meet(edge);
        }
    }
    return true;
}

} // namespace tddp_torch
