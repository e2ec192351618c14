// Backward of a fully sharded model: see model.h. It comes to a unit by a hook on its outputs, and
// has passed it when all its parameters' gradients and those of its inputs are there; what it does
// not come to is done at its end.
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
    in_backward_ = true;
    backward_number_++;
    backward_ns_ = tddp_trace_enabled() ? tddp_trace_now() : 0;
    for (const auto &unit : units_) {
        unit->begin_backward();
    }
    at_end_of_backward([model = shared_from_this()] { model->end_backward(); });
}

void ShardedModel::outputs_reached(size_t number)
{
    begin_backward();
    Unit &of = unit(number);
    if (of.in_backward) {
        return;
    }
    waiting([this, number](const tddp_wait *wait) {
        return tddp_sharder_before_backward(sharder_, number, wait);
    });
    of.in_backward = true;
    of.release_due = false;
    of.forget_arrived();
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
    of.take_gradient(index, data, !NestedBackward::running());
    finalize_if_last(number);
}

void ShardedModel::forward_reached(size_t number, bool with_inputs)
{
    Unit &of = unit(number);
    (with_inputs ? of.open : of.open_without_inputs)++;
}

void ShardedModel::forward_passed(size_t number)
{
    Unit &of = unit(number);
    of.open--;
    of.passed = true;
    if (in_backward_) {
        finalize_if_last(number);
    }
}

// When all gradients of the unit have arrived, and no more will come, they are reduced. That is so
// if all have come from outside of segments that are computed again, or if backward has passed the
// inputs of every forward. Then nothing that backward has still to do reads the parameters; only
// frozen ones may still be read where no inputs show that they are not.
void ShardedModel::finalize_if_last(size_t number)
{
    Unit &of = unit(number);
    const bool last = of.all_arrived(true) && !of.finalized;
    const bool passed = of.passed && of.open == 0 && of.open_without_inputs == 0;
    const bool all = last || (passed && of.all_arrived(false));
    const bool frozen = of.trained < of.params.size();
    of.finalized = of.finalized || last;
    of.release_due = of.release_due || all;
    if (of.in_backward && of.release_due && (passed || (of.open == 0 && !frozen))) {
        release(number);
    }
    if (all) {
        of.forget_arrived();
        if (sync_ && tddp_sharder_has_gradient(sharder_, number)) {
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

void ShardedModel::reduce(size_t number)
{
    Unit &of = unit(number);
    void *data = nullptr;
    int fresh = 0;
    check(tddp_sharder_gradient(sharder_, number, &data, &fresh));
    of.zero_unwritten(data);
    of.ran = false;
    waiting([this, number](const tddp_wait *wait) {
        return tddp_sharder_reduce(sharder_, number, wait);
    });
}

// Every rank reduces the units that it ran, also if no gradient came to one of them here: on
// another rank some may have come.
void ShardedModel::end_backward()
{
    if (!in_backward_) {
        return;
    }
    for (size_t number = units_.size(); number-- > 0;) {
        Unit &of = unit(number);
        if (of.forwards == 0) {
            release(number);
        }
        const bool due = of.ran || tddp_sharder_has_gradient(sharder_, number);
        if (sync_ && due && of.trained > 0) {
            reduce(number);
        }
    }
    const int64_t last_ns = tddp_trace_enabled() ? tddp_trace_now() : 0;
    waiting([this](const tddp_wait *wait) { return tddp_sharder_finish(sharder_, wait); });
    await_copies();
    for (const auto &unit : units_) {
        unit->add_copied();
    }
    if (sync_) {
        exchange_used();
    }
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

// Groups in the order in which units have them, which is the same on all ranks.
void ShardedModel::exchange_used()
{
    for (tddp_group *Unit::*kind : {&Unit::shard_group, &Unit::replica_group}) {
        std::vector<tddp_group *> groups;
        for (const auto &unit : units_) {
            tddp_group *group = (*unit).*kind;
            if (group && std::find(groups.begin(), groups.end(), group) == groups.end()) {
                groups.push_back(group);
            }
        }
        for (tddp_group *group : groups) {
            exchange_used(group, kind);
        }
    }
}

void ShardedModel::exchange_used(tddp_group *group, tddp_group *Unit::*kind)
{
    std::vector<bool *> flags;
    for (const auto &unit : units_) {
        // For a device the host would have to wait.
        if ((*unit).*kind == group && !unit->on_device()) {
            for (ShardedParam &param : unit->params) {
                flags.push_back(&param.used);
            }
        }
    }
    if (flags.empty() || tddp_group_world_size(group) == 1) {
        return;
    }
    const at::Tensor exchanged = at::empty({static_cast<int64_t>(flags.size())}, at::kByte);
    auto *bytes = exchanged.data_ptr<uint8_t>();
    std::transform(flags.begin(), flags.end(), bytes, [](const bool *flag) { return *flag; });
    all_reduce_blocking(group, exchanged, TDDP_REDUCE_MAX, region_, nullptr);
    for (size_t i = 0; i < flags.size(); i++) {
        *flags[i] = bytes[i] != 0;
    }
}

} // namespace tddp_torch
