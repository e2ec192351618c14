// Copies between the CPU and a device: see copies.h.
#include "torch/fsdp/copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/tensor/device.h"

namespace tddp_torch
{

// Later work on `stream` comes after what `earlier` was given.
static void order(const c10::Stream &stream, const c10::Stream &earlier)
{
    c10::Event event(earlier.device_type());
    event.record(earlier);
    event.block(stream);
}

HostCopies::HostCopies(c10::Device device) : device_(device)
{
    if (!device.is_cpu()) {
        const c10::impl::VirtualGuardImpl guard(device.type());
        inward_ = guard.getStreamFromGlobalPool(device);
        outward_ = guard.getStreamFromGlobalPool(device);
    }
}

c10::Stream HostCopies::current() const
{
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

at::Tensor HostCopies::host_memory(int64_t count, at::ScalarType dtype, bool pin_memory) const
{
    return at::empty({count}, at::TensorOptions(at::kCPU).dtype(dtype).pinned_memory(
                                  pin_memory && !device_.is_cpu()));
}

// A copy that changes the dtype does so on the device.
void HostCopies::copy(const std::optional<c10::Stream> &stream, const at::Tensor &into,
                      const at::Tensor &from) const
{
    const at::NoGradGuard no_grad;
    c10::OptionalStreamGuard guard;
    if (stream) {
        guard.reset_stream(*stream);
    }
    into.copy_(from, stream.has_value());
}

void *HostCopies::to_device(const at::Tensor &into, const at::Tensor &from)
{
    if (inward_) {
        order(*inward_, current());
    }
    copy(inward_, into, from);
    bytes_to_device_ += from.nbytes();
    return inward_ ? native_stream(*inward_) : nullptr;
}

void HostCopies::to_cpu(const at::Tensor &into, const at::Tensor &from)
{
    if (outward_) {
        order(*outward_, current());
    }
    copy(outward_, into, from);
    bytes_to_cpu_ += from.nbytes();
}

void HostCopies::follow() const
{
    if (inward_) {
        order(current(), *inward_);
        order(current(), *outward_);
    }
}

void HostCopies::synchronize() const
{
    if (inward_) {
        inward_->synchronize();
        outward_->synchronize();
    }
}

} // namespace tddp_torch
