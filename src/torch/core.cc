// Slices of the buckets as tensors, and a round from prepare to its end: the last gradient, or the
// node that opened backward, has the end of backward wait for the averages, and then gradients that
// do not live in the buckets are copied out. On the thread that runs forward and backward; with
// gradients on a device backward ends on whichever of autograd's threads came last. When gradients
// are reported is arrival.cc's.
#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include <tddp/trace.h>

#include "torch/core.h"
#include "torch/device.h"
#include "torch/device_memory.h"
#include "torch/plain_memory.h"

namespace tddp_torch
{

namespace
{

size_t delayed_by(const tddp_ddp_opts &opts, size_t count)
{
    if (opts.delayed_by >= 0 && static_cast<size_t>(opts.delayed_by) >= count) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "opts.delayed_by is %td: expected a parameter's number, 0 to %zu, "
                                "or -1",
                                opts.delayed_by, count - 1));
    }
    return opts.delayed_by < 0 ? count : static_cast<size_t>(opts.delayed_by);
}

} // namespace

static thread_local const Core *calling_core;

Core::Calling::Calling(const Core *core) : before_(calling_core)
{
    calling_core = core;
}

Core::Calling::~Calling()
{
    calling_core = before_;
}

const Core *Core::calling()
{
    return calling_core;
}

Core::Core(std::vector<Param> params, const tddp_ddp_opts &opts)
    : params_(std::move(params)), views_(params_.size()), kept_(params_.size()),
      find_unused_(opts.reducer.find_unused && !opts.reducer.static_graph),
      static_graph_(opts.reducer.static_graph), skip_unused_(opts.reducer.skip_unused),
      apart_(opts.gradients_apart), delayed_by_(delayed_by(opts, params_.size())),
      through_(opts.through), host_here_(opts.host_here), arrivals_(params_.size(), AWAITED)
{
    for (size_t i = 0; i < params_.size(); i++) {
        if (params_[i].sparse) {
            sparse_.push_back(i);
        }
    }
}

Core::~Core()
{
    tddp_reducer_free(reducer_);
    tddp_group_release(group_);
}

void Core::open(tddp_group *group, const tddp_reducer_opts &opts, const tddp_wait *wait)
{
    std::vector<tddp_reducer_param> described;
    for (const Param &param : params_) {
        tddp_reducer_param one{};
        one.name = param.name.c_str();
        one.count = static_cast<size_t>(param.tensor.numel());
        one.dtype = dtype_of(param.tensor);
        device_of(param.tensor, &one.device_type, &one.device_index);
        one.dims = param.tensor.sizes().data();
        one.ndim = param.tensor.sizes().size();
        one.sparse = param.sparse;
        described.push_back(one);
        const c10::Device device = param.tensor.device();
        if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
            devices_.push_back(device);
        }
    }
    tddp_reducer_opts asked = opts;
    asked.device = asked.device ? asked.device : device_memory();
    check(tddp_reducer_create(group, described.data(), described.size(), &asked, wait, &reducer_));
    group_ = tddp_group_retain(group);
    divisor_ = tddp_group_world_size(group);
    settled_ = find_unused_; // its first layout is for good
    point_views();
}

void Core::set_hook(tddp_comm_hook *hook)
{
    check(tddp_reducer_set_hook(reducer_, hook));
    hook_on_caller_ = tddp_comm_hook_on_caller(hook);
}

void Core::set_divisor(int ranks)
{
    check(tddp_reducer_set_divisor(reducer_, ranks));
    divisor_ = ranks;
}

void Core::disarm()
{
    armed_.store(false, std::memory_order_release);
}

bool Core::armed() const
{
    return armed_.load(std::memory_order_acquire);
}

bool Core::prepared() const
{
    return phase_.load() == PREPARED;
}

// --- slices -------------------------------------------------------------------------------------

