// A fully sharded model: its units, and what autograd's hooks do with them in backward.
#ifndef TDDP_TORCH_FSDP_MODEL_H
#define TDDP_TORCH_FSDP_MODEL_H

#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Stream.h>

#include "torch/fsdp/unit.h"

namespace tddp_torch
{

// Forward on one thread, backward on autograd's of one device: never two at a time. A graph keeps
// the model.
class ShardedModel : public std::enable_shared_from_this<ShardedModel>
{
  public:
    explicit ShardedModel(tddp_blocking_region region);
    ~ShardedModel();
    ShardedModel(const ShardedModel &) = delete;
    ShardedModel &operator=(const ShardedModel &) = delete;

    tddp_sharder *sharder() const
    {
        return sharder_;
    }
    Unit &unit(size_t number) const
    {
        return *units_[number];
    }
    void add(const tddp_fsdp_unit_opts &opts, const tddp_wait *wait);
    void merge(ShardedModel &from);

    // --- forward
    void begin_forward();
    void end_forward();
    void before_forward(size_t number, const tddp_wait *wait);
    void enter(size_t number);
    void leave(size_t number, const std::vector<at::Tensor *> &outputs);
    void abandon();
    // Whether a backward has begun and failed.
    bool unfinished() const;

    // The host waits for copies between the CPU and devices: the pieces may be written then.
    void await_copies() const;
    tddp_fsdp_copied copied_bytes() const;

    // --- backward, called by hooks
    void begin_backward();
    // Backward has come to a forward of the unit, which was between these positions.
    void forward_reached(size_t number, Position entered, Position left);
    // A segment of the unit's forward is about to be computed again.
    void recompute(size_t number);
    void gradient_arrived(size_t number, size_t index);
    Position position() const
    {
        return position_;
    }
    uint64_t backward_number() const
    {
        return backward_number_;
    }

  private:
    static void place(void *self, size_t unit, void *data);
    static tddp_status cast_shard(void *self, size_t unit, void *into, size_t count);
    static tddp_status reduced(void *self, size_t unit, void *from, size_t count);
    static tddp_status load_shard(void *self, size_t unit, void *into, size_t count, void **stream);
    static tddp_status follow_copies(void *self, int32_t device);

    void add_device(c10::Device device);
    std::shared_ptr<HostCopies> copies_of(c10::Device device);
    void add_hooks(size_t number);
    void end_backward();
    void gather(size_t number);
    std::vector<size_t> units_after(Position position) const;
    void close_units(Position position);
    void release(size_t number);
    void reduce(size_t number);
    void trace(int64_t last_ns);
    void exchange_used();
    void exchange_used(tddp_group *group, const std::vector<Unit *> &units);
    // Waits in the host's region, if it has to.
    void waiting(const std::function<tddp_status(const tddp_wait *wait)> &body) const;

    const tddp_blocking_region region_;
    tddp_device_memory_ops device_;
    tddp_sharder *sharder_ = nullptr;
    std::vector<std::unique_ptr<Unit>> units_;
    std::vector<c10::Device> devices_;
    std::vector<std::shared_ptr<HostCopies>> copies_; // of units that are offloaded
    std::vector<c10::Stream> streams_;                // of the thread that runs forward
    Position position_ = 0;
    bool in_backward_ = false;
    uint64_t backward_number_ = 0;
    std::vector<size_t> reduced_; // units, in this backward
    int64_t forward_ns_ = 0;      // when it began, for the trace; 0: there is none
    int64_t backward_ns_ = 0;
};

} // namespace tddp_torch

#endif
