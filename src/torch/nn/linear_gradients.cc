#include "torch/nn/linear_gradients.h"

#include <ATen/ops/empty.h>

#include "torch/autograd/saved.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

class WeightGradientNode final : public torch::autograd::Node
{
  public:
    // An input that isn't needed is undefined.
    WeightGradientNode(uint64_t sequence_number, torch::autograd::edge_list edges,
                       const at::Tensor &gradient_rows, const at::Tensor &input_rows)
        : Node(sequence_number, std::move(edges)), gradient_rows_(gradient_rows, false),
          input_rows_(input_rows, false)
    {
    }
    variable_list apply(variable_list &&) override
    {
        const at::Tensor gradient_rows = gradient_rows_.unpack();
        variable_list results(2);
        if (next_edge(0).is_valid()) {
            results[0] = weight_gradient(gradient_rows, input_rows_.unpack());
        }
        if (next_edge(1).is_valid()) {
            results[1] = bias_gradient(gradient_rows);
        }
        return results;
    }
    void release_variables() override
    {
        gradient_rows_.reset_data();
        input_rows_.reset_data();
    }
    std::string name() const override
    {
        return "WeightGradientBackward";
    }

  private:
    Saved gradient_rows_;
    Saved input_rows_;
};

} // namespace

at::Tensor rows_of(const at::Tensor &tensor)
{
    return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

at::Tensor weight_gradient(const at::Tensor &gradient_rows, const at::Tensor &input_rows)
{
    return gradient_rows.t().mm(input_rows);
}

at::Tensor bias_gradient(const at::Tensor &gradient_rows)
{
    return gradient_rows.sum(0);
}

void defer_weight_gradients(Deferred &later, torch::autograd::edge_list edges,
                            const at::Tensor &gradient_rows, const at::Tensor &input_rows)
{
    const at::Tensor input_kept = edges[0].is_valid() ? input_rows : at::Tensor();
    const at::Tensor signal = at::empty({0}, gradient_rows.options());
    const NodePointer node = make_node<WeightGradientNode>(
        later.next_sequence_number(), std::move(edges), gradient_rows, input_kept);
    node->add_input_metadata(signal);
    later.add(node, signal);
}

} // namespace tddp_torch
