// Tensors that travel between devices as parts of one flat tensor, and how such a piece travels.
#ifndef TDDP_TORCH_PIECES_H
#define TDDP_TORCH_PIECES_H

#include <vector>

#include <ATen/core/Tensor.h>

namespace tddp_torch
{

// How a tensor lies in memory of its own: in its own order if it has no gaps, else in the usual
// one.
struct Form {
    explicit Form(const at::Tensor &tensor);
    size_t bytes() const;
    // Whether the tensor lies just so.
    bool fits(const at::Tensor &tensor) const;

    std::vector<int64_t> sizes, strides;
    int64_t count;
    at::ScalarType dtype;
    bool contiguous;
};

// Whether a tensor has memory that can be copied as such: not sparse, not quantized.
bool travels_flat(const at::Tensor &tensor);

// Indices of forms that go together: of one dtype, in their order, and at most `limit` bytes unless
// it is a single one.
std::vector<std::vector<size_t>> pieces_of(const std::vector<Form> &forms, size_t limit);

// A flat tensor of these, an undefined one as zeros; at least one is defined. Of a single tensor
// that lies as its form it may be that one's own memory.
at::Tensor flatten(const std::vector<at::Tensor> &tensors, const std::vector<Form> &forms);

// Parts of `flat` in these forms, each with a version of its own.
std::vector<at::Tensor> unflatten(const at::Tensor &flat, const std::vector<Form> &forms);

// A copy of the flat tensor on each device, also where it lies itself; `fresh` is one that nobody
// else has: it may be one of them.
std::vector<at::Tensor> send(const at::Tensor &flat, const std::vector<at::Device> &devices,
                             bool fresh);

// The sum of flat tensors of one length and dtype, on `home`, in memory of its own.
at::Tensor sum_on(at::Device home, const std::vector<at::Tensor> &parts);

} // namespace tddp_torch

#endif
