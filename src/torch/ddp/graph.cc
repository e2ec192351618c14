// The node through which backward passes first, and what a loss depends on: a walk along the graph
// behind it. On the thread that runs forward, and by autograd on the one that runs backward.
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

class OpenNode final : public torch::autograd::Node
{
  public:
    explicit OpenNode(std::shared_ptr<Core> core) : core_(std::move(core)) {}
    variable_list apply(variable_list &&grads) override
    {
        edge_list wanted;
        for (size_t i = 0; i < grads.size(); i++) {
            if (grads[i].defined() && next_edge(i).is_valid()) {
                wanted.push_back(next_edge(i));
            }
        }
        core_->opened(wanted);
        return std::move(grads);
    }
    std::string name() const override
    {
        return "GradientSyncBackward";
    }

  private:
    std::shared_ptr<Core> core_;
};

// Another tensor with the same elements and no history yet. It shares memory and version, so that
// a change in place is noticed wherever the output was saved for backward; a view gets a copy, for
// a change in place would be the original's too and its history would not know.
at::Tensor alias_of(const at::Tensor &output)
{
    const at::NoGradGuard no_grad;
    at::Tensor alias = output.is_view() ? output.clone() : output.detach();
    alias.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
    return alias;
}

} // namespace

void Core::know_accumulators(const std::vector<NodePointer> &accumulators)
{
    for (size_t i = 0; i < accumulators.size(); i++) {
        accumulators_.emplace(accumulators[i].get(), i);
    }
}

bool Core::wants_outputs() const
{
    return armed() && (find_unused_ || first_static_round());
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
    const NodePointer node = make_node<OpenNode>(shared_from_this());
    node->set_next_edges(std::move(edges));
    for (at::Tensor *output : differentiable) {
        at::Tensor alias = alias_of(*output);
        torch::autograd::create_gradient_edge(alias, node);
        *output = std::move(alias);
    }
}

void Core::opened(const edge_list &edges)
{
    if (!armed()) {
        return;
    }
    queue_end(false);
    if (!find_unused_) {
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(lock_);
        if (known_) {
            return;
        }
    }
    // Another forward's outputs may be part of the same loss.
    std::vector<char> reached(params_.size());
    if (forwards_ == 1 && walk(edges, reached)) {
        announce(left_out(reached));
    }
}

// Marks the parameters behind the edges. False if that cannot be told: what a checkpointed segment
// uses is only known when it runs again.
bool Core::walk(const edge_list &edges, std::vector<char> &reached) const
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