// Makes tensors of the slices as they are now. Memory wrapped from outside is no view of another
// tensor to autograd, so it may be detached in place. Gradients that lay in the old slices follow.
void Core::point_views()
{
    const std::shared_ptr<tddp_reducer_memory> memory(tddp_reducer_memory_retain(reducer_),
                                                      tddp_reducer_memory_release);
    for (size_t i = 0; i < params_.size(); i++) {
        if (params_[i].sparse) {
            continue;
        }
        const at::Tensor &param = params_[i].tensor;
        at::Tensor view = tensor_over(
            tddp_reducer_gradient(reducer_, i), param.sizes(),
            at::TensorOptions().dtype(param.scalar_type()).device(param.device()), memory);
        at::Tensor &grad = param.mutable_grad();
        if (grad.defined() && views_[i].defined() && lies_in(grad, views_[i])) {
            grad = view;
        }
        views_[i] = std::move(view);
    }
}

bool Core::lies_in(const at::Tensor &grad, const at::Tensor &view) const
{
    if (grad.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) {
        return true; // each step but the first: no look into the tensor is needed
    }
    return grad.layout() == at::kStrided && grad.data_ptr() == view.data_ptr() &&
           grad.scalar_type() == view.scalar_type() && grad.sizes() == view.sizes() &&
           grad.is_contiguous();
}

// Most gradients lie as their slice does: then there is no need for all that a copy of tensors
// looks at, which takes as long as a small one itself.
static void copy_into(const at::Tensor &view, const at::Tensor &grad)
{
    if (lies_as(grad, view)) {
        std::memcpy(view.data_ptr(), grad.data_ptr(), view.nbytes());
    } else {
        view.copy_(grad);
    }
}

// The gradient may be elsewhere: in the first backward, after zero_grad with set_to_none, or when
// the user put another tensor there. It moves into the slice and stays there, unless gradients are
// to be apart.
void Core::take_in(size_t index)
{
    at::Tensor &grad = params_[index].tensor.mutable_grad();
    check_gradient(index, grad);
    if (params_[index].sparse) {
        return;
    }
    const at::Tensor &view = views_[index];
    if (grad.defined() && lies_in(grad, view)) {
        return;
    }
    const at::NoGradGuard no_grad;
    if (!grad.defined()) {
        view.zero_(); // a function gave no gradient here; other ranks may have one
    } else {
        copy_into(view, grad);
    }
    if (!apart_) {
        grad = view;
    }
}

// This rank does not use the parameter: what gradient there is takes part in the average, if
// another rank uses it, else it is to stay as it is.
void Core::lend(size_t index)
{
    const at::Tensor &grad = params_[index].tensor.grad();
    if (params_[index].sparse) {
        return;
    }
    const at::NoGradGuard no_grad;
    if (!grad.defined()) {
        views_[index].zero_();
    } else if (lies_in(grad, views_[index])) {
        kept_[index] = grad.clone();
    } else {
        check_gradient(index, grad);
        views_[index].copy_(grad);
    }
}

// The averages are there.
void Core::settle(size_t index)
{
    if (params_[index].sparse) {
        return;
    }
    at::Tensor &grad = params_[index].tensor.mutable_grad();
    const at::Tensor &view = views_[index];
    const at::Tensor kept = std::move(kept_[index]);
    kept_[index] = at::Tensor();
    if (!tddp_reducer_used(reducer_, index)) {
        if (kept.defined()) {
            view.copy_(kept);
        }
    } else if (!apart_) {
        if (!grad.defined() || !lies_in(grad, view)) {
            grad = view;
        }
    } else if (grad.defined()) {
        if (!lies_in(grad, view)) {
            grad.copy_(view);
        }
    } else {
        grad = view.clone();
    }
}

void Core::settle_all(const tddp_wait *wait)
{
    const at::NoGradGuard no_grad;
    if (apart_) {
        for (size_t i = 0; i < params_.size(); i++) {
            settle(i);
        }
    } else {
        for (const size_t i : unused_) {
            settle(i);
        }
    }
    if (!sparse_.empty()) {
        reduce_sparse(wait);
    }
}

