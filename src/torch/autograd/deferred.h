// Parts of backward that are left for later.
#ifndef TDDP_TORCH_DEFERRED_H
#define TDDP_TORCH_DEFERRED_H

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/util/ThreadLocalDebugInfo.h>

#include "torch/autograd/node.h"

namespace tddp_torch
{

// Nodes whose next edges lead to accumulators of gradients, and the gradient that each gets. While
// one is the current object of a thread it is also that of autograd's threads in a backward that
// this thread calls: libtorch passes its thread-local debug information on to them.
class Deferred final : public c10::DebugInfoBase
{
  public:
    // This thread's, or nullptr.
    static Deferred *current();
    static void begin(std::shared_ptr<Deferred> deferred);
    // Of the one that began last.
    static void end();

    // A sequence number for a node's constructor: the engine runs higher ones first.
    uint64_t next_sequence_number();
    // The node has the metadata of one input, `gradient`.
    void add(NodePointer node, const at::Tensor &gradient);
    // Whether a node is going to pass this leaf a gradient.
    bool leads_to(const at::Tensor &leaf) const;
    // Runs the nodes, in order, and forgets them.
    void run();

  private:
    mutable std::mutex lock_; // backward may have a thread for each device
    uint64_t sequence_number_ = UINT64_MAX / 2;
    std::vector<NodePointer> nodes_;
    torch::autograd::variable_list gradients_;
};

} // namespace tddp_torch

#endif
