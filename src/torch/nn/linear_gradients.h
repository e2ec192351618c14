// The gradients of a linear layer's weight and bias, at once or later. Rows are those of all
// dimensions but the last.
#ifndef TDDP_TORCH_LINEAR_GRADIENTS_H
#define TDDP_TORCH_LINEAR_GRADIENTS_H

#include <torch/csrc/autograd/edge.h>

#include "torch/autograd/deferred.h"

namespace tddp_torch
{

at::Tensor rows_of(const at::Tensor &tensor);
at::Tensor weight_gradient(const at::Tensor &gradient_rows, const at::Tensor &input_rows);
at::Tensor bias_gradient(const at::Tensor &gradient_rows);

// `edges` lead to the weight's and the bias's accumulators; one that isn't valid gets no gradient.
// `input_rows` may be undefined without the weight's.
void defer_weight_gradients(Deferred &later, torch::autograd::edge_list edges,
                            const at::Tensor &gradient_rows, const at::Tensor &input_rows);

} // namespace tddp_torch

#endif
