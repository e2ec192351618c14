// Gradients as they come. Most are put into their slice and reported at once; some rounds want
// more:
//
//     find_unused   what comes before backward was opened is kept, for the reducer must know first
//                   what the round leaves out; where that cannot be known, all is kept until the
//                   end
//     static_graph  parameters that the first round left out take part with what they have
//     delayed       some are reported together with another parameter
//
// On autograd's threads. The lock is held for a moment, never while a hook is called.
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
                                "the gradient of \"%s\" requires a gradient itself: averages have "
                                "no history, so call backward without create_graph, or take second "
                                "derivatives of the module that was wrapped, outside of it",
                                param.name.c_str()));
    }
    if (param.sparse && grad.layout() != at::kSparse) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "the gradient of \"%s\" is dense, but it was announced as sparse: "
                                "use the parameter only in layers with sparse: true, or make them "
                                "with sparse: false before wrapping",
                                param.name.c_str()));
    }
    if (!param.sparse && grad.layout() != at::kStrided) {
        throw Failure(
            tddp_fail(TDDP_INVALID_ARGUMENT,
                      "the gradient of \"%s\" is sparse, but nothing announced that: make "
                      "its layer an Embedding with sparse: true before wrapping, or one "
                      "with dense gradients",
                      param.name.c_str()));
    }
}

bool Core::first_static_round() const
{
    return static_graph_ && !counted_;
}

bool Core::expects(size_t index, bool given)
{
    if (!find_unused_ && !static_graph_) {
        return armed();
    }
    if (!armed()) {
        if (given) {
            tddp_reducer_note_used(reducer_, index);
        }
        return false;
    }
    // Functions beside the loss are run too, but get nothing and give nothing.
    if (static_graph_ || given) {
        return given;
    }
    const std::lock_guard<std::mutex> lock(lock_);
    return known_ && arrivals_[index] != LEFT_OUT;
}

bool Core::late() const
{
    return !open_.load() && !suspended_.load() && phase_.load() == AVERAGED;
}

void Core::complain_of_late(size_t index)
{
    static const char cure[] = "run one forward for each backward, or add the losses up and run "
                               "backward once; a step that is to stay on this rank has forward and "
                               "backward under no_sync";
    const int rank = tddp_group_rank(group_);
    const char *name = params_[index].name.c_str();
    if (!told_late_.exchange(true)) {
        tddp_log(TDDP_LOG_WARN, "ddp",
                 "rank %d: a gradient of \"%s\" came after the averages of the last forward were "
                 "made, and is added on this rank only: %s",
                 rank, name, cure);
    }
}

void Core::report(size_t index)
{
    if (!plain_ && deferred(index)) {
        return;
    }
    int all_ready = 0;
    check(tddp_reducer_mark_ready(reducer_, index, &all_ready));
    if (hook_on_caller_ && (!host_here_ || host_here_())) {
        const Calling calling(this);
        int all = 0;
        check(tddp_reducer_hand_over(reducer_, &all));
    }
    if (all_ready) {
        due_.store(true);
        queue_end(true);
    }
    if (index == delayed_by_) {
        release_delayed();
    }
}

// Whether the gradient is to be reported later, by announce() or release_delayed().
bool Core::deferred(size_t index)
{
    bool kept = false;
    bool announced = true;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        if (arrivals_[index] == AWAITED) {
            arrivals_[index] = ARRIVED;
        }
        if (static_graph_ && counted_ && !known_) {
            known_ = true;
            lend_unused();
        }
        announced = known_ || !(find_unused_ || static_graph_);
        if (find_unused_ && !known_) {
            early_.push_back(index);
            kept = true;
        } else if (params_[index].delayed && !delayed_released_) {
            delayed_.push_back(index);
            kept = true;
        }
    }
    if (!announced) {
        queue_end(false); // backward may not pass through the node that opens it
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
        report(index);
    }
}

// The parameters that neither arrived nor lie behind the loss.
std::vector<size_t> Core::left_out(const std::vector<char> &reached)
{
    std::vector<size_t> indices;
    const std::lock_guard<std::mutex> lock(lock_);
    for (size_t i = 0; i < params_.size(); i++) {
        if (!reached[i] && arrivals_[i] != ARRIVED) {
            indices.push_back(i);
        }
    }
    return indices;
}

void Core::lend_unused()
{
    for (const size_t index : unused_) {
        lend(index);
    }
    if (static_graph_) { // on this thread's streams; another may be the first to report
        check(tddp_reducer_set_unused(reducer_, unused_.data(), unused_.size(), nullptr));
    }
}

// From here on the reducer knows what this round leaves out, and takes the others.
void Core::announce(std::vector<size_t> unused)
{
    bool releases = false;
    {
        const std::lock_guard<std::mutex> lock(lock_);
        unused_ = std::move(unused);
        for (const size_t index : unused_) {
            arrivals_[index] = LEFT_OUT;
            releases = releases || index == delayed_by_;
        }
        lend_unused();
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
        known_ = true;
        early.swap(early_);
    }
    if (releases) {
        release_delayed();
    }
    for (const size_t index : early) {
        report(index);
    }
}

} // namespace tddp_torch