at::Tensor Core::bucket_tensor(const tddp_bucket &bucket) const
{
    const std::shared_ptr<tddp_reducer_memory> memory(tddp_reducer_memory_retain(reducer_),
                                                      tddp_reducer_memory_release);
    const at::ScalarType dtype = scalar_type_of(bucket.buffer.dtype);
    const c10::Device device = views_.at(bucket.gradients[0].param).device();
    return tensor_over(bucket.buffer.data, {static_cast<int64_t>(bucket.buffer.count)},
                       at::TensorOptions().dtype(dtype).device(device), memory);
}

at::Tensor Core::gradient_tensor(const tddp_bucket &bucket, size_t i) const
{
    return views_.at(bucket.gradients[i].param).variable_data();
}

// --- a round ------------------------------------------------------------------------------------

bool Core::prepare_waits() const
{
    return !settled_ || due_.load();
}

void Core::forget_round()
{
    queued_.store(false);
    const std::lock_guard<std::mutex> lock(lock_);
    known_ = false;
    delayed_released_ = false;
    early_.clear();
    delayed_.clear();
    std::fill(arrivals_.begin(), arrivals_.end(), AWAITED);
    if (!static_graph_) {
        unused_.clear();
    }
}

void Core::prepare(bool sync, const tddp_wait *wait)
{
    disarm();
    // The backward before was interrupted while it waited: what lies in the slices is still being
    // averaged, and nothing may be added to it. Once that has failed, each rank may go on alone.
    if (due_.load()) {
        const uint64_t rounds = tddp_reducer_rounds(reducer_);
        tddp_status status = tddp_reducer_finish(reducer_, wait);
        if (status == TDDP_OK && tddp_reducer_rounds(reducer_) != rounds) {
            status = guard([&] { settle_all(wait); });
        }
        const bool under_way =
            status == TDDP_CANCELED || (status == TDDP_TIMEOUT && wait && wait->timeout_ms >= 0);
        if (sync || under_way) {
            check(status);
        }
        due_.store(false);
    }
    phase_.store(PREPARED);
    if (!sync) {
        return;
    }
    if (!broken_.empty()) {
        throw Failure(tddp_fail(TDDP_GROUP_FAILED,
                                "the sparse gradients of an earlier step were not averaged (%s): "
                                "end this process group, and make it and the model anew from a "
                                "checkpoint",
                                broken_.c_str()));
    }
    int rebuilt = 0;
    check(tddp_reducer_rebuild(reducer_, wait, &rebuilt));
    if (rebuilt) {
        point_views();
        settled_ = true;
    }
    check(tddp_reducer_prepare(reducer_));
    forget_round();
    armed_.store(true, std::memory_order_release);
}

void Core::queue_end(bool again)
{
    if (!queued_.exchange(true) || again) {
        Segment::at_end([core = shared_from_this()] { core->end(); });
    }
}

// At the end of backward, on the thread that ends it.
void Core::end()
{
    if (!armed()) {
        return;
    }
    queued_.store(false);
    bool known = true;
    if (find_unused_) {
        const std::lock_guard<std::mutex> lock(lock_);
        known = known_;
    }
    if (!known || first_static_round()) {
        announce(left_out(std::vector<char>(params_.size())));
    }
    release_delayed();
    disarm();
    due_.store(true);
    if (finish_round()) {
        due_.store(false);
        forwards_ = 0;
        counted_ = true;
        phase_.store(AVERAGED);
        if (tddp_trace_enabled()) {
            trace();
        }
    } else { // the others come with another backward
        due_.store(false);
        armed_.store(true, std::memory_order_release);
    }
}

