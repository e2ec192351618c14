// A fully sharded model in forward and backward: see model.h. Backward comes to a unit by a hook on
// its outputs, and has passed it when all its parameters' gradients and those of its inputs are
// there; what it does not come to is done at its end.
#include "torch/fsdp/model.h"

#include <algorithm>
#include <iterator>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function_hook.h>

#include <tddp/trace.h>

#include "torch/autograd/end_of_backward.h"
#include "torch/checkpoint/checkpoint.h"
#include "torch/tensor/device_memory.h"
#include "torch/tensor/blocking_ops.h"
#include "torch/tensor/device.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

class ArrivedHook final : public torch::autograd::FunctionPostHook
{
  public:
    ArrivedHook(std::weak_ptr<ShardedModel> model, size_t unit, size_t index)
        : model_(std::move(model)), unit_(unit), index_(index)
    {
    }
    variable_list operator()(const variable_list &outputs, const variable_list &inputs) override
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (model && !inputs.empty() && inputs[0].defined()) {
            model->gradient_arrived(unit_, index_);
        }
        return outputs;
    }

  private:
    std::weak_ptr<ShardedModel> model_;
    size_t unit_;
    size_t index_;
};

// One forward of a unit, until backward has the gradients of all its inputs, or the graph is
// destroyed. Of one without inputs that need a gradient nothing else is known. The hooks own it.
class Forward
{
  public:
    Forward(std::weak_ptr<ShardedModel> model, size_t unit, size_t inputs)
        : model_(std::move(model)), unit_(unit), left_(inputs), has_inputs_(inputs > 0)
    {
    }
    ~Forward()
    {
        close();
    }
    Forward(const Forward &) = delete;
    Forward &operator=(const Forward &) = delete;
    void input_passed()
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (left_ > 0 && --left_ == 0 && model) {
            close();
            model->inputs_passed(unit_);
        }
    }

  private:
    void close()
    {
        const std::shared_ptr<ShardedModel> model = model_.lock();
        if (!closed_ && model) {
            model->forward_closed(unit_, has_inputs_);
        }
        closed_ = true;
    }

    std::weak_ptr<ShardedModel> model_;
    size_t unit_;
    size_t left_;
    bool has_inputs_;
    bool closed_ = false;
};

bool on_device(const Unit &unit)
{
    return !is_on_cpu(unit.params[0].piece);
}

} // namespace

ShardedModel::ShardedModel(tddp_blocking_region region) : region_(region), device_(*device_memory())
{
    tddp_sharder_ops ops{};
    ops.size = sizeof ops;
    ops.user = this;
    ops.place = place;
    ops.cast_shard = cast_shard;
    ops.reduced = reduced;
    ops.device = &device_;
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

void ShardedModel::waiting(const std::function<tddp_status(const tddp_wait *wait)> &body) const
{
    const tddp_wait at_once = {0, nullptr};
    if (!region_) {
        check(body(nullptr));
        return;
    }
    tddp_status status = body(&at_once);
    if (status == TDDP_TIMEOUT) {
        const auto call_back = [](void *data, const tddp_wait *wait) {
            const auto &run =
                *static_cast<const std::function<tddp_status(const tddp_wait *wait)> *>(data);
            return run(wait);
        };
        status = region_(call_back,
                         const_cast<void *>(static_cast<const void *>(&body))); // NOLINT
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
    check(tddp_sharder_add(sharder_, &made, wait));
    units_.push_back(std::make_unique<Unit>(sharder_, units_.size(), opts));
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
    check(tddp_sharder_before_forward(sharder_, number, wait));
    of.forwards++;
}

void ShardedModel::enter(size_t number, const std::vector<at::Tensor *> &inputs)
{
    Unit &of = unit(number);
    of.expose();
    if (!at::GradMode::is_enabled()) {
        return;
    }
    std::vector<at::Tensor> wanted;
    for (at::Tensor *input : inputs) {
        if (!input->defined() || !input->requires_grad()) {
            continue;
        }
        if (input->is_leaf()) { // hooks on a leaf would stay
            *input = input->view_as(*input);
        }
        wanted.push_back(*input);
    }
    const auto forward = std::make_shared<Forward>(weak_from_this(), number, wanted.size());
    (wanted.empty() ? of.open_without_inputs : of.open_inputs)++;
    for (const at::Tensor &input : wanted) {
        input.register_hook([forward](const at::Tensor &) { forward->input_passed(); });
    }
    of.entered.push_back(forward);
}

void ShardedModel::leave(size_t number, const std::vector<at::Tensor *> &outputs)
{
    Unit &of = unit(number);
    if (of.forwards > 0) {
        of.forwards--;
    }
    std::shared_ptr<void> forward; // none without grad
    if (at::GradMode::is_enabled() && !of.entered.empty()) {
        forward = of.entered.back();
        of.entered.pop_back();
    }
    if (of.forwards == 0 && !of.in_backward) {
        of.hide();
    }
    bool backward = false;
    const bool with_grad = at::GradMode::is_enabled();
    for (const at::Tensor *output : outputs) {
        if (with_grad && output->defined() && output->requires_grad() && !output->is_leaf()) {
            backward = true;
            output->register_hook([weak = weak_from_this(), number, forward](const at::Tensor &) {
                if (const std::shared_ptr<ShardedModel> model = weak.lock()) {
                    model->outputs_reached(number);
                }
            });
        }
    }
    of.ran = of.ran || backward;
    tddp_sharder_after_forward(sharder_, number, backward);
}

bool ShardedModel::unfinished() const
{
    return in_backward_ && !recomputing();
}

void ShardedModel::abandon()
{
    tddp_sharder_abandon(sharder_);
    in_backward_ = false;
    for (const auto &unit : units_) {
        unit->reset();
    }
}

/* --- backward -------------------------------------------------------------------------------- */

void ShardedModel::begin_backward()
{
    if (in_backward_) {
        return;
    }
    in_backward_ = true;
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
    if (!on_device(of)) { // for segments that are computed again, which run on this thread
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

void ShardedModel::forward_closed(size_t number, bool with_inputs)
{
    Unit &of = unit(number);
    (with_inputs ? of.open_inputs : of.open_without_inputs)--;
}

void ShardedModel::inputs_passed(size_t number)
{
    if (in_backward_) {
        unit(number).passed = true;
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
    const bool passed = of.passed && of.open_inputs == 0 && of.open_without_inputs == 0;
    const bool all = last || (passed && of.all_arrived(false));
    const bool frozen = of.trained < of.params.size();
    of.finalized = of.finalized || last;
    of.release_due = of.release_due || all;
    if (of.in_backward && of.release_due && (passed || (of.open_inputs == 0 && !frozen))) {
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
        if ((*unit).*kind == group && !on_device(*unit)) {
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
