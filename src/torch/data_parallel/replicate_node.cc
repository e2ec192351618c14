// Gradients that come back from several devices are added up where the tensors are: in one flat
// piece, and one by one where that cannot be. Runs on whichever thread autograd chooses, on a
// device's own for GPUs, and asks for no lock. A node keeps nothing of the tensors but their forms,
// so it may be called again.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include "torch/data_parallel/replicate.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

// Adds up gradients of one tensor.
class Sum
{
  public:
    void add(const at::Tensor &more)
    {
        if (!sum_.defined()) {
            sum_ = more;
        } else if (own_ && !at::GradMode::is_enabled() && !sum_.is_sparse()) {
            sum_.add_(more);
        } else {
            // A sparse tensor can be added to a dense one only.
            sum_ = sum_.is_sparse() ? more.add(sum_) : sum_.add(more);
            own_ = true;
        }
    }
    const at::Tensor &get() const
    {
        return sum_;
    }

  private:
    at::Tensor sum_;
    bool own_ = false; // nobody else has it
};

class ReplicateNode final : public torch::autograd::Node
{
  public:
    ReplicateNode(std::vector<Form> forms, at::Device home, size_t devices)
        : forms_(std::move(forms)), home_(home), devices_(devices)
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
    bool travels(variable_list &grads, size_t i) const;
    void add_each(variable_list &grads, size_t i, Sum &sum) const;
    void add_flat(variable_list &grads, const std::vector<size_t> &which,
                  std::vector<Sum> &sums) const;

    const std::vector<Form> forms_;
    const at::Device home_;
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
        if (travels(grads, i)) {
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

// Flat pieces have no history, so with create_graph there are none.
bool ReplicateNode::travels(variable_list &grads, size_t i) const
{
    bool flat = !at::GradMode::is_enabled();
    for (size_t device = 0; device < devices_; device++) {
        const at::Tensor &grad = gradient(grads, device, i);
        flat = flat && (!grad.defined() || travels_flat(grad));
    }
    return flat;
}

void ReplicateNode::add_each(variable_list &grads, size_t i, Sum &sum) const
{
    for (size_t device = 0; device < devices_; device++) {
        const at::Tensor &grad = gradient(grads, device, i);
        if (grad.defined()) {
            sum.add(grad.to(home_));
        }
    }
}

// Gradients are let go of as soon as they are part of a piece.
void ReplicateNode::add_flat(variable_list &grads, const std::vector<size_t> &which,
                             std::vector<Sum> &sums) const
{
    const at::NoGradGuard no_grad;
    std::vector<Form> forms;
    for (const size_t i : which) {
        forms.push_back(forms_[i]);
    }
    std::vector<at::Tensor> parts;
    for (size_t device = 0; device < devices_; device++) {
        std::vector<at::Tensor> own;
        bool given = false;
        for (const size_t i : which) {
            own.push_back(std::move(gradient(grads, device, i)));
            given = given || own.back().defined();
        }
        if (given) {
            parts.push_back(flatten(own, forms));
        }
    }
    const std::vector<at::Tensor> found = unflatten(sum_on(home_, parts), forms);
    for (size_t k = 0; k < which.size(); k++) {
        sums[which[k]].add(found[k]);
    }
}

} // namespace

NodePointer replicate_node(std::vector<Form> forms, at::Device home, size_t devices)
{
    return make_node<ReplicateNode>(std::move(forms), home, devices);
}

} // namespace tddp_torch
