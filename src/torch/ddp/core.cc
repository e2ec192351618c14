// What is tied together, and slices of the buckets as tensors: gradients move into them, and those
// that do not live there are copied out. On the thread that runs forward and backward; with
// gradients on a device backward ends on whichever of autograd's threads came last. When gradients
// are reported is arrival.cc's, a round from prepare to its end round.cc's.
#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "torch/ddp/core.h"
#include "torch/tensor/device.h"
#include "torch/ddp/device_memory.h"
#include "torch/tensor/plain_memory.h"

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

bool any_delayed(const std::vector<Param> &params)
{
    return std::any_of(params.begin(), params.end(), [](const Param &one) { return one.delayed; });
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
      plain_(!find_unused_ && !static_graph_ && !any_delayed(params_)),
      apart_(opts.gradients_apart), delayed_by_(delayed_by(opts, params_.size())),
      blocking_region_(opts.blocking_region), host_here_(opts.host_here),
      arrivals_(params_.size(), AWAITED)
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
    tddp_group_release_async(group_);
}

void Core::open(tddp_group *group, const tddp_reducer_opts &opts, const tddp_wait *wait)
{
    std::vector<tddp_param> described;
    for (const Param &param : params_) {
        tddp_param one{};
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

// --- slices -------------------------------------------------------------------------------------

// Makes tensors of the slices as they are now. Memory wrapped from outside is no view of another
// tensor to autograd, so it may be detached in place. Gradients that lay in the old slices follow.
void Core::point_views()
{
    const std::shared_ptr<tddp_flat_memory> memory(
        tddp_flat_memory_retain(tddp_reducer_memory(reducer_)), tddp_flat_memory_release);
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
    const std::shared_ptr<tddp_flat_memory> memory(
        tddp_flat_memory_retain(tddp_reducer_memory(reducer_)), tddp_flat_memory_release);
    const at::ScalarType dtype = scalar_type_of(bucket.buffer.dtype);
    const c10::Device device = views_.at(bucket.gradients[0].param).device();
    return tensor_over(bucket.buffer.data, {static_cast<int64_t>(bucket.buffer.count)},
                       at::TensorOptions().dtype(dtype).device(device), memory);
}

at::Tensor Core::gradient_tensor(const tddp_bucket &bucket, size_t i) const
{
    return views_.at(bucket.gradients[i].param).variable_data();
}

} // namespace tddp_torch
