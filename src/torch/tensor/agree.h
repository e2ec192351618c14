// Operations whose result is needed at once, and a few numbers of every rank put together by them.
#ifndef TDDP_TORCH_AGREE_H
#define TDDP_TORCH_AGREE_H

#include "torch/tensor/shim.h"

namespace tddp_torch
{

// An operation on the memory of some tensors. While it is under way it keeps that memory, also when
// nobody waits any longer.
class Operation
{
  public:
    // Takes over the work.
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

// Takes over a work on the memory of these tensors and waits for it, in `region` if that is given,
// else with `wait`; for tensors on a device the calling thread's stream waits. Throws Failure.
// While the operation is not done it keeps the memory.
void complete(tddp_work *work, std::vector<at::Tensor> tensors, tddp_blocking_region region,
              const tddp_wait *wait);

// All ranks' `tensor` combined in place, waited for as above.
void combine_over_ranks(tddp_group *group, const at::Tensor &tensor, tddp_reduce_op op,
                        tddp_blocking_region region, const tddp_wait *wait);

// `gathered` [world_size, ...] receives each rank's `tensor`, as above.
void gather_over_ranks(tddp_group *group, const at::Tensor &tensor, const at::Tensor &gathered,
                       tddp_blocking_region region, const tddp_wait *wait);

} // namespace tddp_torch

#endif
