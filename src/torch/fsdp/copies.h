// Copies between the CPU's memory and a device, beside what the device computes.
#ifndef TDDP_TORCH_FSDP_COPIES_H
#define TDDP_TORCH_FSDP_COPIES_H

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace tddp_torch
{

// One for a device, with a stream in each direction: both follow what the calling thread's current
// stream was given before. One thread at a time. Where host memory counts as a device's, copies are
// made at once.
class HostCopies
{
  public:
    explicit HostCopies(c10::Device device);

    c10::Device device() const
    {
        return device_;
    }
    // Memory of the CPU for copies: page-locked, if that is wanted and there is a device.
    at::Tensor host_memory(int64_t count, at::ScalarType dtype, bool pin_memory) const;
    // Queues a copy to `into`, on the device. Returns the stream, a cudaStream_t.
    void *to_device(const at::Tensor &into, const at::Tensor &from);
    // Queues a copy to `into`, on the CPU.
    void to_cpu(const at::Tensor &into, const at::Tensor &from);
    // The calling thread's current stream waits for all copies.
    void follow() const;
    // The host waits for all copies.
    void synchronize() const;
    // How many bytes were copied, in the dtype of the source.
    size_t bytes_to_device() const
    {
        return bytes_to_device_;
    }
    size_t bytes_to_cpu() const
    {
        return bytes_to_cpu_;
    }

  private:
    c10::Stream current() const;
    void copy(const std::optional<c10::Stream> &stream, const at::Tensor &into,
              const at::Tensor &from) const;

    c10::Device device_;
    std::optional<c10::Stream> inward_; // none: the device is the CPU
    std::optional<c10::Stream> outward_;
    size_t bytes_to_device_ = 0;
    size_t bytes_to_cpu_ = 0;
};

} // namespace tddp_torch

#endif
