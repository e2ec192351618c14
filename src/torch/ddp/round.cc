// A round: prepared before forward, open once forward is over, and closed by the end of backward,
// which waits for the averages. The last gradient, or the node that opened backward, has that end
// called. On the thread that runs forward and backward; with gradients on a device backward ends on
// whichever of autograd's threads came last.
#include <algorithm>

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
    opening_ = false;
}

void Core::arm(bool completed)
{
    if (completed && opening_) {
        open_.store(true);
    }
    opening_ = false;
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

bool Core::round_open() const
{
    return open_.load();
}

bool Core::prepared() const
{
    return phase_.load() == PREPARED;
}

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

// The backward before was interrupted while it waited: what lies in the slices is still being
// averaged, and nothing may be added to it. Once that has failed, each rank may continue alone.
void Core::finish_due(bool sync, const tddp_wait *wait)
{
    if (!due_.load()) {
        return;
    }
    const Calling calling(this);
    const uint64_t rounds = tddp_reducer_rounds(reducer_);
    tddp_status status =
        hook_on_caller_ ? finish_here(tddp_reducer_finish) : tddp_reducer_finish(reducer_, wait);
    if (status == TDDP_OK && tddp_reducer_rounds(reducer_) != rounds) {
        status = hook_on_caller_ ? settle_here() : guard([&] { settle_all(wait); });
    }
    const bool under_way =
        status == TDDP_CANCELED || (status == TDDP_TIMEOUT && wait && wait->timeout_ms >= 0);
    if (sync || under_way) {
        check(status);
    }
    due_.store(false);
}

void Core::prepare(bool sync, const tddp_wait *wait)
{
    suspend();
    finish_due(sync, wait);
    phase_.store(PREPARED);
    if (!sync) {
        if (tddp_reducer_failure(reducer_) != TDDP_OK) {
            disarm(); // backward has raised already, and training goes on locally
        }
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
    opening_ = true;
}

void Core::queue_end(bool again)
{
    if (!queued_.exchange(true) || again) {
        at_end_of_backward([core = shared_from_this()] { core->end(); });
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
        open_.store(true);
    }
}

// Runs a part that waits for other ranks, in the host's way. The host calls it back on this thread,
// or on another: then on the streams of this one. At the end of backward autograd has made the
// streams of the thread that called it those of the one that ends it, which may be one of a
// device's: the host runs the part there as it is.
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

// Ends the round where the hook is the host's. This thread has the host's lock, which the hook
// needs, and lets go of it wherever there is nothing to do but to wait.
tddp_status Core::finish_here(tddp_status (*begin)(tddp_reducer *, const tddp_wait *))
{
    const tddp_wait at_once = {0, nullptr};
    int any = 1;
    tddp_status status = begin(reducer_, &at_once);
    // With nothing under way it is an operation that has run out of time.
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

// The averages are there, and what remains is done in the host's way.
tddp_status Core::settle_here()
{
    return run_blocking([this](const tddp_wait *wait) { settle_all(wait); });
}

// Whether the round is over: not if parameters are missing.
bool Core::finish_round()
{
    const uint64_t rounds = tddp_reducer_rounds(reducer_);
    const auto over = [this, rounds] { return tddp_reducer_rounds(reducer_) != rounds; };
    const Calling calling(this);
    if (!hook_on_caller_) {
        check(run_blocking([this, &over](const tddp_wait *wait) {
            check(tddp_reducer_finish(reducer_, wait));
            if (over()) {
                settle_all(wait);
            }
        }));
        return over();
    }
    check(finish_here(tddp_reducer_finish));
    if (over()) {
        check(settle_here());
    }
    return over();
}

void Core::shadow(const tddp_wait *wait)
{
    arm(false);
    disarm();
    const Calling calling(this);
    check(hook_on_caller_ ? finish_here(tddp_reducer_shadow) : tddp_reducer_shadow(reducer_, wait));
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
        // The part of it in which nothing was left to do but to wait for the other ranks.
        tddp_trace_span("training", "wait", times.last_ready_ns, times.finished_ns, nullptr);
    }
}

} // namespace tddp_torch
