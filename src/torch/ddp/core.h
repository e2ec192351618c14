// Parameters tied to a reducer: what the hooks behind their gradients, the node that opens backward
// and its end share. Each part is a file:
//
//     core.cc     slices of the buckets
//     round.cc    a round from prepare to its end
//     arrival.cc  gradients as they come: which are reported, and when
//     hooks.cc    the hooks behind gradient accumulators
//     graph.cc    the node that opens backward, and what a loss depends on
//     sparse.cc   averages of sparse gradients
//     ddp.cc      the handle, in C signatures
//
// Hooks run on autograd's threads, one or several at a time, with or without the host language's
// lock, and never ask for it. No policy here: when a bucket goes and what is an error is the
// reducer's.
//
// Who holds whom: the handle holds the accumulators, they hold the hooks, the hooks hold Core, and
// Core the reducer. A gradient holds only the buckets' memory, so it may outlive all of them.
#ifndef TDDP_TORCH_CORE_H
#define TDDP_TORCH_CORE_H

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/edge.h>

#include "torch/autograd/node.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

struct Param {
    at::Tensor tensor;
    std::string name;
    bool sparse;
    bool delayed;
};

class Core : public std::enable_shared_from_this<Core>
{
  public:
    Core(std::vector<Param> params, const tddp_ddp_opts &opts);
    ~Core();
    Core(const Core &) = delete;
    Core &operator=(const Core &) = delete;

    // --- core.cc, on the thread that runs forward and backward
    void open(tddp_group *group, const tddp_reducer_opts &opts, const tddp_wait *wait);
    void set_hook(tddp_comm_hook *hook);
    void set_divisor(int ranks);
    const std::vector<Param> &params() const
    {
        return params_;
    }
    tddp_reducer *reducer() const
    {
        return reducer_;
    }
    bool hook_on_caller() const
    {
        return hook_on_caller_;
    }
    at::Tensor bucket_tensor(const tddp_bucket &bucket) const;
    at::Tensor gradient_tensor(const tddp_bucket &bucket, size_t i) const;

    // --- round.cc, on the same thread
    void finish_due(bool sync, const tddp_wait *wait);
    void prepare(bool sync, const tddp_wait *wait);
    bool prepare_waits() const;
    void shadow(const tddp_wait *wait);
    // Forward begins: hooks ignore the gradients of a backward inside it.
    void suspend();
    // Forward is over: hooks are armed if its round is open, or an earlier one still is. A forward
    // that did not complete opens none.
    void arm(bool completed);
    void disarm();
    bool armed() const;
    // A synchronised forward has completed and its averages are not made yet.
    bool round_open() const;
    // A forward's backward is to come, synchronised or not.
    bool prepared() const;

    // --- arrival.cc, what hooks call in this order
    // Whether the gradient belongs to a round; `given` is false if a function gave none.
    bool expects(size_t index, bool given);
    // Moves the gradient into its slice of the bucket. Also for a second wrapper of a model, before
    // the first one's bucket is reduced.
    void take_in(size_t index);
    // Reports the gradient to the reducer, which submits the bucket that it completes. In a round
    // that is not plain this may be left for later: deferred().
    void report(size_t index);
    // The gradient came when the averages of the last forward were made: this rank alone adds it.
    bool late() const;
    void complain_of_late(size_t index);

    // --- graph.cc
    void know_accumulators(const std::vector<NodePointer> &accumulators);
    bool wants_outputs() const;
    void hook_outputs(const std::vector<at::Tensor *> &outputs);
    // Backward begins: the loss depends on what lies behind these edges.
    void opened(const torch::autograd::edge_list &edges);

    // The core whose hook this thread is calling, or NULL.
    static const Core *calling();

  private:
    // Hooks of the reducer's that this thread calls may ask for tensors over their bucket.
    class Calling
    {
      public:
        explicit Calling(const Core *core);
        ~Calling();
        Calling(const Calling &) = delete;
        Calling &operator=(const Calling &) = delete;

