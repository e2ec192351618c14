// An iteration: prepared before forward, opened after forward, and finished at the end of backward,
// or once it has returned (finish_backward), which waits for the averages. The last gradient, or
// GradientSyncNode, queues the callback for the end of backward. On the thread that runs forward
// and backward; with gradients on a device backward ends on the last of autograd's threads to
// finish.
#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <tddp/trace.h>

#include "torch/autograd/end_of_backward.h"
#include "torch/ddp/core.h"
#include "torch/tensor/device.h"

namespace tddp_torch
{

void Core::suspend()
{
    suspended_.store(true);
    preparing_sync_ = false;
}

void Core::arm(bool completed)
{
    if (completed && preparing_sync_) {
        open_.store(true);
    }
    preparing_sync_ = false;
    suspended_.store(false);
}

void Core::disarm()
{
    open_.store(false);
}

bool Core::armed() const
{
    return open_.load() && !suspended_.load();
}

bool Core::iteration_open() const
{
    return open_.load();
}

bool Core::prepared() const
{
    return phase_.load() == PREPARED;
}

bool Core::prepare_waits() const
{
    return !layout_final_ || finish_pending_.load();
}

void Core::reset_iteration()
{
    queued_.store(false);
    const std::lock_guard<std::mutex> lock(lock_);
    unused_known_ = false;
    delayed_released_ = false;
    early_.clear();
    delayed_.clear();
    std::fill(states_.begin(), states_.end(), PENDING);
    if (!static_graph_) {
        unused_.clear();
    }
}

// The previous backward was interrupted while it waited: the slices are still being averaged, and
// no gradient may be accumulated there yet. After a failure each rank may continue locally.
void Core::finish_due(bool sync, const tddp_wait *wait)
{
    if (hook_due_.exchange(false)) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "the communication hook has not processed the last backward's "
                                "gradients: with parameters on devices it runs once backward has "
                                "returned, in tddp_ddp_finish_backward()"));
    }
    if (!finish_pending_.load()) {
        return;
    }
    const HookScope scope(this);
    const uint64_t before = tddp_reducer_rounds(reducer_);
    tddp_status status =
        hook_on_caller_ ? finish_on_host(tddp_reducer_finish) : tddp_reducer_finish(reducer_, wait);
    if (status == TDDP_OK && tddp_reducer_rounds(reducer_) != before) {
        status = hook_on_caller_ ? finalize_blocking() : guard([&] { finalize_gradients(wait); });
    }
    const bool still_pending =
        status == TDDP_CANCELED || (status == TDDP_TIMEOUT && wait && wait->timeout_ms >= 0);
    if (sync || still_pending) {
        check(status);
    }
    finish_pending_.store(false);
}

void Core::prepare(bool sync, const tddp_wait *wait)
{
    suspend();
    finish_due(sync, wait);
    phase_.store(PREPARED);
    if (params_.empty()) {
        return; // all are frozen: there is nothing to average
    }
    if (!sync) {
        if (tddp_reducer_failure(reducer_) != TDDP_OK) {
            disarm(); // backward has raised already, and training continues locally
        }
        return;
    }
    if (!sparse_failure_.empty()) {
        throw Failure(tddp_fail(TDDP_GROUP_FAILED,
                                "the sparse gradients of an earlier step were not averaged (%s): "
                                "destroy this process group, then create it again and load the "
                                "model from a checkpoint",
                                sparse_failure_.c_str()));
    }
    int rebuilt = 0;
    check(tddp_reducer_rebuild(reducer_, wait, &rebuilt));
    if (rebuilt) {
        make_views();
        layout_final_ = true;
    }
    check(tddp_reducer_prepare(reducer_));
    reset_iteration();
    preparing_sync_ = true;
}

void Core::queue_end_of_backward(bool again)
{
    if (!queued_.exchange(true) || again) {
        at_end_of_backward([core = shared_from_this()] { core->end_of_backward(); });
    }
}

// The callback at the end of backward, on the thread that ends it.
void Core::end_of_backward()
{
    if (!armed()) {
        return;
    }
    queued_.store(false);
    bool known = true;
    if (find_unused_) {
        const std::lock_guard<std::mutex> lock(lock_);
        known = unused_known_;
    }
    if (!known || first_static_iteration()) {
        set_unused(find_unused_params(std::vector<char>(params_.size())));
    }
    release_delayed();
    disarm();
    finish_pending_.store(true);
    if (hook_after_backward()) {
        hook_due_.store(true);
    } else {
        conclude_backward();
    }
}

