// Averages sparse gradients: gathers the entries of all ranks and sums them by coalescing. The
// first all_gather exchanges the numbers of entries of all parameters; then one per parameter
// gathers the entries, padded to the longest. On the thread that finishes the iteration, or on a
// helper thread for it. A rank without a gradient contributes no entries; a parameter without a
// gradient on every rank is skipped.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include "torch/tensor/blocking_ops.h"
#include "torch/ddp/core.h"

namespace tddp_torch
{

namespace
{

constexpr int64_t alignment = 16; // of the largest dtype

int64_t padded(int64_t bytes)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

// `flat` of every rank, as rows.
at::Tensor all_gather_rows(tddp_group *group, const at::Tensor &flat, const tddp_wait *wait)
{
    const int64_t ranks = tddp_group_world_size(group);
    if (ranks == 1) {
        return flat.unsqueeze(0);
    }
    const at::Tensor rows = at::empty({ranks, flat.numel()}, flat.options());
    all_gather_blocking(group, flat, rows, nullptr, wait);
    return rows;
}

// The memory layout of a parameter's entries: their indices, then their values.
struct EntryLayout {
    int64_t dimensions; // sparse ones
    int64_t room;       // for entries
    std::vector<int64_t> value_shape;
    at::TensorOptions options; // of the values

    int64_t index_bytes() const
    {
        return padded(dimensions * room * static_cast<int64_t>(sizeof(int64_t)));
    }
    int64_t bytes() const
    {
        int64_t size =
            static_cast<int64_t>(c10::elementSize(c10::typeMetaToScalarType(options.dtype()))) *
            room;
        for (const int64_t dim : value_shape) {
            size *= dim;
        }
        return index_bytes() + padded(size);
    }
    at::Tensor indices(char *at, int64_t count) const
    {
        return tensor_over(at, {dimensions, room}, options.dtype(at::kLong)).narrow(1, 0, count);
    }
    at::Tensor values(char *at, int64_t count) const
    {
        std::vector<int64_t> shape{room};
        shape.insert(shape.end(), value_shape.begin(), value_shape.end());
        return tensor_over(at + index_bytes(), shape, options).narrow(0, 0, count);
    }
};

char *bytes_of(const at::Tensor &tensor)
{
    return static_cast<char *>(tensor.data_ptr());
}

} // namespace

// `entries` contains each rank's number of entries, -1 without a gradient, and its number of sparse
// dimensions, which is meaningless without entries: after zero_grad all dimensions are sparse.
at::Tensor Core::sparse_average(size_t index, const at::Tensor &entries,
                                const tddp_wait *wait) const
{
    const at::Tensor &param = params_[index].tensor;
    const at::Tensor grad = param.grad().defined() ? param.grad().coalesce() : at::Tensor();
    const int64_t ranks = entries.size(0);
    EntryLayout layout{
        0, 0, {}, at::TensorOptions().dtype(param.scalar_type()).device(param.device())};
    std::vector<int64_t> counts;
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t count = entries[rank][0].item<int64_t>();
        const int64_t dimensions = entries[rank][1].item<int64_t>();
        if (count > 0 && layout.dimensions > 0 && dimensions != layout.dimensions) {
            throw Failure(tddp_fail(TDDP_MISMATCH,
                                    "the gradient of \"%s\" has %lld sparse dimensions on rank "
                                    "%lld, but %lld on a lower rank: expected the same number on "
                                    "every rank",
                                    params_[index].name.c_str(), static_cast<long long>(dimensions),
                                    static_cast<long long>(rank),
                                    static_cast<long long>(layout.dimensions)));
        }
        layout.dimensions = count > 0 ? dimensions : layout.dimensions;
        layout.room = std::max(layout.room, count);
        counts.push_back(std::max<int64_t>(count, 0));
    }
    if (layout.room == 0) { // no rank has an entry
        layout.dimensions = std::min<int64_t>(1, param.dim());
    }
    layout.value_shape.assign(param.sizes().begin() + layout.dimensions, param.sizes().end());
    const at::Tensor flat =
        at::zeros({std::max<int64_t>(layout.bytes(), 1)}, layout.options.dtype(at::kByte));
    if (grad.defined() && grad._nnz() > 0) {
        layout.indices(bytes_of(flat), grad._nnz()).copy_(grad._indices());
        layout.values(bytes_of(flat), grad._nnz()).copy_(grad._values());
    }
    const at::Tensor rows = layout.bytes() > 0 ? all_gather_rows(group_, flat, wait) : flat;
    std::vector<at::Tensor> indices;
    std::vector<at::Tensor> values;
    for (int64_t rank = 0; rank < ranks; rank++) {
        char *row = bytes_of(rows) + (layout.bytes() > 0 ? rank * layout.bytes() : 0);
        indices.push_back(layout.indices(row, counts[static_cast<size_t>(rank)]));
        values.push_back(layout.values(row, counts[static_cast<size_t>(rank)]));
    }
    const at::Tensor sum =
        at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values), param.sizes()).coalesce();
    sum._values().div_(divisor_);
    return sum;
}

// A failure is permanent: the other ranks continue with operations that this rank doesn't submit.
void Core::reduce_sparse(const tddp_wait *wait)
{
    const at::NoGradGuard no_grad;
    try {
        all_reduce_sparse(wait);
    } catch (const std::exception &error) {
        sparse_failure_ = error.what();
        throw;
    }
}

void Core::all_reduce_sparse(const tddp_wait *wait)
{
    const auto count = static_cast<int64_t>(sparse_.size());
    const at::Tensor mine = at::empty({count, 2}, at::TensorOptions().dtype(at::kLong));
    for (int64_t i = 0; i < count; i++) {
        const at::Tensor grad = params_[sparse_[static_cast<size_t>(i)]].tensor.grad();
        const bool there = grad.defined() && grad.layout() == at::kSparse;
        mine[i][0] = there ? grad.coalesce()._nnz() : -1;
        mine[i][1] = there ? grad.sparse_dim() : 0;
    }
    const at::Tensor all =
        all_gather_rows(group_, mine.view({count * 2}), wait).view({-1, count, 2});
    for (int64_t i = 0; i < count; i++) {
        const size_t index = sparse_[static_cast<size_t>(i)];
        const at::Tensor entries = all.select(1, i);
        if (tddp_reducer_used(reducer_, index) && entries.select(1, 0).max().item<int64_t>() >= 0) {
            params_[index].tensor.mutable_grad() = sparse_average(index, entries, wait);
        }
    }
}

} // namespace tddp_torch
