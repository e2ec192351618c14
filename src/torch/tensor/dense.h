// Which tensors loops may treat as arrays.
#ifndef TDDP_TORCH_DENSE_H
#define TDDP_TORCH_DENSE_H

#include "torch/tensor/shim.h"

namespace tddp_torch
{

// The elements are in CPU memory, without gaps or overlap, in any order.
inline bool is_dense_on_cpu(const at::Tensor &tensor)
{
    return tensor.defined() && tensor.layout() == at::kStrided && is_on_cpu(tensor) &&
           tensor.has_storage() && !tensor.is_quantized() && !tensor.is_conj() &&
           !tensor.is_neg() && !tensor._is_zerotensor() && !tensor.is_inference() &&
           tensor.is_non_overlapping_and_dense();
}

// The tensor is dense, with the same dtype, sizes and strides as `other`, which is dense.
inline bool has_layout_of(const at::Tensor &tensor, const at::Tensor &other)
{
    return is_dense_on_cpu(tensor) && tensor.scalar_type() == other.scalar_type() &&
           tensor.sizes() == other.sizes() &&
           ((tensor.is_contiguous() && other.is_contiguous()) ||
            tensor.strides() == other.strides());
}

} // namespace tddp_torch

#endif
