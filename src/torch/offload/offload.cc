// Activation offload by hooks on what operations save for backward: see <tddp/torch_offload.h>. Any
// thread.
#include <tddp/torch_offload.h>

#include <atomic>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "torch/autograd/node.h"
#include "torch/autograd/saved_tensors.h"
#include "torch/tensor/shim.h"
#include "torch/tensor/transient.h"

namespace tddp_torch
{

namespace
{

std::atomic<size_t> tensors_on_cpu{0};
std::atomic<size_t> bytes_on_cpu{0};

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

// One saved tensor: a copy on the CPU, or one that stays.
class MovedTensor final : public SavedTensor
{
  public:
    explicit MovedTensor(bool pin_memory) : pin_memory_(pin_memory) {}
    ~MovedTensor() override
    {
        if (moved_) {
            tensors_on_cpu--;
            bytes_on_cpu -= bytes_;
        }
    }
    MovedTensor(const MovedTensor &) = delete;
    MovedTensor &operator=(const MovedTensor &) = delete;

    void call_pack_hook(const at::Tensor &tensor) override
    {
        if (!to_be_moved(tensor)) {
            SavedTensor::call_pack_hook(tensor);
            return;
        }
        const at::NoGradGuard no_grad;
        device_ = tensor.device();
        pin_memory_ = pin_memory_ && tensor.is_cuda();
        copy_ = at::empty_like(tensor.detach(),
                               at::TensorOptions().device(at::kCPU).pinned_memory(pin_memory_),
                               at::MemoryFormat::Preserve);
        copy_.copy_(tensor.detach(), pin_memory_);
        moved_ = true;
        bytes_ = copy_.nbytes();
        tensors_on_cpu++;
        bytes_on_cpu += bytes_;
    }

    // Backward of an operation runs on the stream of its forward, and so after the copy.
    at::Tensor call_unpack_hook() override
    {
        const at::NoGradGuard no_grad;
        return moved_ ? copy_.to(device_, copy_.scalar_type(), pin_memory_)
                      : SavedTensor::call_unpack_hook();
    }

  private:
    bool pin_memory_;
    bool moved_ = false;
    at::Tensor copy_;
    c10::Device device_{at::kCPU};
    size_t bytes_ = 0;
};

} // namespace

} // namespace tddp_torch

tddp_status tddp_save_on_cpu_begin(int pin_memory)
{
    using namespace tddp_torch;
    return guard([&] {
        if (!install_saved_tensors()) {
            throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                    "saved tensors cannot be moved to the CPU: another library has "
                                    "replaced autograd's engine, as Python does"));
        }
        begin_moving([pin = pin_memory != 0] { return std::make_unique<MovedTensor>(pin); });
    });
}

void tddp_save_on_cpu_end(void)
{
    tddp_torch::end_moving();
}

tddp_saved_on_cpu tddp_saved_on_cpu_now(void)
{
    return {tddp_torch::tensors_on_cpu, tddp_torch::bytes_on_cpu};
}
