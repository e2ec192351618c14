// Connects parameters to a reducer: the state that autograd's hooks, the node at the start of
// backward and the callback at its end share. The files:
//
//     core.cc            gradients as views of the buckets
//     iteration.cc       an iteration, from prepare to the end of backward
//     gradients.cc       which gradients are marked ready, and when
//     autograd_hooks.cc  the hooks of gradient accumulators
//     unused.cc          finds the parameters that a loss depends on
//     sparse.cc          averages sparse gradients
//     ddp.cc             the handle, in C signatures
//
// Hooks run on autograd's threads, one or several at a time, with or without the host language's
// lock, and never acquire it. The reducer decides when a bucket is launched and what is an error.
//
// Ownership: the handle owns the accumulators, they own the hooks, the hooks own Core, and Core
// owns the reducer. A gradient owns only the buckets' memory, so it may outlive all of them.
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
    bool on_devices() const
    {
        return on_devices_;
    }
    at::Tensor bucket_tensor(const tddp_bucket &bucket) const;
    at::Tensor gradient_tensor(const tddp_bucket &bucket, size_t i) const;

    // --- iteration.cc, on the same thread
    void finish_due(bool sync, const tddp_wait *wait);
    void prepare(bool sync, const tddp_wait *wait);
    // After backward, with a hook of the host language for gradients on devices.
    void finish_backward();
    bool prepare_waits() const;
    void shadow(const tddp_wait *wait);
    // Forward begins: hooks ignore the gradients of a backward inside it.
    void suspend();
    // Forward has ended: arms the hooks for its iteration, or for an earlier one that is still
    // open. `completed` false: forward failed, and its iteration is not opened.
    void arm(bool completed);
    void disarm();
    bool armed() const;
    // Whether a synchronized forward has completed whose gradients are not averaged yet.
    bool iteration_open() const;
    // Whether the backward of a forward, synchronized or not, is due.
    bool prepared() const;

    // --- gradients.cc, called by the hooks in this order
    // Whether the gradient belongs to an iteration; `defined` is false if autograd passed none.
    bool expects(size_t index, bool defined);
    // Moves the gradient into its slice of the bucket. Also for a second wrapper of a model, before
    // the first one's bucket is reduced.
    void move_to_bucket(size_t index);
    // Marks the gradient ready in the reducer, which launches the bucket that it completes. This
    // may be deferred: deferred().
    void mark_ready(size_t index);
    // Whether the last forward's gradients are averaged already: a later one is added locally.
    bool is_late() const;
    void warn_late(size_t index);

    // --- unused.cc
    void set_accumulators(const std::vector<NodePointer> &accumulators);
    bool wants_outputs() const;
    void hook_outputs(const std::vector<at::Tensor *> &outputs);
    // Backward begins: the loss depends on the nodes behind these edges.
    void backward_started(const torch::autograd::edge_list &edges);

    // The core whose communication hook this thread is running, or NULL.
    static const Core *current();

  private:
    // While one exists, current() returns its core on this thread.
    class HookScope
    {
      public:
        explicit HookScope(const Core *core);
        ~HookScope();
        HookScope(const HookScope &) = delete;
        HookScope &operator=(const HookScope &) = delete;

      private:
        const Core *before_;
    };

    // core.cc
    void make_views();
    bool is_view_of(const at::Tensor &grad, const at::Tensor &view) const;
    void fill_unused_slice(size_t index);
    void finalize_gradient(size_t index);
    void finalize_gradients(const tddp_wait *wait);

    // iteration.cc
    void reset_iteration();
    void queue_end_of_backward(bool again);
    void end_of_backward();
    bool hook_after_backward() const;
    void conclude_backward();
    void finalize_shadow();
    tddp_status finalize_blocking();
    bool finish_iteration();
    tddp_status finish_on_host(tddp_status (*begin)(tddp_reducer *, const tddp_wait *));
    void trace() const;
    tddp_status run_blocking(const std::function<void(const tddp_wait *wait)> &body) const;

    // gradients.cc
    void check_gradient(size_t index, const at::Tensor &grad) const;
    bool deferred(size_t index);
    void release_delayed();
    std::vector<size_t> find_unused_params(const std::vector<char> &reached);
    void set_unused(std::vector<size_t> unused);
    void fill_unused_slices();
    bool first_static_iteration() const;

    // unused.cc
    bool find_reached_params(const torch::autograd::edge_list &edges,
                             std::vector<char> &reached) const;

    // sparse.cc
    void reduce_sparse(const tddp_wait *wait);
    void all_reduce_sparse(const tddp_wait *wait);
    at::Tensor sparse_average(size_t index, const at::Tensor &entries, const tddp_wait *wait) const;

    std::vector<Param> params_;
    std::vector<at::Tensor> views_; // each dense parameter's slice, in its shape
    std::vector<at::Tensor>
        saved_; // gradients of unused parameters, to be restored if no rank uses it
    std::unordered_map<const torch::autograd::Node *, size_t> accumulators_;
    std::vector<size_t> sparse_; // parameters, in order
    std::vector<c10::Device> devices_;
    const bool find_unused_; // traverse the graph in each iteration
    const bool static_graph_;
    const bool skip_unused_;
    const bool immediate_; // each gradient is marked ready at once
    const bool separate_grads_;
    const size_t delayed_by_; // the number of parameters: none
    const tddp_blocking_region blocking_region_;
    int (*const may_run_host_)(void);
    tddp_group *group_ = nullptr; // the handle's; hooks may outlive the handle, but are disarmed
    tddp_reducer *reducer_ = nullptr;
    bool hook_on_caller_ = false;
    bool on_devices_ = false;
    int divisor_ = 0;
    bool layout_final_ = true;           // the buckets are not rebuilt any more
    bool static_graph_recorded_ = false; // static_graph: the first iteration is finished
    // The error that interrupted an exchange of sparse gradients: the ranks are out of step.
    std::string sparse_failure_;

    std::atomic<bool> open_{false};      // gradients of a synchronized forward are expected
    std::atomic<bool> suspended_{false}; // forward runs
    bool preparing_sync_ = false;        // the running forward was prepared with synchronization
    enum Phase : char { IDLE, PREPARED, AVERAGED };
    std::atomic<Phase> phase_{IDLE};
    std::atomic<bool> warned_late_{false};
    std::atomic<bool> queued_{false};         // end_of_backward() is queued
    std::atomic<bool> finish_pending_{false}; // the iteration must be finished, even after an error
    std::atomic<bool> hook_due_{false};       // finish_backward() must run the hook

    // Unless immediate_: guarded by lock_, which is never held while a hook is called.
    std::mutex lock_;
    bool unused_known_ = false; // the reducer knows this iteration's unused parameters
    bool delayed_released_ = false;
    std::vector<size_t> early_;   // gradients that were ready before unused_known_
    std::vector<size_t> delayed_; // gradients that wait for delayed_by_
    std::vector<size_t> unused_;  // static_graph: those of the first iteration, permanently
    enum ParamState : char { PENDING, READY, UNUSED };
    std::vector<ParamState> states_; // by parameter
    int forwards_ = 0;               // since the last finished iteration
};

// Adds a hook to every parameter's accumulator. The caller removes each.
struct Hooked {
    NodePointer accumulator; // the parameter itself holds it only weakly
    uintptr_t key;
};
std::vector<Hooked> add_hooks(const std::shared_ptr<Core> &core);

} // namespace tddp_torch

#endif
