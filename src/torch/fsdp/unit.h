// A unit of a fully sharded model, as tensors: the pieces that this rank holds, and the full
// parameters, whose memory comes and goes.
#ifndef TDDP_TORCH_FSDP_UNIT_H
#define TDDP_TORCH_FSDP_UNIT_H

#include <memory>
#include <string>
#include <vector>

#include <c10/core/Storage.h>
#include <tddp/torch_fsdp.h>

#include "torch/autograd/node.h"
#include "torch/fsdp/copies.h"
#include "torch/tensor/shim.h"
#include "torch/tensor/transient.h"

namespace tddp_torch
{

class Forward;
class ShardedModel;

struct ShardedParam {
    at::Tensor *handle; // the host's
    std::string name;
    std::vector<int64_t> sizes;
    at::Tensor piece;        // of this rank; one dimension, a leaf
    at::Tensor full;         // a leaf; without memory unless the unit is unsharded
    int64_t offset = 0;      // in the flat buffer
    int64_t start = 0;       // of the piece, in the parameter
    NodePointer accumulator; // of `full`, with a hook; null: it needs no gradient
    uintptr_t hook = 0;
    bool holds = false; // a sum of gradients that is not reduced yet, in the flat gradient
    bool used = false;  // such a sum, of any rank, is among what this backward has reduced
    bool made = false;  // its piece had no gradient before this backward
};

// Where forward is: it comes to units and leaves them one after the other.
using Position = uint64_t;
constexpr Position NEVER = UINT64_MAX;

// One thread at a time.
class Unit final : public TransientOwner
{
  public:
    // `copies`: of its device, if it is offloaded; or null.
    Unit(tddp_sharder *sharder, size_t number, const tddp_fsdp_unit_opts &opts,
         std::shared_ptr<HostCopies> copies);
    ~Unit() override;
    Unit(const Unit &) = delete;
    Unit &operator=(const Unit &) = delete;

    // --- values
    // The full parameters are in this memory; nullptr: nowhere.
    void place(void *data);
    // The unit is this one of a model.
    void join(std::weak_ptr<ShardedModel> model, size_t number);
    bool placed() const;
    std::shared_ptr<TransientUse> current_use() override;
    // The handles refer to full parameters, or to pieces.
    void expose();
    void hide();
    bool hidden() const;
    // The handles refer to parts of a tensor with all ranks' shards; their values are kept in
    // pieces.
    void show(const at::Tensor &flat);
    void keep_shown() const;
    at::Tensor shard() const;
    bool on_device() const
    {
        return !is_on_cpu(params[0].full);
    }
    void cast_shard(void *into, size_t count) const;
    // The same for a unit that is offloaded. Returns the stream.
    void *load_shard(void *into, size_t count) const;
    // The user may freeze parameters between steps. Returns those that need a hook.
    std::vector<size_t> follow_requires_grad();

    // --- gradients
    // Moves a gradient to its slice of the flat gradient at `data`.
    void take_gradient(size_t index, void *data);
    // Before the flat gradient is reduced: what has no sum in it is zero.
    void close_gradient(void *data);
    // Adds the reduced gradient of the shard to the pieces' gradients; of a unit that is offloaded
    // when add_copied() follows, after the copy.
    void add_reduced(void *from, size_t count);
    void add_copied();
    // Pieces of parameters that no rank used have no gradient, if they had none.
    void end_backward();
    // After an exception.
    void reset();

    std::vector<ShardedParam> params;
    tddp_group *shard_group;                       // the sharder's; or nullptr
    tddp_group *replica_group;                     // nullptr: none
    int forwards = 0;                              // that are running
    size_t trained = 0;                            // parameters that need a gradient
    std::vector<std::shared_ptr<Forward>> running; // forwards
    // The last forward that was not within backward.
    Position last_entered = NEVER;
    Position last_left = NEVER;
    // The earliest of the forwards that backward may still come to, or has come to in this
    // backward; NEVER: the last backward is over, and none has run since.
    Position since = NEVER;
    // Its gradient is reduced by the next backward that synchronizes it: a forward that trains has
    // run since it was last reduced, or backward has come to one. The same on all ranks.
    bool due = false;
    bool sync = true;
    bool in_backward = false;

  private:
    at::Tensor flat_slice(void *data, const ShardedParam &param) const;
    void make_piece(const at::Tensor &full, ShardedParam &param) const;
    void add(const at::Tensor &reduced, bool copy);
    void make_full(const at::Tensor &full, ShardedParam &param) const;

    std::weak_ptr<ShardedModel> model_;
    size_t number_;
    c10::Storage storage_; // of the full parameters
    size_t ranks_;
    size_t full_bytes_;
    tddp_buffer shard_;
    int64_t shard_offset_;
    std::shared_ptr<void> shard_memory_;
    at::TensorOptions options_;       // of full parameters, in the parameters' dtype
    at::TensorOptions piece_options_; // of pieces, on the CPU if the unit is offloaded
    std::shared_ptr<HostCopies> copies_;
    bool pin_memory_;
    at::Tensor host_shard_;          // of a unit that is offloaded
    std::vector<at::Tensor> copied_; // reduced gradients, on their way to the CPU
    at::ScalarType gather_type_;
    at::ScalarType reduce_type_;
};

} // namespace tddp_torch

#endif
