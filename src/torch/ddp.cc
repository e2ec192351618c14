// Parameters tied to a reducer: a hook behind each parameter's gradient accumulator puts the
// gradient into its slice of a bucket and reports it; the last one has backward wait for the
// averages before it returns. Hooks run on autograd's threads, one or several at a time, with or
// without the host language's lock, and never ask for it. No policy here: when a bucket goes and
// what is an error is the reducer's.
//
// Who holds whom: the handle holds the accumulators, they hold the hooks, the hooks hold Core, and
// Core the reducer. A gradient holds only the buckets' memory, so it may outlive all of them.
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/shim.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

constexpr size_t broadcast_chunk_bytes = size_t{250} << 20;

class Core : public std::enable_shared_from_this<Core>
{
  public:
    Core(std::vector<at::Tensor> params, std::vector<std::string> names, tddp_wait_through through)
        : params_(std::move(params)), names_(std::move(names)), views_(params_.size()),
          through_(through)
    {
    }
    ~Core()
    {
        tddp_reducer_free(reducer_);
    }
    Core(const Core &) = delete;
    Core &operator=(const Core &) = delete;

    void open(tddp_group *group, const tddp_reducer_opts &opts, const tddp_wait *wait);
    void prepare(bool sync, const tddp_wait *wait);
    bool prepare_waits() const
    {
        return !rebuilt_ || due_.load();
    }
    void disarm()
    {
        armed_.store(false, std::memory_order_release);
    }
    bool armed() const
    {
        return armed_.load(std::memory_order_acquire);
    }
    void put_in_slice(size_t index);
    void ready(size_t index);
    void finish();
    const tddp_reducer *reducer() const
    {
        return reducer_;
    }
    const std::vector<at::Tensor> &params() const
    {
        return params_;
    }

  private:
    void point_views();
    bool lies_in(const at::Tensor &grad, const at::Tensor &view) const;

    std::vector<at::Tensor> params_;
    std::vector<std::string> names_;
    std::vector<at::Tensor> views_; // each parameter's slice, in its shape
    tddp_wait_through through_;
    tddp_reducer *reducer_ = nullptr;
    std::atomic<bool> armed_{false};
    bool rebuilt_ = false;         // buckets have their final order
    std::atomic<bool> due_{false}; // all buckets were handed over and not yet waited for
};

void Core::open(tddp_group *group, const tddp_reducer_opts &opts, const tddp_wait *wait)
{
    std::vector<tddp_reducer_param> described;
    for (size_t i = 0; i < params_.size(); i++) {
        const at::Tensor &param = params_[i];
        tddp_reducer_param one{};
        one.name = names_[i].c_str();
        one.count = static_cast<size_t>(param.numel());
        one.dtype = dtype_of(param);
        device_of(param, &one.device_type, &one.device_index);
        one.dims = param.sizes().data();
        one.ndim = param.sizes().size();
        described.push_back(one);
    }
    check(tddp_reducer_create(group, described.data(), described.size(), &opts, wait, &reducer_));
    point_views();
}

// Makes tensors of the slices as they are now. Memory wrapped from outside is no view of another
// tensor to autograd, so it may be detached in place. Gradients that lay in the old slices follow.
void Core::point_views()
{
    const std::shared_ptr<tddp_reducer_memory> memory(tddp_reducer_memory_retain(reducer_),
                                                      tddp_reducer_memory_release);
    for (size_t i = 0; i < params_.size(); i++) {
        at::Tensor view = at::from_blob(
            tddp_reducer_gradient(reducer_, i), params_[i].sizes(), [memory](void *) {},
            at::TensorOptions().dtype(params_[i].scalar_type()).device(params_[i].device()));
        at::Tensor &grad = params_[i].mutable_grad();
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

// The gradient may be elsewhere: in the first backward, after zero_grad with set_to_none, or when
// the user put another tensor there. It moves into the slice and stays there.
void Core::put_in_slice(size_t index)
{
    at::Tensor &grad = params_[index].mutable_grad();
    const at::Tensor &view = views_[index];
    if (grad.defined() && lies_in(grad, view)) {
        return;
    }
    const at::NoGradGuard no_grad;
    if (!grad.defined()) {
        view.zero_(); // a function gave no gradient here; other ranks may have one
    } else if (grad.layout() != at::kStrided) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "the gradient of \"%s\" is sparse: only dense gradients are "
                                "averaged; make the layer without sparse gradients",
                                names_[index].c_str()));
    } else {
        view.copy_(grad);
    }
    grad = view;
}

