// Functions whose backward is the host language's: see <tddp/torch_function.h>. The node saves
// tensors as autograd's own nodes do, so that changes in place are detected, and an output that is
// saved doesn't own the node that saves it. On the threads that run forward and backward.
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <tddp/torch_function.h>

#include "torch/autograd/end_of_backward.h"
#include "torch/autograd/node.h"
#include "torch/autograd/saved.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

using TensorList = std::vector<at::Tensor>; // undefined: not a tensor

// What a gradient of a tensor looks like.
struct TensorForm {
    explicit TensorForm(const at::Tensor &tensor)
    {
        if (tensor.defined()) {
            sizes = tensor.sizes().vec();
            options = tensor.options();
            defined = true;
            requires_grad = tensor.requires_grad();
        }
    }
    at::Tensor zeros() const
    {
        return defined ? at::zeros(sizes, options) : at::Tensor();
    }

    std::vector<int64_t> sizes;
    at::TensorOptions options;
    bool defined = false;
    bool requires_grad = false;
};

TensorList list_of(tddp_tensor *const *tensors, size_t count)
{
    TensorList list;
    for (size_t i = 0; i < count; i++) {
        list.push_back(tensors[i] ? tensor_of(tensors[i]) : at::Tensor());
    }
    return list;
}

std::vector<tddp_tensor *> handles_of(TensorList &tensors, bool undefined_too)
{
    std::vector<tddp_tensor *> handles;
    for (at::Tensor &tensor : tensors) {
        const bool given = undefined_too || tensor.defined();
        handles.push_back(given ? reinterpret_cast<tddp_tensor *>(&tensor) : nullptr);
    }
    return handles;
}

class FunctionNode final : public torch::autograd::Node
{
  public:
    FunctionNode(const tddp_function_forward &forward, const tddp_function_ops &ops, void *state)
        : function_(forward.name), materialize_(forward.materialize_grads != 0), ops_(ops),
          state_(state)
    {
    }
    ~FunctionNode() override
    {
        free_state();
    }
    FunctionNode(const FunctionNode &) = delete;
    FunctionNode &operator=(const FunctionNode &) = delete;

    void set_inputs(const TensorList &inputs)
    {
        torch::autograd::edge_list edges;
        for (const at::Tensor &input : inputs) {
            inputs_.emplace_back(input);
            edges.push_back(inputs_.back().requires_grad
                                ? torch::autograd::impl::gradient_edge(input)
                                : torch::autograd::Edge());
        }
        set_next_edges(std::move(edges));
    }
    // `differentiable`: whether the next gradient that backward gets is this output's.
    void add_output(const at::Tensor &output, bool differentiable)
    {
        outputs_.emplace_back(output);
        outputs_.back().requires_grad = differentiable;
    }
    void save(const at::Tensor &tensor, bool is_output)
    {
        saved_.emplace_back(tensor, is_output);
    }
    // The caller keeps the ownership of its state.
    void release_ownership()
    {
        state_ = nullptr;
        ops_.free = nullptr;
    }
    variable_list apply(variable_list &&grads) override;
    void release_variables() override
    {
        saved_.clear();
        free_state();
    }
    std::string name() const override
    {
        return function_ + "Backward";
    }

  private:
    TensorList unpacked();
    TensorList output_grads(const variable_list &grads) const;
    void check_gradient(size_t number, const at::Tensor &gradient) const;
    void free_state()
    {
        if (ops_.free && !released_) {
            ops_.free(state_);
        }
        released_ = true;
    }

    const std::string function_;
    const bool materialize_;
    tddp_function_ops ops_;
    void *state_;
    bool released_ = false;
    std::vector<TensorForm> inputs_;
    std::vector<TensorForm> outputs_;
    std::vector<Saved> saved_;
};

TensorList FunctionNode::unpacked()
{
    TensorList tensors;
    for (const Saved &saved : saved_) {
        tensors.push_back(saved.unpack(pointer_to(*this)));
    }
    return tensors;
}

// One for each output, also those for which autograd computes none.
TensorList FunctionNode::output_grads(const variable_list &grads) const
{
    TensorList list;
    size_t next = 0;
    for (const TensorForm &output : outputs_) {
        at::Tensor grad;
        if (output.requires_grad) {
            grad = grads[next++];
        }
        list.push_back(grad.defined() || !materialize_ ? grad : output.zeros());
    }
    return list;
}

// Autograd would sum a gradient to a smaller shape, and convert its dtype, without a word.
void FunctionNode::check_gradient(size_t number, const at::Tensor &gradient) const
{
    if (!gradient.defined()) {
        return;
    }
    const TensorForm &input = inputs_[number];
    std::ostringstream text;
    text << function_ << ".backward returned a gradient for argument " << number;
    if (!input.defined) {
        text << ", which is not a tensor: expected none";
    } else if (gradient.sizes() != at::IntArrayRef(input.sizes)) {
        text << " of the shape " << gradient.sizes() << ", expected the argument's, "
             << at::IntArrayRef(input.sizes);
    } else if (gradient.dtype() != input.options.dtype()) {
        text << " of the dtype " << gradient.dtype() << ", expected the argument's, "
             << input.options.dtype();
    } else if (gradient.device() != input.options.device()) {
        text << " on " << gradient.device() << ", expected the argument's device, "
             << input.options.device();
    } else {
        return;
    }
    throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "%s", text.str().c_str()));
}

