// Backward of a fully sharded model: see model.h. It comes to a forward of a unit by a hook on its
// outputs, and runs what forward made last first: so it is done with the units whose forward began
// after that one had ended. They are freed, and their gradients reduced. What no unit's outputs
// follow is done at the end of backward.
//
// When a gradient arrives decides nothing: ranks may use other parameters of a unit, and have to
// reduce and gather units in one order nevertheless.
#include <algorithm>

#include <ATen/ops/empty.h>
#include <tddp/trace.h>

#include "torch/autograd/end_of_backward.h"
#include "torch/fsdp/model.h"
#include "torch/tensor/blocking_ops.h"

namespace tddp_torch
{

void ShardedModel::begin_backward()
{
    if (in_backward_) {
        return;
    }
    at_end_of_backward([model = shared_from_this()] { model->end_backward(); });
    in_backward_ = true;
    backward_number_++;
    backward_ns_ = tddp_trace_enabled() ? tddp_trace_now() : 0;
    tddp_sharder_begin_backward(sharder_);
}

void ShardedModel::forward_reached(size_t number, Position entered, Position left)
{
    Unit &of = unit(number);
    close_units(left);
    of.since = std::min(of.since, entered);
    of.due = of.due || of.trained > 0;
    gather(number);
}

void ShardedModel::recompute(size_t number)
{
    begin_backward();
    forward_reached(number, unit(number).last_entered, unit(number).last_left);
}

void ShardedModel::gather(size_t number)
{
    Unit &of = unit(number);
    if (of.in_backward) {
        return;
    }
    waiting([this, number](const tddp_wait *wait) {
        return tddp_sharder_before_backward(sharder_, number, wait);
    });
    of.in_backward = true;
    if (!of.on_device()) { // for segments that are computed again, which run on this thread
        of.expose();
    }
}

void ShardedModel::gradient_arrived(size_t number, size_t index)
{
    begin_backward();
    Unit &of = unit(number);
    void *data = nullptr;
    int fresh = 0;
    check(tddp_sharder_gradient(sharder_, number, &data, &fresh));
    of.take_gradient(index, data);
    of.due = true;
}

// Those with something to be done, the last one's forward first. Their order is the same on all
// ranks.
std::vector<size_t> ShardedModel::units_after(Position position) const
{
    std::vector<size_t> found;
    for (size_t number = units_.size(); number-- > 0;) {
        const Unit &of = unit(number);
        if (of.since > position && (of.in_backward || of.due)) {
            found.push_back(number);
        }
    }
    std::stable_sort(found.begin(), found.end(),
                     [this](size_t a, size_t b) { return unit(a).since > unit(b).since; });
    return found;
}

void ShardedModel::close_units(Position position)
{
    for (const size_t number : units_after(position)) {
        Unit &of = unit(number);
        if (of.in_backward && of.forwards == 0) {
            release(number);
        }
        if (of.due && of.sync) {
            reduce(number);
        }
    }
}

void ShardedModel::release(size_t number)
{
    Unit &of = unit(number);
    of.in_backward = false;
    tddp_sharder_after_backward(sharder_, number);
    if (of.forwards == 0) {
        of.hide();
    }
}

// Also if no gradient came to the unit here: on another rank some may have come.
void ShardedModel::reduce(size_t number)
{
    Unit &of = unit(number);
    void *data = nullptr;
    int fresh = 0;
    check(tddp_sharder_gradient(sharder_, number, &data, &fresh));
    of.close_gradient(data);
    of.due = false;
    reduced_.push_back(number);
    waiting([this, number](const tddp_wait *wait) {
        return tddp_sharder_reduce(sharder_, number, wait);
    });
}

void ShardedModel::end_backward()
{
    if (!in_backward_) {
        return;
    }
    const int64_t last_ns = tddp_trace_enabled() ? tddp_trace_now() : 0;
    close_units(0);
    for (size_t number = units_.size(); number-- > 0;) {
        if (unit(number).forwards == 0) {
            release(number);
        }
    }
    waiting([this](const tddp_wait *wait) { return tddp_sharder_finish(sharder_, wait); });
    await_copies();
    for (const auto &unit : units_) {
        unit->add_copied();
    }
    exchange_used();
    for (const auto &unit : units_) {
        unit->end_backward();
    }
    in_backward_ = false;
    trace(last_ns);
}

// Beside the spans of the group's operations.
void ShardedModel::trace(int64_t last_ns)
{
    if (tddp_trace_enabled() && forward_ns_ > 0 && backward_ns_ > 0 && last_ns > 0) {
        const int64_t now = tddp_trace_now();
        tddp_trace_span("training", "forward", forward_ns_, backward_ns_, nullptr);
        tddp_trace_span("training", "backward", backward_ns_, now, nullptr);
        tddp_trace_span("training", "wait", last_ns, now, nullptr);
    }
    forward_ns_ = 0;
    backward_ns_ = 0;
}

// Which parameters any rank has used, of the units that were reduced. Groups in the order in which
// units have them, which is the same on all ranks.
void ShardedModel::exchange_used()
{
    std::sort(reduced_.begin(), reduced_.end());
    reduced_.erase(std::unique(reduced_.begin(), reduced_.end()), reduced_.end());
    for (tddp_group *Unit::*kind : {&Unit::shard_group, &Unit::replica_group}) {
        std::vector<Unit *> left;
        for (const size_t number : reduced_) {
            if (unit(number).*kind && tddp_group_world_size(unit(number).*kind) > 1) {
                left.push_back(&unit(number));
            }
        }
        while (!left.empty()) {
            tddp_group *group = left.front()->*kind;
            const c10::Device device = left.front()->params[0].full.device();
            const auto others = std::stable_partition(left.begin(), left.end(), [&](Unit *of) {
                return of->*kind == group && of->params[0].full.device() == device;
            });
            exchange_used(group, {left.begin(), others});
            left.erase(left.begin(), others);
        }
    }
    reduced_.clear();
}

// A rank that has used everything knows the outcome. So the host need not wait for a device, unless
// this rank is to learn something.
void ShardedModel::exchange_used(tddp_group *group, const std::vector<Unit *> &units)
{
    std::vector<ShardedParam *> params;
    for (Unit *of : units) {
        for (ShardedParam &param : of->params) {
            params.push_back(&param);
        }
    }
    const auto known = [](const ShardedParam *param) {
        return param->used || !param->piece.requires_grad();
    };
    const at::Tensor flags = at::empty({static_cast<int64_t>(params.size())}, at::kByte);
    std::transform(params.begin(), params.end(), flags.data_ptr<uint8_t>(), known);
    const at::Tensor exchanged = flags.to(units.front()->params[0].full.device());
    all_reduce_blocking(group, exchanged, TDDP_REDUCE_MAX, region_, nullptr);
    if (std::all_of(params.begin(), params.end(), known)) {
        return;
    }
    const at::Tensor result = exchanged.cpu();
    for (size_t i = 0; i < params.size(); i++) {
        params[i]->used = result.data_ptr<uint8_t>()[i] != 0;
    }
}

} // namespace tddp_torch
