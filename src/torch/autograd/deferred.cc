// Parts of backward that are left for later: collected by the threads that run backward, and run as
// a backward of their own, so that hooks and callbacks at its end see nothing unusual.
#include "torch/autograd/deferred.h"

#include <algorithm>
#include <string_view>
#include <type_traits>

#include <torch/csrc/autograd/engine.h>

namespace tddp_torch
{

// A kind of our own: a number that is none of libtorch's, or from 2.14 on the address of a name.
template <typename Kind> static Kind own_kind()
{
    if constexpr (std::is_enum_v<Kind>) {
        return static_cast<Kind>(0x74);
    } else {
        static constexpr std::string_view name = "TDDP_DEFERRED";
        return Kind(&name);
    }
}

static const auto debug_info_kind = own_kind<c10::DebugInfoKind>();

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
