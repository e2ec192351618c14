// Which tensors our own loops may go over as over an array.
#ifndef TDDP_TORCH_PLAIN_MEMORY_H
#define TDDP_TORCH_PLAIN_MEMORY_H

#include "torch/tensor/shim.h"

namespace tddp_torch
{

// Each element once, without gaps, in this machine's memory, in whatever order.
inline bool lies_plainly(const at::Tensor &tensor)
{
    return tensor.defined() && tensor.layout() == at::kStrided && lies_on_cpu(tensor) &&
           tensor.has_storage() && !tensor.is_quantized() && !tensor.is_conj() &&
           !tensor.is_neg() && !tensor._is_zerotensor() && !tensor.is_inference() &&
           tensor.is_non_overlapping_and_dense();
}

// Plainly, with the same elements at the same places as `other`, which lies plainly.
inline bool lies_as(const at::Tensor &tensor, const at::Tensor &other)
{
    return lies_plainly(tensor) && tensor.scalar_type() == other.scalar_type() &&
           tensor.sizes() == other.sizes() &&
           ((tensor.is_contiguous() && other.is_contiguous()) ||
            tensor.strides() == other.strides());
}

} // namespace tddp_torch

#endif