void Core::ready(size_t index)
{
    int all_ready = 0;
    check(tddp_reducer_mark_ready(reducer_, index, &all_ready));
    if (all_ready) {
        due_.store(true);
        torch::autograd::Engine::get_default_engine().queue_callback(
            [core = shared_from_this()] { core->finish(); });
    }
}

// At the end of backward, on the thread that ends it.
void Core::finish()
{
    disarm();
    const auto wait_for_buckets = [](void *data, tddp_cancel *cancel) {
        const tddp_wait wait = {-1, cancel};
        return tddp_reducer_finish(static_cast<tddp_reducer *>(data), &wait);
    };
    check(through_ ? through_(wait_for_buckets, reducer_) : wait_for_buckets(reducer_, nullptr));
    due_.store(false);
}

void Core::prepare(bool sync, const tddp_wait *wait)
{
    disarm();
    // The backward before was interrupted while it waited: what lies in the slices is still being
    // averaged, and nothing may be added to it. Once that has failed, each rank may go on alone.
    if (due_.load()) {
        const tddp_status status = tddp_reducer_finish(reducer_, wait);
        const bool under_way =
            status == TDDP_CANCELED || (status == TDDP_TIMEOUT && wait && wait->timeout_ms >= 0);
        if (sync || under_way) {
            check(status);
        }
        due_.store(false);
    }
    if (!sync) {
        return;
    }
    int rebuilt = 0;
    check(tddp_reducer_rebuild(reducer_, wait, &rebuilt));
    if (rebuilt) {
        point_views();
        rebuilt_ = true;
    }
    check(tddp_reducer_prepare(reducer_));
    armed_.store(true, std::memory_order_release);
}

class ReadyHook final : public torch::autograd::FunctionPostHook
{
  public:
    ReadyHook(std::shared_ptr<Core> core, size_t index) : core_(std::move(core)), index_(index) {}
    variable_list operator()(const variable_list &outputs, const variable_list &) override
    {
        if (core_->armed()) {
            core_->put_in_slice(index_);
            for (const auto &later : later_) {
                const std::shared_ptr<Core> core = later.first.lock();
                if (core && core->armed()) {
                    core->put_in_slice(later.second);
                }
            }
            core_->ready(index_);
        }
        return outputs;
    }
    // A model may be wrapped twice: the hook behind this one must have its copy of the gradient
    // before this one's bucket is reduced.
    void precedes(const std::shared_ptr<Core> &core, size_t index)
    {
        later_.emplace_back(core, index);
    }

  private:
    std::shared_ptr<Core> core_;
    size_t index_;
    std::vector<std::pair<std::weak_ptr<Core>, size_t>> later_;
};

// A shared_ptr or an intrusive_ptr, as libtorch's version has it.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

struct Hooked {
    Accumulator accumulator; // the parameter itself holds it only weakly
    uintptr_t key;
};

} // namespace

} // namespace tddp_torch

struct tddp_ddp {
    std::shared_ptr<tddp_torch::Core> core;
    std::vector<tddp_torch::Hooked> hooks;
    std::vector<at::Tensor> buffers;
    tddp_group *group = nullptr;

    ~tddp_ddp()
    {
        if (core) {
            core->disarm();
        }
        for (const auto &hook : hooks) {
            hook.accumulator->del_post_hook(hook.key);
        }
        core.reset();
        tddp_group_release(group);
    }
};

namespace tddp_torch
{

namespace
{

void check_param(const at::Tensor &param, const char *name)
{
    const char *fault = !param.defined()                 ? "is undefined"
                        : !param.is_leaf()               ? "is not a leaf of the graph"
                        : !param.requires_grad()         ? "does not require a gradient"
                        : param.layout() != at::kStrided ? "is not dense"
                                                         : nullptr;
    if (fault) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "parameter \"%s\" %s: expected the model's own dense parameters "
                                "that require a gradient",
                                name, fault));
    }
}

