// Construction, and gradients as views of the buckets: gradients move into their slices, or are
// copied in and out. On the thread that runs forward and backward; with gradients on a device
// backward ends on the last of autograd's threads to finish.
#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "torch/ddp/core.h"
#include "torch/tensor/device.h"
#include "torch/tensor/device_memory.h"
#include "torch/tensor/dense.h"

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

static thread_local const Core *current_core;

Core::HookScope::HookScope(const Core *core) : before_(current_core)
{
    current_core = core;
}

Core::HookScope::~HookScope()
{
    current_core = before_;
}

const Core *Core::current()
{
    return current_core;
}

Core::Core(std::vector<Param> params, const tddp_ddp_opts &opts)
    : params_(std::move(params)), views_(params_.size()), saved_(params_.size()),
      find_unused_(opts.reducer.find_unused && !opts.reducer.static_graph),
      static_graph_(opts.reducer.static_graph), skip_unused_(opts.reducer.skip_unused),
      immediate_(!find_unused_ && !static_graph_ && !any_delayed(params_)),
      separate_grads_(opts.gradients_apart), delayed_by_(delayed_by(opts, params_.size())),
      blocking_region_(opts.blocking_region), may_run_host_(opts.host_here),
      states_(params_.size(), PENDING)
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
        on_devices_ = on_devices_ || one.device_type != TDDP_CPU;
        one.dims = param.tensor.sizes().data();
        one.ndim = param.tensor.sizes().size();
        one.sparse = param.sparse;
        described.push_back(one);
        const c10::Device device = param.tensor.device();
        if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
            devices_.push_back(device);
        }
    }
    tddp_reducer_opts resolved = opts;
    resolved.device = resolved.device ? resolved.device : device_memory();
    check(
        tddp_reducer_create(group, described.data(), described.size(), &resolved, wait, &reducer_));
    group_ = tddp_group_retain(group);
    divisor_ = tddp_group_world_size(group);
    layout_final_ = find_unused_ || params_.empty(); // the first layout is for good
    make_views();
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

// --- views --------------------------------------------------------------------------------------

// Makes tensors over the current slices, and points gradients in the old slices to the new ones. To
// autograd a tensor over external memory is not a view, so it may be detached in place.
void Core::make_views()
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
        if (grad.defined() && views_[i].defined() && is_view_of(grad, views_[i])) {
            grad = view;
        }
        views_[i] = std::move(view);
    }
}

bool Core::is_view_of(const at::Tensor &grad, const at::Tensor &view) const
{
    if (grad.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) {
        return true; // the fast path, in each step but the first
    }
    return grad.layout() == at::kStrided && grad.data_ptr() == view.data_ptr() &&
           grad.scalar_type() == view.scalar_type() && grad.sizes() == view.sizes() &&
           grad.is_contiguous();
}

// Most gradients have the slice's layout: then memcpy avoids the overhead of Tensor::copy_, which
// takes as long as copying a small gradient.
static void copy_into(const at::Tensor &view, const at::Tensor &grad)
{
    if (has_layout_of(grad, view)) {
        std::memcpy(view.data_ptr(), grad.data_ptr(), view.nbytes());
        view.unsafeGetTensorImpl()->bump_version(); // a graph may need an earlier gradient
    } else {
        view.copy_(grad);
    }
}

// The gradient is not in its slice in the first backward, after zero_grad with set_to_none, and if
// the user assigned another tensor. It is copied to the slice, and becomes its view unless
// gradients are separate tensors.
void Core::move_to_bucket(size_t index)
{
    at::Tensor &grad = params_[index].tensor.mutable_grad();
    check_gradient(index, grad);
    if (params_[index].sparse) {
        return;
    }
    const at::Tensor &view = views_[index];
    if (grad.defined() && is_view_of(grad, view)) {
        return;
    }
    const at::NoGradGuard no_grad;
    if (!grad.defined()) {
        view.zero_(); // autograd passed no gradient here; other ranks may have one
    } else {
        copy_into(view, grad);
    }
    if (!separate_grads_) {
        grad = view;
    }
}

// This rank doesn't use the parameter. Its accumulated gradient, if any, contributes to the average
// if another rank uses the parameter; else it must stay as it is.
void Core::fill_unused_slice(size_t index)
{
    const at::Tensor &grad = params_[index].tensor.grad();
    if (params_[index].sparse) {
        return;
    }
    const at::NoGradGuard no_grad;
    if (!grad.defined()) {
        views_[index].zero_();
    } else if (is_view_of(grad, views_[index])) {
        saved_[index] = grad.clone();
    } else {
        check_gradient(index, grad);
        views_[index].copy_(grad);
    }
}

// The slice contains the average.
void Core::finalize_gradient(size_t index)
{
    if (params_[index].sparse) {
        return;
    }
    at::Tensor &grad = params_[index].tensor.mutable_grad();
    const at::Tensor &view = views_[index];
    const at::Tensor kept = std::move(saved_[index]);
    saved_[index] = at::Tensor();
    if (!tddp_reducer_used(reducer_, index)) {
        if (kept.defined()) {
            view.copy_(kept);
        }
    } else if (!separate_grads_) {
        if (!grad.defined() || !is_view_of(grad, view)) {
            grad = view;
        }
    } else if (grad.defined()) {
        if (!is_view_of(grad, view)) {
            grad.copy_(view);
        }
    } else {
        grad = view.clone();
    }
}

void Core::finalize_gradients(const tddp_wait *wait)
{
    const at::NoGradGuard no_grad;
    if (separate_grads_) {
        for (size_t i = 0; i < params_.size(); i++) {
            finalize_gradient(i);
        }
    } else {
        for (const size_t i : unused_) {
            finalize_gradient(i);
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
    const tddp_flat_slice &slice = bucket.gradients[i];
    const at::Tensor &view = views_.at(slice.param);
    if (at::isComplexType(view.scalar_type()) ||
        view.scalar_type() == scalar_type_of(bucket.buffer.dtype)) {
        return view.variable_data();
    }
    // A hook around this one passes the gradients in another dtype.
    return bucket_tensor(bucket)
        .narrow(0, static_cast<int64_t>(slice.offset), static_cast<int64_t>(slice.count))
        .view(view.sizes());
}

} // namespace tddp_torch
