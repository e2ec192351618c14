// A coalesced broadcast of many tensors.
#ifndef TDDP_TORCH_BROADCAST_H
#define TDDP_TORCH_BROADCAST_H

#include <memory>
#include <vector>

#include "torch/tensor/blocking_ops.h"

namespace tddp_torch
{

// Broadcasts `tensors` from rank `root`, in flat chunks of at most `limit` bytes (more if one
// tensor is larger). Invisible to autograd. One thread at a time.
class Broadcast
{
  public:
    Broadcast(tddp_group *group, const std::vector<at::Tensor> &tensors, int root, size_t limit);
    ~Broadcast();
    Broadcast(const Broadcast &) = delete;
    Broadcast &operator=(const Broadcast &) = delete;

    // Throws Failure. If `wait` ended before the operations did, run again; a pending operation
    // continues meanwhile. Different dtypes or shapes are TDDP_MISMATCH.
    void run(const tddp_wait *wait);
    int root() const
    {
        return root_;
    }

  private:
    size_t choose_chunk();
    void start_chunk(size_t bytes, tddp_cancel *cancel);
    void end_chunk();

    tddp_group *group_;
    const std::vector<at::Tensor> tensors_;
    const int root_;
    const size_t limit_;
    size_t first_ = 0; // the current chunk is [first_, last_)
    size_t last_ = 0;
    std::vector<at::Tensor> views_;
    std::unique_ptr<Operation> operation_;
};

// The same in one call, which can't be continued after a wait that ended early.
void broadcast_tensors(tddp_group *group, const std::vector<at::Tensor> &tensors, int root,
                       size_t limit, const tddp_wait *wait);

} // namespace tddp_torch

#endif
