// Tensors flattened into chunks, and copies and sums of chunks between devices.
#ifndef TDDP_TORCH_FLATTEN_H
#define TDDP_TORCH_FLATTEN_H

#include <vector>

#include <ATen/core/Tensor.h>

namespace tddp_torch
{

// A tensor's layout in a chunk: its own strides if it has no gaps, else contiguous.
struct TensorLayout {
    explicit TensorLayout(const at::Tensor &tensor);
    size_t bytes() const;
    // Whether the tensor has this layout.
    bool matches(const at::Tensor &tensor) const;

    std::vector<int64_t> sizes, strides;
    int64_t count;
    at::ScalarType dtype;
    bool contiguous;
};

// Whether a tensor has plain memory: neither sparse nor quantized.
bool can_flatten(const at::Tensor &tensor);

// Groups layouts into chunks of one dtype and at most `limit` bytes, unless a chunk has a single
// tensor. Returns each chunk's indices, in increasing order.
std::vector<std::vector<size_t>> group_into_chunks(const std::vector<TensorLayout> &layouts,
                                                   size_t limit);

// Concatenates the tensors, with zeros for an undefined one; at least one is defined. For a single
// tensor that matches its layout the result may share its memory.
at::Tensor flatten(const std::vector<at::Tensor> &tensors,
                   const std::vector<TensorLayout> &layouts);

// Views of `flat` with these layouts, each with its own version counter.
std::vector<at::Tensor> unflatten(const at::Tensor &flat, const std::vector<TensorLayout> &layouts);

// Returns a copy of the flat tensor on each device, also on its own. `exclusive`: nothing else uses
// `flat`, so it may be one of the copies.
std::vector<at::Tensor> broadcast_flat(const at::Tensor &flat,
                                       const std::vector<at::Device> &devices, bool exclusive);

// The sum of flat tensors of one length and dtype, on `device`, in new memory.
at::Tensor reduce_add(at::Device device, const std::vector<at::Tensor> &parts);

} // namespace tddp_torch

#endif