std::shared_ptr<Core> make_core(tddp_tensor *const *params, const char *const *names, size_t count,
                                tddp_wait_through through)
{
    std::vector<at::Tensor> tensors;
    std::vector<std::string> texts;
    std::unordered_map<const c10::TensorImpl *, size_t> seen;
    for (size_t i = 0; i < count; i++) {
        const at::Tensor &param = tensor_of(params[i]);
        texts.push_back(names && names[i] ? names[i] : "parameter " + std::to_string(i));
        check_param(param, texts[i].c_str());
        const auto first = seen.emplace(param.unsafeGetTensorImpl(), i);
        if (!first.second) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "parameters \"%s\" and \"%s\" are one tensor: pass it once",
                                    texts[first.first->second].c_str(), texts[i].c_str()));
        }
        tensors.push_back(param);
    }
    return std::make_shared<Core>(std::move(tensors), std::move(texts), through);
}

std::vector<at::Tensor> take_buffers(tddp_tensor *const *buffers, size_t count)
{
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < count; i++) {
        const at::Tensor &buffer = tensor_of(buffers[i]);
        if (!buffer.defined() || buffer.layout() != at::kStrided || buffer.is_quantized()) {
            throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                    "buffer number %zu is undefined, sparse or quantized: only "
                                    "dense buffers are broadcast",
                                    i));
        }
        tensors.push_back(buffer);
    }
    return tensors;
}

void add_hooks(tddp_ddp *ddp)
{
    const std::vector<at::Tensor> &params = ddp->core->params();
    ddp->hooks.reserve(params.size());
    for (size_t i = 0; i < params.size(); i++) {
        Accumulator accumulator = torch::autograd::impl::grad_accumulator(params[i]);
        for (const auto &hook : accumulator->post_hooks()) {
            if (auto *earlier = dynamic_cast<ReadyHook *>(hook.get())) {
                earlier->precedes(ddp->core, i);
            }
        }
        const uintptr_t key = accumulator->add_post_hook(std::make_unique<ReadyHook>(ddp->core, i));
        ddp->hooks.push_back({std::move(accumulator), key});
    }
}

void synchronise(tddp_ddp *ddp, const tddp_wait *wait)
{
    std::vector<at::Tensor> all = ddp->core->params();
    all.insert(all.end(), ddp->buffers.begin(), ddp->buffers.end());
    broadcast_tensors(ddp->group, all, 0, broadcast_chunk_bytes, wait);
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_ddp_create(tddp_group *group, tddp_tensor *const *params, const char *const *names,
                            size_t param_count, tddp_tensor *const *buffers, size_t buffer_count,
                            const tddp_ddp_opts *opts, const tddp_wait *wait, tddp_ddp **out)
{
    using namespace tddp_torch;
    return guard([&] {
        const tddp_ddp_opts defaults = TDDP_DDP_OPTS_INIT;
        opts = opts ? opts : &defaults;
        if (opts->size != sizeof *opts) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "opts.size is %zu, expected %zu",
                                    opts->size, sizeof *opts));
        }
        if (!group) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "no process group: call init_process_group first"));
        }
        auto ddp = std::make_unique<tddp_ddp>();
        ddp->group = tddp_group_retain(group);
        ddp->core = make_core(params, names, param_count, opts->through);
        ddp->buffers = take_buffers(buffers, buffer_count);
        ddp->core->open(group, opts->reducer, wait);
        if (opts->init_sync) {
            synchronise(ddp.get(), wait);
        }
        add_hooks(ddp.get());
        *out = ddp.release();
    });
}

void tddp_ddp_free(tddp_ddp *ddp)
{
    delete ddp;
}

tddp_status tddp_ddp_prepare(tddp_ddp *ddp, int sync, const tddp_wait *wait)
{
    return tddp_torch::guard([&] { ddp->core->prepare(sync != 0, wait); });
}

int tddp_ddp_prepare_waits(const tddp_ddp *ddp)
{
    return ddp->core->prepare_waits();
}

tddp_status tddp_ddp_sync_buffers(tddp_ddp *ddp, int root, const tddp_wait *wait)
{
    using namespace tddp_torch;
    return guard(
        [&] { broadcast_tensors(ddp->group, ddp->buffers, root, broadcast_chunk_bytes, wait); });
}

const tddp_reducer *tddp_ddp_reducer(const tddp_ddp *ddp)
{
    return ddp->core->reducer();
}