      private:
        const Core *before_;
    };

    // core.cc
    void point_views();
    bool lies_in(const at::Tensor &grad, const at::Tensor &view) const;
    void lend(size_t index);
    void settle(size_t index);
    void settle_all(const tddp_wait *wait);

    // round.cc
    void forget_round();
    void queue_end(bool again);
    void end();
    tddp_status settle_here();
    bool finish_round();
    tddp_status finish_here(tddp_status (*begin)(tddp_reducer *, const tddp_wait *));
    void trace() const;
    tddp_status run_blocking(const std::function<void(const tddp_wait *wait)> &body) const;

    // arrival.cc
    void check_gradient(size_t index, const at::Tensor &grad) const;
    bool deferred(size_t index);
    void release_delayed();
    std::vector<size_t> left_out(const std::vector<char> &reached);
    void announce(std::vector<size_t> unused);
    void lend_unused();
    bool first_static_round() const;

    // graph.cc
    bool walk(const torch::autograd::edge_list &edges, std::vector<char> &reached) const;

    // sparse.cc
    void reduce_sparse(const tddp_wait *wait);
    void exchange_sparse(const tddp_wait *wait);
    at::Tensor sparse_average(size_t index, const at::Tensor &entries, const tddp_wait *wait) const;

    std::vector<Param> params_;
    std::vector<at::Tensor> views_; // each dense parameter's slice, in its shape
    std::vector<at::Tensor> kept_;  // gradients in slices that take part, but may have to come back
    std::unordered_map<const torch::autograd::Node *, size_t> accumulators_;
    std::vector<size_t> sparse_; // parameters, in order
    std::vector<c10::Device> devices_;
    const bool find_unused_; // a look at the graph in each round
    const bool static_graph_;
    const bool skip_unused_;
    const bool plain_; // each gradient is reported as it comes
    const bool apart_;
    const size_t delayed_by_; // no parameter: none
    const tddp_blocking_region blocking_region_;
    int (*const host_here_)(void);
    tddp_group *group_ = nullptr; // the handle's; hooks may outlive that, but are disarmed then
    tddp_reducer *reducer_ = nullptr;
    bool hook_on_caller_ = false;
    int divisor_ = 0;
    bool settled_ = true;  // buckets have their final order
    bool counted_ = false; // static_graph: the first round is over
    // Why an exchange of sparse gradients was left in its midst: ranks are out of step for good.
    std::string broken_;

    std::atomic<bool> open_{false};      // a synchronised forward's gradients are awaited
    std::atomic<bool> suspended_{false}; // forward runs
    bool opening_ = false;               // it was prepared with synchronisation
    enum Phase : char { IDLE, PREPARED, AVERAGED };
    std::atomic<Phase> phase_{IDLE};
    std::atomic<bool> told_late_{false};
    std::atomic<bool> queued_{false}; // the end of backward will be told
    std::atomic<bool> due_{false};    // the round is to be finished, whatever becomes of backward

    // A round in which not all is plain: guarded by lock_, which is held while no hook is called.
    std::mutex lock_;
    bool known_ = false; // what the round leaves out is known
    bool delayed_released_ = false;
    std::vector<size_t> early_;   // arrived before it was known
    std::vector<size_t> delayed_; // wait for delayed_by_
    std::vector<size_t> unused_;  // static_graph: of the first round, for good
    enum Arrival : char { AWAITED, ARRIVED, LEFT_OUT };
    std::vector<Arrival> arrivals_; // by parameter
    int forwards_ = 0;              // since the last round that was finished
};

// Hooks every parameter; each element is to be taken off again.
struct Hooked {
    NodePointer accumulator; // the parameter itself holds it only weakly
    uintptr_t key;
};
std::vector<Hooked> add_hooks(const std::shared_ptr<Core> &core);

} // namespace tddp_torch

#endif
