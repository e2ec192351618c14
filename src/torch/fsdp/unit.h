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

namespace tddp_torch
{

class Forward;

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
    bool written = false; // its slice of the flat gradient holds something
    bool arrived = false; // in this backward, since the gradient was last reduced
    bool is_last = false; // and not from a segment that is computed again
    bool used = false;    // in this backward, on any rank
    bool made = false;    // its piece had no gradient before this backward
};

// One thread at a time.
class Unit
{
  public:
    // `copies`: of its device, if it is offloaded; or null.
    Unit(tddp_sharder *sharder, size_t number, const tddp_fsdp_unit_opts &opts,
         std::shared_ptr<HostCopies> copies);
    Unit(const Unit &) = delete;
    Unit &operator=(const Unit &) = delete;

    // --- values
    // The full parameters are in this memory; nullptr: nowhere.
    void place(void *data);
    // The handles refer to full parameters, or to pieces.
    void expose();
    void hide();
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
    void take_gradient(size_t index, void *data, bool last);
    void zero_unwritten(void *data);
    void forget_arrived();
    // `last`: and no more will come, but from segments that are computed again.
    bool all_arrived(bool last) const;
    // Adds the reduced gradient of the shard to the pieces' gradients; of a unit that is offloaded
    // when add_copied() follows, after the copy.
    void add_reduced(void *from, size_t count);
    void add_copied();
    void begin_backward();
    // Pieces of parameters that no rank used have no gradient, if they had none.
    void end_backward();
    // After an exception.
    void reset();

    std::vector<ShardedParam> params;
    tddp_group *shard_group;                       // the sharder's; or nullptr
    tddp_group *replica_group;                     // nullptr: none
    int forwards = 0;                              // that are running
    size_t trained = 0;                            // parameters that need a gradient
    std::vector<std::shared_ptr<Forward>> entered; // the forwards that are running, with grad
    // Forwards that backward has come to and not passed, and those of which the latter is not
    // known.
    int open = 0;
    int open_without_inputs = 0;
    bool passed = false; // backward has passed a forward
    bool in_backward = false;
    bool finalized = false;   // all gradients have arrived in this backward
    bool release_due = false; // and since it was gathered
    bool ran = false;         // a forward with a graph has run since gradients were last reduced

  private:
    at::Tensor flat_slice(void *data, const ShardedParam &param) const;
    void make_piece(const at::Tensor &full, ShardedParam &param) const;
    void add(const at::Tensor &reduced, bool copy);
    void make_full(const at::Tensor &full, ShardedParam &param) const;

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
