// Hooks on what operations save for backward: see saved_tensors.h. Any thread.
//
// The engine that replaces libtorch's is the same class but for the hooks. Backwards of both may
// run side by side: what one of them needs to know of its backward is thread-local, or in the
// backward's own task; each has its own threads for devices and for deep nesting, which it makes
// ready with its first backward. It is never destroyed: its idle threads end with the process.
#include "torch/autograd/saved_tensors.h"

#include <mutex>
#include <vector>

#include <torch/csrc/autograd/engine.h>

#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

thread_local std::vector<SavedTensorMaker> makers;
thread_local int moving; // how many makers: plain, to be read at once
thread_local int keeping;

class Engine final : public torch::autograd::Engine
{
  public:
    static torch::autograd::Engine &instance()
    {
        static auto *const engine = new Engine;
        return *engine;
    }

    std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override
    {
        if (moving > 0) {
            return makers.back()();
        }
        return keeping > 0 ? std::make_unique<SavedTensor>() : nullptr;
    }

    torch::autograd::variable_list execute(const torch::autograd::edge_list &roots,
                                           const torch::autograd::variable_list &inputs,
                                           bool keep_graph, bool create_graph, bool accumulate_grad,
                                           const torch::autograd::edge_list &outputs) override
    {
        std::call_once(started_, [this] { start(); });
        return torch::autograd::Engine::execute(roots, inputs, keep_graph, create_graph,
                                                accumulate_grad, outputs);
    }

  private:
    // Up to libtorch 2.6 every engine starts its threads itself; in 2.11 and later ones only that
    // which runs the first backward of the process.
    void start()
    {
        initialize_device_threads_pool();
        if (device_ready_queues_.empty()) {
            start_device_threads();
        }
    }

    std::once_flag started_;
};

} // namespace

void SavedTensor::call_pack_hook(const at::Tensor &tensor)
{
    saved_ = tensor.is_leaf() ? tensor : tensor.tensor_data();
    version_ = tensor._version();
    TransientOwner *owner = transient_owner(tensor);
    use_ = owner ? owner->current_use() : nullptr;
}

at::Tensor SavedTensor::call_unpack_hook()
{
    if (use_) {
        use_->bring_back();
    }
    // Autograd doesn't compare where there are hooks.
    if (saved_._version() != version_) {
        throw Failure(tddp_fail(
            TDDP_INVALID_ARGUMENT,
            "a tensor of %lld elements that backward needs has been modified by an inplace "
            "operation: it is at version %lld, expected version %lld",
            static_cast<long long>(saved_.numel()), static_cast<long long>(saved_._version()),
            static_cast<long long>(version_)));
    }
    return saved_;
}

bool install_saved_tensors()
{
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    const torch::autograd::Engine *current = &torch::autograd::Engine::get_default_engine();
    if (current == &Engine::instance()) {
        return true;
    }
    if (current != &torch::autograd::Engine::get_base_engine()) {
        return false;
    }
    torch::autograd::set_default_engine_stub(&Engine::instance);
    return true;
}

void begin_moving(SavedTensorMaker maker)
{
    makers.push_back(std::move(maker));
    moving++;
}

void end_moving()
{
    makers.pop_back();
    moving--;
}

void begin_keeping()
{
    keeping++;
}

void end_keeping()
{
    keeping--;
}

} // namespace tddp_torch
