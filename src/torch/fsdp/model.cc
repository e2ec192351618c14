// A fully sharded model: its units, and their forward. See model.h; backward.cc has the rest.
#include "torch/fsdp/model.h"

#include <algorithm>
#include <iterator>

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <tddp/log.h>
#include <tddp/trace.h>

#include "torch/autograd/saved_tensors.h"
#include "torch/checkpoint/checkpoint.h"
#include "torch/fsdp/hooks.h"
#include "torch/tensor/device.h"
#include "torch/tensor/device_memory.h"

namespace tddp_torch
{

ShardedModel::ShardedModel(tddp_blocking_region region) : region_(region), device_(*device_memory())
{
    tddp_sharder_ops ops{};
    ops.size = sizeof ops;
    ops.user = this;
    ops.place = place;
    ops.cast_shard = cast_shard;
    ops.reduced = reduced;
    ops.device = &device_;
    ops.load_shard = load_shard;
    ops.follow_copies = follow_copies;
    check(tddp_sharder_create(&ops, &sharder_));
}

ShardedModel::~ShardedModel()
{
    for (const auto &unit : units_) {
        for (ShardedParam &param : unit->params) {
            if (param.accumulator) {
                param.accumulator->del_post_hook(param.hook);
            }
        }
    }
    if (guard([&] { await_copies(); })) {
        tddp_log(TDDP_LOG_WARN, "torch", "copies of a sharded model: %s", tddp_error_message());
    }
    tddp_sharder_free(sharder_);
}

void ShardedModel::place(void *self, size_t unit, void *data)
{
    static_cast<ShardedModel *>(self)->unit(unit).place(data);
}

tddp_status ShardedModel::cast_shard(void *self, size_t unit, void *into, size_t count)
{
    return guard([&] { static_cast<ShardedModel *>(self)->unit(unit).cast_shard(into, count); });
}

tddp_status ShardedModel::reduced(void *self, size_t unit, void *from, size_t count)
{
    return guard([&] { static_cast<ShardedModel *>(self)->unit(unit).add_reduced(from, count); });
}

tddp_status ShardedModel::load_shard(void *self, size_t unit, void *into, size_t count,
                                     void **stream)
{
    return guard(
        [&] { *stream = static_cast<ShardedModel *>(self)->unit(unit).load_shard(into, count); });
}

tddp_status ShardedModel::follow_copies(void *self, int32_t device)
{
    return guard([&] {
        for (const auto &copies : static_cast<ShardedModel *>(self)->copies_) {
            if (copies->device() == device_named(TDDP_CUDA, device)) {
                copies->follow();
            }
        }
    });
}

void ShardedModel::await_copies() const
{
    for (const auto &copies : copies_) {
        copies->synchronize();
    }
}

tddp_fsdp_copied ShardedModel::copied_bytes() const
{
    tddp_fsdp_copied sum{};
    for (const auto &copies : copies_) {
        sum.to_device += copies->bytes_to_device();
        sum.to_cpu += copies->bytes_to_cpu();
    }
    return sum;
}

// The host may run the body on another thread, which then uses this thread's streams.
void ShardedModel::waiting(const std::function<tddp_status(const tddp_wait *wait)> &body) const
{
    const tddp_wait at_once = {0, nullptr};
    if (!region_) {
        check(body(nullptr));
        return;
    }
    tddp_status status = body(&at_once);
    if (status == TDDP_TIMEOUT) {
        struct Part {
            const std::function<tddp_status(const tddp_wait *wait)> &body;
            std::vector<c10::Stream> streams;
        } part{body, current_streams(devices_)};
        const auto call_back = [](void *data, const tddp_wait *wait) {
            const auto &self = *static_cast<const Part *>(data);
            const c10::MultiStreamGuard streams(self.streams);
            return self.body(wait);
        };
        status = region_(call_back, &part);
    }
    check(status);
}

/* --- units ----------------------------------------------------------------------------------- */

void ShardedModel::add(const tddp_fsdp_unit_opts &opts, const tddp_wait *wait)
{
    std::vector<tddp_param> params(opts.param_count);
    for (size_t i = 0; i < params.size(); i++) {
        const at::Tensor &tensor = tensor_of(opts.params[i].handle);
        const char *name = opts.params[i].name;
        for (const auto &unit : units_) {
            for (const ShardedParam &param : unit->params) {
                if (param.handle == &tensor) {
                    throw Failure(
                        tddp_fail(TDDP_INVALID_ARGUMENT,
                                  "parameter \"%s\" is in another unit already, as \"%s\": "
                                  "expected each in one unit",
                                  name, param.name.c_str()));
                }
            }
        }
        if (!tensor.defined() || !tensor.is_leaf() || !tensor.is_contiguous()) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "parameter \"%s\": expected a contiguous leaf tensor", name));
        }
        params[i] = tddp_param{};
        params[i].name = name;
        params[i].count = static_cast<size_t>(tensor.numel());
        params[i].dtype = dtype_of(tensor);
        device_of(tensor, &params[i].device_type, &params[i].device_index);
        params[i].dims = tensor.sizes().data();
        params[i].ndim = tensor.sizes().size();
    }
    tddp_unit_opts made = TDDP_UNIT_OPTS_INIT;
    made.name = opts.name;
    made.shard_group = opts.shard_group;
    made.replica_group = opts.replica_group;
    made.params = params.data();
    made.param_count = params.size();
    const tddp_dtype own = params.empty() ? TDDP_FLOAT32 : params[0].dtype;
    made.gather_dtype = opts.gather_dtype < 0 ? own : static_cast<tddp_dtype>(opts.gather_dtype);
    made.reduce_dtype =
        opts.reduce_dtype < 0 ? made.gather_dtype : static_cast<tddp_dtype>(opts.reduce_dtype);
    made.reshard_after_forward = opts.reshard_after_forward;
    made.offload = opts.offload && !params.empty() && params[0].device_type != TDDP_CPU;
    check(tddp_sharder_add(sharder_, &made, wait));
    const c10::Device device = tensor_of(opts.params[0].handle).device();
    units_.push_back(std::make_unique<Unit>(sharder_, units_.size(), opts,
                                            made.offload ? copies_of(device) : nullptr));
    units_.back()->join(weak_from_this(), units_.size() - 1);
    add_device(device);
}

