// Decides which gradients are marked ready, and when. Most are moved to their slice and marked
// ready at once. Exceptions:
//
//     find_unused   gradients that become ready before the unused parameters are known are marked
//                   ready after the reducer knows these; if they can't be determined at the start
//                   of backward, at its end
//     static_graph  unused parameters contribute their accumulated gradients
//     delayed       some gradients are marked ready together with another parameter's
//
// On autograd's threads. The lock is held briefly, never while a hook is called.
#include <tddp/log.h>

#include "torch/ddp/core.h"

namespace tddp_torch
{

void Core::check_gradient(size_t index, const at::Tensor &grad) const
{
    if (!grad.defined()) {
        return;
    }
    const Param &param = params_[index];
    if (grad.requires_grad()) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "the gradient of \"%s\" requires a gradient itself: averages are "
                                "not differentiable, so call backward without create_graph, or "
                                "take second derivatives of the wrapped module without the wrapper",
                                param.name.c_str()));
    }
    if (param.sparse && grad.layout() != at::kSparse) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "the gradient of \"%s\" is dense, but it was declared as sparse: "
                                "use the parameter only in layers with sparse: true, or create "
                                "them with sparse: false before wrapping",
                                param.name.c_str()));
    }
    if (!param.sparse && grad.layout() != at::kStrided) {
        throw Failure(
            tddp_fail(TDDP_INVALID_ARGUMENT,
                      "the gradient of \"%s\" is sparse, but it was not declared as sparse: make "
                      "its layer an Embedding with sparse: true before wrapping, or one "
                      "with dense gradients",
                      param.name.c_str()));
    }
}

bool Core::first_static_iteration() const
{
    return static_graph_ && !static_graph_recorded_;
}

bool Core::expects(size_t index, bool defined)
{
    if (!find_unused_ && !static_graph_) {
        return armed();
    }
    if (!armed()) {
        if (defined) {
            tddp_reducer_note_used(reducer_, index);
        }
        return false;
    }
    // Nodes that the loss doesn't depend on run too, but with undefined gradients.
    if (static_graph_ || defined) {
        return defined;
    }
    const std::lock_guard<std::mutex> lock(lock_);
    return unused_known_ && states_[index] != UNUSED;
}

bool Core::is_late() const
{
    return !open_.load() && !suspended_.load() && phase_.load() == AVERAGED;
}

void Core::warn_late(size_t index)
{
    static const char advice[] = "run one forward for each backward, or add the losses up and run "
                                 "backward once; for a local step run forward and backward under "
                                 "no_sync";
    const int rank = tddp_group_rank(group_);
    const char *name = params_[index].name.c_str();
    if (!warned_late_.exchange(true)) {
        tddp_log(TDDP_LOG_WARN, "ddp",
                 "rank %d: a gradient of \"%s\" was computed after the last forward's gradients "
                 "were averaged, and is added on this rank only: %s",
                 rank, name, advice);
    }
}

void Core::mark_ready(size_t index)
{
    if (!immediate_ && deferred(index)) {
        return;
    }
    int all_ready = 0;
    check(tddp_reducer_mark_ready(reducer_, index, &all_ready));
    if (hook_on_caller_ && !on_devices_ && (!may_run_host_ || may_run_host_())) {
        const HookScope scope(this);
        int all = 0;
        check(tddp_reducer_hand_over(reducer_, &all));
    }
    if (all_ready) {
        finish_pending_.store(true);
        queue_end_of_backward(true);
    }
    if (index == delayed_by_) {
        release_delayed();
    }
}

// Whether set_unused() or release_delayed() will mark the gradient ready.
bool Core::deferred(size_t index)
{
    bool kept = false;
    bool announced = true;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        if (states_[index] == PENDING) {
            states_[index] = READY;
        }
        if (static_graph_ && static_graph_recorded_ && !unused_known_) {
            unused_known_ = true;
            fill_unused_slices();
        }
        announced = unused_known_ || !(find_unused_ || static_graph_);
        if (find_unused_ && !unused_known_) {
            early_.push_back(index);
            kept = true;
        } else if (params_[index].delayed && !delayed_released_) {
            delayed_.push_back(index);
            kept = true;
        }
    }
    if (!announced) {
        queue_end_of_backward(false); // backward may skip GradientSyncNode, which queues it too
    }
    return kept;
}

void Core::release_delayed()
{
    std::vector<size_t> released;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        delayed_released_ = true;
        released.swap(delayed_);
    }
    for (const size_t index : released) {
        mark_ready(index);
    }
}

// The parameters that the loss doesn't reach and whose gradients are not ready.
std::vector<size_t> Core::find_unused_params(const std::vector<char> &reached)
{
    std::vector<size_t> indices;
    const std::lock_guard<std::mutex> lock(lock_);
    for (size_t i = 0; i < params_.size(); i++) {
        if (!reached[i] && states_[i] != READY) {
            indices.push_back(i);
        }
    }
    return indices;
}

void Core::fill_unused_slices()
{
    for (const size_t index : unused_) {
        fill_unused_slice(index);
    }
    if (static_graph_) { // records this thread's streams
        check(tddp_reducer_set_unused(reducer_, unused_.data(), unused_.size(), nullptr));
    }
}

// Passes the iteration's unused parameters to the reducer, then marks deferred gradients ready.
void Core::set_unused(std::vector<size_t> unused)
{
    bool releases = false;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        unused_ = std::move(unused);
        for (const size_t index : unused_) {
            states_[index] = UNUSED;
            releases = releases || index == delayed_by_;
        }
        fill_unused_slices();
    }
    if (find_unused_) {
        const auto body = [this](const tddp_wait *wait) {
            check(tddp_reducer_set_unused(reducer_, unused_.data(), unused_.size(), wait));
        };
        if (skip_unused_) { // waits for the other ranks
            check(run_blocking(body));
        } else {
            body(nullptr);
        }
    }
    std::vector<size_t> early;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        unused_known_ = true;
        early.swap(early_);
    }
    if (releases) {
        release_delayed();
    }
    for (const size_t index : early) {
        mark_ready(index);
    }
}

} // namespace tddp_torch
