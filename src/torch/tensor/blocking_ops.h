// Blocking operations on tensors.
#ifndef TDDP_TORCH_BLOCKING_OPS_H
#define TDDP_TORCH_BLOCKING_OPS_H

#include "torch/tensor/shim.h"

namespace tddp_torch
{

// Throws Failure.
tddp_buffer buffer_of(const at::Tensor &tensor);

// An operation on the memory of some tensors, which it keeps until it completes, also if this
// object is destroyed before.
class Operation
{
  public:
    // Owns the work.
    Operation(tddp_work *work, std::vector<at::Tensor> tensors);
    ~Operation();
    Operation(const Operation &) = delete;
    Operation &operator=(const Operation &) = delete;

    // For tensors on a device the stream that was current at construction waits. Throws Failure; if
    // `wait` ended first, wait again.
    void wait(tddp_blocking_region region, const tddp_wait *wait) const;

  private:
    tddp_work *work_;
    std::vector<at::Tensor> tensors_;
    bool on_device_ = false;
    void *stream_ = nullptr;
};

// Submits an operation. Where that may block, as a launch on a device does while ranks connect, it
// runs in `region`, if that is given. Throws Failure.
tddp_work *submit(tddp_group *group, const tddp_op_args &args, tddp_blocking_region region);

// Waits for a work on the memory of these tensors, and releases it. Waits in `region` if that is
// given, else with `wait`; for tensors on a device the calling thread's current stream waits.
// Throws Failure. The operation keeps the memory until it completes.
void wait_for(tddp_work *work, std::vector<at::Tensor> tensors, tddp_blocking_region region,
              const tddp_wait *wait);

// Reduces `tensor` over the ranks, in place, and waits as above.
void all_reduce_blocking(tddp_group *group, const at::Tensor &tensor, tddp_reduce_op op,
                         tddp_blocking_region region, const tddp_wait *wait);

// Gathers each rank's `tensor` into `gathered` [world_size, ...], and waits as above.
void all_gather_blocking(tddp_group *group, const at::Tensor &tensor, const at::Tensor &gathered,
                         tddp_blocking_region region, const tddp_wait *wait);

} // namespace tddp_torch

#endif