std::shared_ptr<HostCopies> ShardedModel::copies_of(c10::Device device)
{
    for (const auto &copies : copies_) {
        if (copies->device() == device) {
            return copies;
        }
    }
    return copies_.emplace_back(std::make_shared<HostCopies>(device));
}

void ShardedModel::add_device(c10::Device device)
{
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
        devices_.push_back(device);
    }
}

void ShardedModel::merge(ShardedModel &from)
{
    if (this == &from) {
        return;
    }
    for (const ShardedModel *model :
         {static_cast<const ShardedModel *>(this), static_cast<const ShardedModel *>(&from)}) {
        for (const auto &unit : model->units_) {
            for (const ShardedParam &param : unit->params) {
                if (param.accumulator) {
                    throw Failure(
                        tddp_fail(TDDP_INVALID_ARGUMENT,
                                  "\"%s\" has been used already: shard all parts of a "
                                  "model, the model itself last, before its first forward",
                                  param.name.c_str()));
                }
            }
        }
    }
    check(tddp_sharder_merge(sharder_, from.sharder_));
    std::move(from.units_.begin(), from.units_.end(), std::back_inserter(units_));
    from.units_.clear();
    for (size_t number = 0; number < units_.size(); number++) {
        units_[number]->join(weak_from_this(), number);
    }
    std::move(from.copies_.begin(), from.copies_.end(), std::back_inserter(copies_));
    from.copies_.clear();
    for (const c10::Device device : from.devices_) {
        add_device(device);
    }
}

void ShardedModel::add_hooks(size_t number)
{
    Unit &of = unit(number);
    for (const size_t i : of.follow_requires_grad()) {
        ShardedParam &param = of.params[i];
        param.accumulator = torch::autograd::impl::grad_accumulator(param.full);
        param.hook = param.accumulator->add_post_hook(
            std::make_unique<ArrivedHook>(weak_from_this(), number, i));
    }
}

/* --- forward --------------------------------------------------------------------------------- */

void ShardedModel::before_forward(size_t number, const tddp_wait *wait)
{
    Unit &of = unit(number);
    add_hooks(number);
    if (forward_ns_ == 0 && tddp_trace_enabled()) {
        forward_ns_ = tddp_trace_now();
    }
    if (!wait || wait->timeout_ms == 0) { // the others continue it, on this thread or another
        streams_ = current_streams(devices_);
        if (in_backward_) {
            close_units(of.last_left);
        }
    }
    const c10::MultiStreamGuard streams(streams_);
    check(tddp_sharder_before_forward(sharder_, number, wait));
    of.forwards++;
}

void ShardedModel::enter(size_t number)
{
    Unit &of = unit(number);
    const Position entered = in_backward_ ? of.last_entered : ++position_;
    of.running.push_back(
        std::make_shared<Forward>(shared_from_this(), number, entered, of.last_left));
    // Where that can't be, parameters are there only as long as backward comes by the outputs.
    (void)install_saved_tensors();
    begin_keeping();
    of.expose();
}

// Outputs may need no gradient, here or on some ranks alone, and yet something of the unit may be
// part of the loss: so a forward with grad counts, whatever its outputs are.
void ShardedModel::leave(size_t number, const std::vector<at::Tensor *> &outputs)
{
    Unit &of = unit(number);
    if (of.forwards > 0) {
        of.forwards--;
    }
    if (of.running.empty()) { // it failed before
        tddp_sharder_after_forward(sharder_, number, 0);
        return;
    }
    end_keeping();
    const std::shared_ptr<Forward> forward = std::move(of.running.back());
    of.running.pop_back();
    of.last_entered = forward->entered();
    of.last_left = in_backward_ ? of.last_left : ++position_;
    forward->leave(of.last_left);
    if (of.forwards == 0 && !of.in_backward) {
        of.hide();
    }
    const bool with_graph = at::GradMode::is_enabled() && !outputs.empty();
    if (with_graph) {
        for (const at::Tensor *output : outputs) {
            if (output->defined() && output->requires_grad() && !output->is_leaf()) {
                output->register_hook([forward](const at::Tensor &) { forward->output_reached(); });
            }
        }
        of.since = std::min(of.since, forward->entered());
        of.due = of.due || of.trained > 0;
    }
    tddp_sharder_after_forward(sharder_, number, with_graph);
}

// What comes first of backward may be a segment that is computed again.
void ShardedModel::begin_forward()
{
    if (recomputing()) {
        begin_backward();
    }
    tddp_sharder_begin_forward(sharder_);
}

void ShardedModel::end_forward()
{
    tddp_sharder_end_forward(sharder_);
    if (!in_backward_) {
        await_copies();
    }
}

bool ShardedModel::unfinished() const
{
    return in_backward_ && !recomputing();
}

void ShardedModel::abandon()
{
    tddp_sharder_abandon(sharder_);
    (void)!guard([&] { await_copies(); }); // what failed there was reported before
    in_backward_ = false;
    reduced_.clear();
    for (const auto &unit : units_) {
        unit->reset();
    }
}

} // namespace tddp_torch
