// Activation offload by hooks on what operations save for backward. libtorch asks autograd's engine
// for these hooks, whose own has none: see <tddp/torch_offload.h>. Any thread.
//
// The engine that replaces it is the same class but for that answer. Backwards of both may run side
// by side: what one of them needs to know of its backward is thread-local, or in the backward's own
// task; each has its own threads for devices, which an engine starts with its first backward there.
// It is never destroyed: its idle threads end with the process.
#include <tddp/torch_offload.h>

#include <atomic>
#include <mutex>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "torch/autograd/node.h"
#include "torch/tensor/shim.h"
#include "torch/tensor/transient.h"

namespace tddp_torch
{

namespace
{

std::atomic<size_t> tensors_on_cpu{0};
std::atomic<size_t> bytes_on_cpu{0};

// Whether each of this thread's nested blocks pins memory.
thread_local std::vector<bool> blocks;

// Parameters, frozen ones too, and what the host holds as well, such as inputs; and views of them.
// Not masks and indices that operations make.
bool is_leaf(const at::Tensor &tensor)
{
    return can_have_gradient(tensor) &&
           (tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf()));
}

bool to_be_moved(const at::Tensor &tensor)
{
    return tensor.layout() == at::kStrided && !tensor.is_meta() && !is_on_cpu(tensor) &&
           !is_leaf(tensor) && !is_transient(tensor);
}

// One saved tensor: a copy on the CPU, or an alias of the tensor itself. An alias, because an
// output that its own node kept would never be freed.
class SavedTensor final : public torch::autograd::SavedVariableHooks
{
  public:
    explicit SavedTensor(bool pin_memory) : pin_memory_(pin_memory) {}
    ~SavedTensor() override
    {
        if (moved_) {
            tensors_on_cpu--;
            bytes_on_cpu -= bytes_;
        }
    }
    SavedTensor(const SavedTensor &) = delete;
    SavedTensor &operator=(const SavedTensor &) = delete;

    void call_pack_hook(const at::Tensor &tensor) override
    {
        const at::NoGradGuard no_grad;
        device_ = tensor.device();
        if (!to_be_moved(tensor)) {
            saved_ = tensor.detach();
            version_ = saved_._version();
            return;
        }
        pin_memory_ = pin_memory_ && tensor.is_cuda();
        saved_ = at::empty_like(tensor.detach(),
                                at::TensorOptions().device(at::kCPU).pinned_memory(pin_memory_),
                                at::MemoryFormat::Preserve);
        saved_.copy_(tensor.detach(), pin_memory_);
        moved_ = true;
        bytes_ = saved_.nbytes();
        tensors_on_cpu++;
        bytes_on_cpu += bytes_;
    }

    // Backward of an operation runs on the stream of its forward, and so after the copy.
    at::Tensor call_unpack_hook() override
    {
        const at::NoGradGuard no_grad;
        if (moved_) {
            return saved_.to(device_, saved_.scalar_type(), pin_memory_);
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

  private:
    bool pin_memory_;
    bool moved_ = false;
    at::Tensor saved_;
    c10::Device device_{at::kCPU};
    size_t bytes_ = 0;
    int64_t version_ = 0;
};

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
        return blocks.empty() ? nullptr : std::make_unique<SavedTensor>(blocks.back());
    }
};

void install_engine()
{
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    const torch::autograd::Engine *current = &torch::autograd::Engine::get_default_engine();
    if (current == &Engine::instance()) {
        return;
    }
    if (current != &torch::autograd::Engine::get_base_engine()) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "saved tensors cannot be moved to the CPU: another library has "
                                "replaced autograd's engine, as Python does"));
    }
    torch::autograd::set_default_engine_stub(&Engine::instance);
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_save_on_cpu_begin(int pin_memory)
{
    using namespace tddp_torch;
    return guard([&] {
        install_engine();
        blocks.push_back(pin_memory != 0);
    });
}

void tddp_save_on_cpu_end(void)
{
    tddp_torch::blocks.pop_back();
}

tddp_saved_on_cpu tddp_saved_on_cpu_now(void)
{
    return {tddp_torch::tensors_on_cpu, tddp_torch::bytes_on_cpu};
}
