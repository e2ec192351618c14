// Parts of backward that are left for later: collected by the threads that run backward, and run as
// a backward of their own, so that hooks and callbacks at its end see nothing unusual.
#include "torch/autograd/deferred.h"

#include <algorithm>

#include <torch/csrc/autograd/engine.h>

namespace tddp_torch
{

// None of libtorch's.
static constexpr auto debug_info_kind = static_cast<c10::DebugInfoKind>(0x74);

Deferred *Deferred::current()
{
    return static_cast<Deferred *>(c10::ThreadLocalDebugInfo::get(debug_info_kind));
}

void Deferred::begin(std::shared_ptr<Deferred> deferred)
{
    c10::ThreadLocalDebugInfo::_push(debug_info_kind, std::move(deferred));
}

void Deferred::end()
{
    c10::ThreadLocalDebugInfo::_pop(debug_info_kind);
}

uint64_t Deferred::next_sequence_number()
{
    const std::lock_guard<std::mutex> lock(lock_);
    return sequence_number_--;
}

void Deferred::add(NodePointer node, const at::Tensor &gradient)
{
    const std::lock_guard<std::mutex> lock(lock_);
    nodes_.push_back(std::move(node));
    gradients_.push_back(gradient);
}

bool Deferred::leads_to(const at::Tensor &leaf) const
{
    const NodePointer accumulator = torch::autograd::impl::grad_accumulator(leaf);
    const std::lock_guard<std::mutex> lock(lock_);
    return std::any_of(nodes_.begin(), nodes_.end(), [&](const NodePointer &node) {
        const auto &edges = node->next_edges();
        return std::any_of(edges.begin(), edges.end(), [&](const torch::autograd::Edge &edge) {
            return edge.function == accumulator;
        });
    });
}

void Deferred::run()
{
    torch::autograd::edge_list roots;
    torch::autograd::variable_list gradients;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        for (NodePointer &node : nodes_) {
            roots.emplace_back(std::move(node), 0);
        }
        nodes_.clear();
        gradients.swap(gradients_);
    }
    if (!roots.empty()) {
        torch::autograd::Engine::get_default_engine().execute(roots, gradients, false, false, true);
    }
}

} // namespace tddp_torch
