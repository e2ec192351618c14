// Memory that comes and goes under a tensor: that of sharded parameters.
#ifndef TDDP_TORCH_TRANSIENT_H
#define TDDP_TORCH_TRANSIENT_H

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace tddp_torch
{

// A use of such memory by operations that saved tensors with it.
class TransientUse
{
  public:
    virtual ~TransientUse() = default;
    // In backward: the memory is there afterwards. Throws Failure.
    virtual void bring_back() = 0;
};

// Whose memory it is.
class TransientOwner
{
  public:
    virtual ~TransientOwner() = default;
    // By operations of this moment; nullptr: it is not brought back for them.
    virtual std::shared_ptr<TransientUse> current_use() = 0;
};

// Memory that others own, at `data`, or none, for a storage that is recognized by it. `owner` is
// borrowed, or nullptr.
at::DataPtr transient_memory(void *data, TransientOwner *owner, c10::Device device);
// Whether the tensor's storage has such memory.
bool is_transient(const at::Tensor &tensor);
// nullptr: it has not, or none that brings it back.
TransientOwner *transient_owner(const at::Tensor &tensor);

} // namespace tddp_torch

#endif