// Whether the host's hook must wait for the thread that called backward: with gradients on devices
// backward may end on a thread of autograd's.
bool Core::hook_after_backward() const
{
    return hook_on_caller_ && on_devices_;
}

void Core::finish_backward()
{
    if (hook_due_.exchange(false)) {
        conclude_backward();
    }
}

void Core::conclude_backward()
{
    if (finish_iteration()) {
        finish_pending_.store(false);
        forwards_ = 0;
        static_graph_recorded_ = true;
        phase_.store(AVERAGED);
        if (tddp_trace_enabled()) {
            trace();
        }
    } else { // another backward computes the missing gradients
        finish_pending_.store(false);
        open_.store(true);
    }
}

// Runs a part that waits for other ranks, in the host language's blocking region. The host calls it
// back on this thread, or on another, which then uses this thread's current streams. At the end of
// backward these are the streams of the thread that called backward: autograd has set them on the
// thread that ends it.
tddp_status Core::run_blocking(const std::function<void(const tddp_wait *wait)> &body) const
{
    if (!blocking_region_) {
        return guard([&] { body(nullptr); });
    }
    struct Part {
        const std::function<void(const tddp_wait *wait)> &body;
        std::vector<c10::Stream> streams;
    } part{body, current_streams(devices_)};
    const auto call_back = [](void *data, const tddp_wait *wait) {
        const auto &self = *static_cast<const Part *>(data);
        return guard([&] {
            const c10::MultiStreamGuard streams(self.streams);
            self.body(wait);
        });
    };
    return blocking_region_(call_back, &part);
}

// Finishes the iteration with a hook of the host language. This thread holds the host's lock, which
// the hook needs, and releases it only while it waits.
tddp_status Core::finish_on_host(tddp_status (*begin)(tddp_reducer *, const tddp_wait *))
{
    const tddp_wait at_once = {0, nullptr};
    int any = 1;
    tddp_status status = begin(reducer_, &at_once);
    // TDDP_TIMEOUT without a pending work is an operation's own timeout.
    while (status == TDDP_TIMEOUT && any) {
        const tddp_status ended = run_blocking([this, &any](const tddp_wait *wait) {
            check(tddp_reducer_await_works(reducer_, wait, &any));
        });
        if (ended != TDDP_OK) {
            return ended;
        }
        if (any) {
            status = tddp_reducer_finish(reducer_, &at_once);
        }
    }
    return status;
}

// Finalizes the gradients in the host's blocking region.
tddp_status Core::finalize_blocking()
{
    return run_blocking([this](const tddp_wait *wait) { finalize_gradients(wait); });
}

// Returns whether the iteration is finished: not if gradients are missing.
bool Core::finish_iteration()
{
    const uint64_t before = tddp_reducer_rounds(reducer_);
    const auto finished = [this, before] { return tddp_reducer_rounds(reducer_) != before; };
    const HookScope scope(this);
    if (!hook_on_caller_) {
        check(run_blocking([this, &finished](const tddp_wait *wait) {
            check(tddp_reducer_finish(reducer_, wait));
            if (finished()) {
                finalize_gradients(wait);
            }
        }));
        return finished();
    }
    check(finish_on_host(tddp_reducer_finish));
    if (finished()) {
        check(finalize_blocking());
    }
    return finished();
}

// The averages are this rank's gradients too: an optimizer that is divided among the ranks steps
// with them.
void Core::finalize_shadow()
{
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < params_.size(); i++) {
        finalize_gradient(i);
    }
}

void Core::shadow(const tddp_wait *wait)
{
    arm(false);
    disarm();
    if (params_.empty()) {
        return;
    }
    const HookScope scope(this);
    check(hook_on_caller_ ? finish_on_host(tddp_reducer_shadow)
                          : tddp_reducer_shadow(reducer_, wait));
    finalize_shadow();
    if (sparse_.empty()) {
        return;
    }
    for (const size_t i : sparse_) {
        params_[i].tensor.mutable_grad().reset();
    }
    if (hook_on_caller_) {
        check(run_blocking([this](const tddp_wait *here) { reduce_sparse(here); }));
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
        // The part of backward that only waited for the other ranks.
        tddp_trace_span("training", "wait", times.last_ready_ns, times.finished_ns, nullptr);
    }
}

} // namespace tddp_torch
