// Memory for buckets on devices, as libtorch tensors: libtorch's allocator owns it, and its streams
// order its use. A handle is such a tensor. Any thread, also a group's or autograd's; stateless.
#include "torch/tensor/device_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <tddp/log.h>

#include "torch/tensor/device.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

at::TensorOptions bytes_on(int32_t device)
{
    return at::TensorOptions().dtype(at::kByte).device(device_named(TDDP_CUDA, device));
}

// Read-only if `data` is.
at::Tensor bytes_at(int32_t device, const void *data, size_t bytes)
{
    return tensor_over(const_cast<void *>(data), {static_cast<int64_t>(bytes)}, bytes_on(device));
}

tddp_status allocate(void *, int32_t device, size_t bytes, void **handle, void **data)
{
    return guard([&] {
        const at::NoGradGuard no_grad;
        auto made = std::make_unique<at::Tensor>(
            at::zeros({static_cast<int64_t>(bytes)}, bytes_on(device)));
        *data = made->data_ptr();
        *handle = made.release();
    });
}

void release(void *, void *handle)
{
    // In a process that exits CUDA may be shut down already.
    if (guard([&] { delete static_cast<at::Tensor *>(handle); })) {
        tddp_log(TDDP_LOG_WARN, "torch", "the memory of flat buffers is leaked: %s",
                 tddp_error_message());
    }
}

tddp_status copy(void *, int32_t device, void *into, const void *from, size_t bytes)
{
    return guard([&] {
        const at::NoGradGuard no_grad;
        bytes_at(device, into, bytes).copy_(bytes_at(device, from, bytes));
    });
}

tddp_status zero(void *, int32_t device, void *data, size_t bytes)
{
    return guard([&] {
        const at::NoGradGuard no_grad;
        bytes_at(device, data, bytes).zero_();
    });
}

tddp_status cast(void *, int32_t device, void *into, tddp_dtype into_dtype, const void *from,
                 tddp_dtype from_dtype, size_t count, double divisor)
{
    return guard([&] {
        const at::NoGradGuard no_grad;
        const std::vector<int64_t> sizes{static_cast<int64_t>(count)};
        const at::Tensor source = tensor_over(const_cast<void *>(from), sizes,
                                              bytes_on(device).dtype(scalar_type_of(from_dtype)));
        at::Tensor target =
            tensor_over(into, sizes, bytes_on(device).dtype(scalar_type_of(into_dtype)));
        if (divisor == 1) {
            target.copy_(source);
            return;
        }
        // div_out rounds the quotient to the dividend's dtype: widen that first, to round once.
        const at::Tensor wide = source.element_size() < 4 ? source.to(at::kFloat) : source;
        at::div_out(target, wide, at::scalar_tensor(divisor, at::kDouble));
    });
}

void *stream(void *, int32_t device)
{
    return current_stream(TDDP_CUDA, device);
}

} // namespace

const tddp_device_memory_ops *device_memory()
{
    static const tddp_device_memory_ops ops = {sizeof ops, nullptr, allocate, release,
                                               copy,       zero,    cast,     stream};
    return &ops;
}

} // namespace tddp_torch
