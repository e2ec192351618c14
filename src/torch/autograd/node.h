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
        return std::make_shared<Made>(std::forward<Arguments>(arguments)...);
    } else {
        return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
    }
}

} // namespace tddp_torch

#endif
