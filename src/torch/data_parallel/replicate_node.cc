// Sums the gradients of several devices on the tensors' device: as flat chunks, or one by one if
// that isn't possible. Runs on the thread that autograd chooses, for GPUs on a device's thread, and
// takes no lock. A node saves only the tensors' layouts, so it may be called again.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include "torch/data_parallel/replicate.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

// The sum of one tensor's gradients.
class Sum
{
  public:
    void add(const at::Tensor &more)
    {
        if (!sum_.defined()) {
            sum_ = more;
        } else if (owned_ && !at::GradMode::is_enabled() && !sum_.is_sparse()) {
            sum_.add_(more);
        } else {
            // A sparse tensor can be added to a dense one only.
            sum_ = sum_.is_sparse() ? more.add(sum_) : sum_.add(more);
            owned_ = true;
        }
    }
    const at::Tensor &get() const
    {
        return sum_;
    }

  private:
    at::Tensor sum_;
    bool owned_ = false; // nothing else uses it
};

class ReplicateNode final : public torch::autograd::Node
{
  public:
    ReplicateNode(std::vector<TensorLayout> layouts, at::Device source, size_t devices)
        : forms_(std::move(layouts)), source_(source), devices_(devices)
    {
    }
    variable_list apply(variable_list &&grads) override;
    std::string name() const override
    {
        return "ReplicateBackward";
    }

  private:
    at::Tensor &gradient(variable_list &grads, size_t device, size_t i) const
    {
        return grads[device * forms_.size() + i];
    }
    bool any(variable_list &grads, size_t i) const;
    bool can_add_flat(variable_list &grads, size_t i) const;
    void add_each(variable_list &grads, size_t i, Sum &sum) const;
    void add_flat(variable_list &grads, const std::vector<size_t> &indices,
                  std::vector<Sum> &sums) const;

    const std::vector<TensorLayout> forms_;
    const at::Device source_;
    const size_t devices_;
};

variable_list ReplicateNode::apply(variable_list &&grads)
{
    std::vector<Sum> sums(forms_.size());
    std::vector<size_t> flat;
    for (size_t i = 0; i < forms_.size(); i++) {
        if (!task_should_compute_output(i) || !any(grads, i)) {
            continue;
        }
        if (can_add_flat(grads, i)) {
            flat.push_back(i);
        } else {
            add_each(grads, i, sums[i]);
        }
    }
    if (!flat.empty()) {
        add_flat(grads, flat, sums);
    }
    variable_list back;
    for (const Sum &sum : sums) {
        back.push_back(sum.get());
    }
    return back;
}

bool ReplicateNode::any(variable_list &grads, size_t i) const
{
    for (size_t device = 0; device < devices_; device++) {
        if (gradient(grads, device, i).defined()) {
            return true;
        }
    }
    return false;
}

// Flat chunks aren't differentiable, so with create_graph gradients are summed one by one.
bool ReplicateNode::can_add_flat(variable_list &grads, size_t i) const
{
    bool flat = !at::GradMode::is_enabled();
    for (size_t device = 0; device < devices_; device++) {
        const at::Tensor &grad = gradient(grads, device, i);
        flat = flat && (!grad.defined() || can_flatten(grad));
    }
    return flat;
}

void ReplicateNode::add_each(variable_list &grads, size_t i, Sum &sum) const
{
    for (size_t device = 0; device < devices_; device++) {
        const at::Tensor &grad = gradient(grads, device, i);
        if (grad.defined()) {
            sum.add(grad.to(source_));
        }
    }
}

// Releases each gradient as soon as it is copied to a chunk.
void ReplicateNode::add_flat(variable_list &grads, const std::vector<size_t> &indices,
                             std::vector<Sum> &sums) const
{
    const at::NoGradGuard no_grad;
    std::vector<TensorLayout> layouts;
    for (const size_t i : indices) {
        layouts.push_back(forms_[i]);
    }
    std::vector<at::Tensor> parts;
    for (size_t device = 0; device < devices_; device++) {
        std::vector<at::Tensor> of_device;
        bool any_defined = false;
        for (const size_t i : indices) {
            of_device.push_back(std::move(gradient(grads, device, i)));
            any_defined = any_defined || of_device.back().defined();
        }
        if (any_defined) {
            parts.push_back(flatten(of_device, layouts));
        }
    }
    const std::vector<at::Tensor> found = unflatten(reduce_add(source_, parts), layouts);
    for (size_t k = 0; k < indices.size(); k++) {
        sums[indices[k]].add(found[k]);
    }
}

} // namespace

NodePointer replicate_node(std::vector<TensorLayout> layouts, at::Device source, size_t devices)
{
    return make_node<ReplicateNode>(std::move(layouts), source, devices);
}

} // namespace tddp_torch