// Waits in the host's way, where this is one of its threads and another may run the body: then on
// the streams of this one. At the end of backward autograd has made the streams of the thread that
// called it those of the one that ends it, which may be one of a device's: the host leaves that
// alone, and the body runs where it is.
tddp_status Core::wait_through(tddp_status (*body)(void *data, tddp_cancel *cancel), void *data)
{
    if (!through_) {
        return body(data, nullptr);
    }
    struct Moved {
        tddp_status (*body)(void *data, tddp_cancel *cancel);
        void *data;
        std::vector<c10::Stream> streams;
    } moved{body, data, current_streams(devices_)};
    const auto on_same_streams = [](void *of, tddp_cancel *cancel) {
        const auto &self = *static_cast<const Moved *>(of);
        tddp_status status = TDDP_OK;
        const tddp_status fault = guard([&] {
            const c10::MultiStreamGuard streams(self.streams);
            status = self.body(self.data, cancel);
        });
        return fault == TDDP_OK ? status : fault;
    };
    return through_(on_same_streams, &moved);
}

// Ends the round where the hook is the host's. This thread has the host's lock, which the hook
// needs, and lets go of it wherever there is nothing to do but to wait.
tddp_status Core::finish_here(tddp_status (*begin)(tddp_reducer *, const tddp_wait *))
{
    struct Waiting {
        tddp_reducer *reducer;
        int any;
    } waiting{reducer_, 1};
    const auto body = [](void *data, tddp_cancel *cancel) {
        auto *self = static_cast<Waiting *>(data);
        const tddp_wait wait = {-1, cancel};
        return tddp_reducer_await_works(self->reducer, &wait, &self->any);
    };
    const tddp_wait at_once = {0, nullptr};
    tddp_status status = begin(reducer_, &at_once);
    // With nothing under way it is an operation that has run out of time.
    while (status == TDDP_TIMEOUT && waiting.any) {
        const tddp_status ended = wait_through(body, &waiting);
        if (ended != TDDP_OK) {
            return ended;
        }
        if (waiting.any) {
            status = tddp_reducer_finish(reducer_, &at_once);
        }
    }
    return status;
}

// Whether the round is over: not if parameters are missing.
bool Core::finish_round()
{
    const uint64_t rounds = tddp_reducer_rounds(reducer_);
    struct Finish {
        Core *core;
        uint64_t rounds;
    } finish{this, rounds};
    const auto body = [](void *data, tddp_cancel *cancel) {
        const auto &self = *static_cast<Finish *>(data);
        const tddp_wait wait = {-1, cancel};
        const tddp_status status =
            self.core->hook_on_caller_ ? TDDP_OK : tddp_reducer_finish(self.core->reducer_, &wait);
        if (status != TDDP_OK || tddp_reducer_rounds(self.core->reducer_) == self.rounds) {
            return status;
        }
        return guard([&] { self.core->settle_all(&wait); });
    };
    const Calling calling(this);
    if (hook_on_caller_) {
        check(finish_here(tddp_reducer_finish));
    }
    check(wait_through(body, &finish));
    return tddp_reducer_rounds(reducer_) != rounds;
}

void Core::shadow(const tddp_wait *wait)
{
    disarm();
    const Calling calling(this);
    check(hook_on_caller_ ? finish_here(tddp_reducer_shadow) : tddp_reducer_shadow(reducer_, wait));
    if (sparse_.empty()) {
        return;
    }
    for (const size_t i : sparse_) {
        params_[i].tensor.mutable_grad().reset();
    }
    const auto body = [](void *data, tddp_cancel *cancel) {
        const tddp_wait here = {-1, cancel};
        return guard([&] { static_cast<Core *>(data)->reduce_sparse(&here); });
    };
    if (hook_on_caller_) {
        check(wait_through(body, this));
    } else {
        reduce_sparse(wait);
    }
}

void Core::trace() const
{
    tddp_reducer_times times{};
    tddp_reducer_times_of(reducer_, &times);
    if (times.prepared_ns > 0 && times.first_ready_ns > 0) {
        tddp_trace_span("training", "forward", times.prepared_ns, times.first_ready_ns, nullptr);
        tddp_trace_span("training", "backward", times.first_ready_ns, times.finished_ns, nullptr);
        // The part of it in which nothing was left to do but to wait for the other ranks.
        tddp_trace_span("training", "wait", times.last_ready_ns, times.finished_ns, nullptr);
    }
}

} // namespace tddp_torch
