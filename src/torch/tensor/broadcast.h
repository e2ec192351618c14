// Tensors of one rank for all ranks, in a few operations.
#ifndef TDDP_TORCH_BROADCAST_H
#define TDDP_TORCH_BROADCAST_H

#include <memory>
#include <vector>

#include "torch/tensor/agree.h"

namespace tddp_torch
{

// Gives `tensors` of every rank the contents of those of rank `root`, through flat pieces of at
// most `limit` bytes (more if one tensor is larger). Leaves no trace in autograd. One thread at a
// time.
class Broadcast
{
  public:
    Broadcast(tddp_group *group, const std::vector<at::Tensor> &tensors, int root, size_t limit);
    ~Broadcast();
    Broadcast(const Broadcast &) = delete;
    Broadcast &operator=(const Broadcast &) = delete;

    // Throws Failure. If `wait` ended before the operations did, run again; what was started goes
    // on by itself. Dtypes and shapes that differ are TDDP_MISMATCH.
    void run(const tddp_wait *wait);
    int root() const
    {
        return root_;
    }

  private:
    size_t choose_chunk();
    void start_chunk(size_t bytes);
    void end_chunk();

    tddp_group *group_;
    const std::vector<at::Tensor> tensors_;
    const int root_;
    const size_t limit_;
    size_t first_ = 0; // of the chunk that is sent now
    size_t last_ = 0;
    std::vector<at::Tensor> pieces_;
    std::unique_ptr<Operation> operation_;
};

// The same in one call: once the wait has ended early nothing goes on.
void broadcast_tensors(tddp_group *group, const std::vector<at::Tensor> &tensors, int root,
                       size_t limit, const tddp_wait *wait);

} // namespace tddp_torch

#endif
