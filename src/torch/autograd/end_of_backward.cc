// Callbacks at the end of backward: queued in autograd's engine, or collected by the thread's
// innermost nested backward until it is closed. Called by the threads that run backward.
#include "torch/autograd/end_of_backward.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>

namespace tddp_torch
{

static thread_local NestedBackward *innermost;

NestedBackward::NestedBackward() : outer_(innermost)
{
    innermost = this;
}

NestedBackward::~NestedBackward()
{
    innermost = outer_;
}

bool NestedBackward::running()
{
    return innermost != nullptr;
}

void NestedBackward::close()
{
    innermost = outer_;
    for (auto &callback : callbacks_) {
        at_end_of_backward(std::move(callback));
    }
    callbacks_.clear();
}

void at_end_of_backward(std::function<void()> callback)
{
    if (innermost) {
        innermost->callbacks_.push_back(std::move(callback));
    } else {
        torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
    }
}

} // namespace tddp_torch