variable_list FunctionNode::apply(variable_list &&grads)
{
    if (released_) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "backward through %s a second time: what it saved is freed, call "
                                "the first backward with retain_graph: true",
                                function_.c_str()));
    }
    TensorList saved = unpacked();
    TensorList all_grads = output_grads(grads);
    TensorList results(inputs_.size());
    const auto saved_handles = handles_of(saved, false);
    const auto grad_handles = handles_of(all_grads, false);
    const auto result_handles = handles_of(results, true);
    tddp_function_backward call{};
    call.size = sizeof call;
    call.saved = saved_handles.data();
    call.saved_count = saved_handles.size();
    call.grads = grad_handles.data();
    call.grad_count = grad_handles.size();
    call.result = result_handles.data();
    call.result_count = result_handles.size();
    NestedBackward nested; // the host's backward may run one
    check(ops_.backward(state_, &call));
    nested.close();
    for (size_t i = 0; i < results.size(); i++) {
        check_gradient(i, results[i]);
        if (!inputs_[i].requires_grad) {
            results[i].reset();
        }
    }
    return results;
}

/* --- after forward --------------------------------------------------------------------------- */

// A tensor with the elements of forward's output and no history, to which create_gradient_edge()
// may give one.
at::Tensor output_alias(const at::Tensor &output)
{
    at::Tensor alias = output.detach();
    alias.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
    return alias;
}

// The same for an input, or a view of one. It is a view too, of which autograd refuses changes in
// place: they would also change the input, unknown to the input's history.
at::Tensor output_view(const at::Tensor &output)
{
    const at::NoGradGuard no_grad;
    at::Tensor view = output.view_as(output);
    auto *meta = torch::autograd::impl::get_view_autograd_meta(view);
    if (meta && meta->has_bw_view()) {
        meta->set_creation_meta(torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    }
    return view;
}

at::Tensor output_for(const at::Tensor &output, bool differentiable)
{
    if (!output.defined()) {
        return output;
    }
    return differentiable && (output.requires_grad() || output.is_view()) ? output_view(output)
                                                                          : output_alias(output);
}

void check_device(const at::Tensor &output, size_t number, const char *function)
{
    if (!is_on_cpu(output)) {
        std::ostringstream text;
        text << "output " << number << " of " << function << " is on " << output.device()
             << ", where autograd runs backward on threads of its own, which can't run the host "
                "language's code: compute on the CPU, or use operations that have a gradient "
                "already instead of a function";
        throw Failure(tddp_fail(TDDP_UNSUPPORTED, "%s", text.str().c_str()));
    }
}

bool has_history(const TensorList &inputs)
{
    bool any = false;
    for (const at::Tensor &input : inputs) {
        any = any || (input.defined() && input.requires_grad());
    }
    return any && at::GradMode::is_enabled();
}

// Which outputs have a gradient.
std::vector<bool> differentiable_outputs(const tddp_function_forward &forward,
                                         const TensorList &outputs, bool history)
{
    std::vector<bool> differentiable;
    for (size_t i = 0; i < outputs.size(); i++) {
        const bool refused = forward.non_differentiable && forward.non_differentiable[i];
        differentiable.push_back(history && !refused && can_have_gradient(outputs[i]));
        if (differentiable.back()) {
            check_device(outputs[i], i, forward.name);
        }
    }
    return differentiable;
}

void save_tensors(FunctionNode &node, const TensorList &saved, const TensorList &before,
                  const TensorList &after, const std::vector<bool> &differentiable)
{
    for (const at::Tensor &tensor : saved) {
        size_t i = 0;
        while (i < before.size() &&
               !(tensor.defined() && differentiable[i] && before[i].is_same(tensor))) {
            i++;
        }
        node.save(i < before.size() ? after[i] : tensor, i < before.size());
    }
}

void connect(const tddp_function_forward &forward, const NodePointer &pointer)
{
    auto &node = static_cast<FunctionNode &>(*pointer);
    const TensorList inputs = list_of(forward.inputs, forward.input_count);
    const TensorList before = list_of(forward.outputs, forward.output_count);
    const TensorList saved = list_of(forward.saved, forward.saved_count);
    const auto differentiable = differentiable_outputs(forward, before, has_history(inputs));
    TensorList after;
    node.set_inputs(inputs);
    for (size_t i = 0; i < before.size(); i++) {
        after.push_back(output_for(before[i], differentiable[i]));
        node.add_output(before[i], differentiable[i]);
        if (differentiable[i]) {
            torch::autograd::create_gradient_edge(after[i], pointer);
        }
    }
    save_tensors(node, saved, before, after, differentiable);
    for (size_t i = 0; i < after.size(); i++) {
        if (after[i].defined()) {
            *reinterpret_cast<at::Tensor *>(forward.outputs[i]) = after[i];
        }
    }
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_function_apply(const tddp_function_forward *forward, const tddp_function_ops *ops,
                                void *state)
{
    using namespace tddp_torch;
    return guard([&] {
        if (!forward || forward->size != sizeof *forward || !forward->name || !ops ||
            ops->size != sizeof *ops || !ops->backward) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "a function without size, name or backward: expected all"));
        }
        const NodePointer node = make_node<FunctionNode>(*forward, *ops, state);
        try {
            connect(*forward, node);
        } catch (...) {
            static_cast<FunctionNode &>(*node).release_ownership();
            throw;
        }
    });
}
