// Pointers to autograd's nodes, whose type depends on libtorch's version.
#ifndef TDDP_TORCH_NODE_H
#define TDDP_TORCH_NODE_H

#include <memory>
#include <type_traits>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace tddp_torch
{

// A shared_ptr or an intrusive_ptr, depending on libtorch's version.
using NodePointer = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

template <typename Made, typename... Arguments> NodePointer make_node(Arguments &&...arguments)
{
    if constexpr (std::is_convertible_v<std::shared_ptr<Made>, NodePointer>) {
        // libtorch's deleter, found by the argument's namespace, frees long chains without
        // recursion.
        return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...),
                                     [](Made *made) { deleteNode(made); });
    } else {
        return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
    }
}

// A node's own pointer.
template <typename Made> NodePointer pointer_to(Made &node)
{
    if constexpr (std::is_convertible_v<std::shared_ptr<Made>, NodePointer>) {
        return node.shared_from_this();
    } else {
        return c10::intrusive_ptr<Made>::unsafe_reclaim_from_nonowning(&node);
    }
}

// Whether autograd knows gradients of the tensor's dtype.
inline bool can_have_gradient(const at::Tensor &tensor)
{
    return tensor.defined() &&
           (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
}

} // namespace tddp_torch

#endif
