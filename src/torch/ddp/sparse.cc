// Averages of sparse gradients: every rank's entries are gathered and added up by coalescing. How
// many entries each has is gathered first, of all parameters in one operation; then the entries,
// parameter by parameter, padded to the longest. On the thread that waits for the round's end, or
// one that does so for it. A rank without a gradient takes part with no entries; a parameter that
// has a gradient nowhere keeps what it has.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include "torch/tensor/agree.h"
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
at::Tensor gather_rows(tddp_group *group, const at::Tensor &flat, const tddp_wait *wait)
{
    const int64_t ranks = tddp_group_world_size(group);
    if (ranks == 1) {
        return flat.unsqueeze(0);
    }
    const at::Tensor rows = at::empty({ranks, flat.numel()}, flat.options());
    gather_over_ranks(group, flat, rows, nullptr, wait);
    return rows;
}

// A parameter's entries in one piece of memory: their indices, then their values.
struct Packed {
    int64_t dimensions; // that are sparse
    int64_t room;       // entries
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

// `entries` are each rank's number of entries, -1 without a gradient, and of sparse dimensions,
// which mean nothing where there are no entries: zero_grad leaves a gradient all of whose
// dimensions are sparse.
at::Tensor Core::sparse_average(size_t index, const at::Tensor &entries,
                                const tddp_wait *wait) const
{
    const at::Tensor &param = params_[index].tensor;
    const at::Tensor grad = param.grad().defined() ? param.grad().coalesce() : at::Tensor();
    const int64_t ranks = entries.size(0);
    Packed packed{0, 0, {}, at::TensorOptions().dtype(param.scalar_type()).device(param.device())};
    std::vector<int64_t> counts;
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t count = entries[rank][0].item<int64_t>();
        const int64_t dimensions = entries[rank][1].item<int64_t>();
        if (count > 0 && packed.dimensions > 0 && dimensions != packed.dimensions) {
            throw Failure(tddp_fail(TDDP_MISMATCH,
                                    "the gradient of \"%s\" has %lld sparse dimensions on rank "
                                    "%lld, but %lld on a rank before: every rank's must have as "
                                    "many",
                                    params_[index].name.c_str(), static_cast<long long>(dimensions),
                                    static_cast<long long>(rank),
                                    static_cast<long long>(packed.dimensions)));
        }
        packed.dimensions = count > 0 ? dimensions : packed.dimensions;
        packed.room = std::max(packed.room, count);
        counts.push_back(std::max<int64_t>(count, 0));
    }
    if (packed.room == 0) { // no rank has an entry
        packed.dimensions = std::min<int64_t>(1, param.dim());
    }
    packed.value_shape.assign(param.sizes().begin() + packed.dimensions, param.sizes().end());
    const at::Tensor flat =
        at::zeros({std::max<int64_t>(packed.bytes(), 1)}, packed.options.dtype(at::kByte));
    if (grad.defined() && grad._nnz() > 0) {
        packed.indices(bytes_of(flat), grad._nnz()).copy_(grad._indices());
        packed.values(bytes_of(flat), grad._nnz()).copy_(grad._values());
    }
    const at::Tensor rows = packed.bytes() > 0 ? gather_rows(group_, flat, wait) : flat;
    std::vector<at::Tensor> indices;
    std::vector<at::Tensor> values;
    for (int64_t rank = 0; rank < ranks; rank++) {
        char *row = bytes_of(rows) + (packed.bytes() > 0 ? rank * packed.bytes() : 0);
        indices.push_back(packed.indices(row, counts[static_cast<size_t>(rank)]));
        values.push_back(packed.values(row, counts[static_cast<size_t>(rank)]));
    }
    const at::Tensor sum =
        at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values), param.sizes()).coalesce();
    sum._values().div_(divisor_);
    return sum;
}

// Other ranks go on with operations that a rank which gives up does not make.
void Core::reduce_sparse(const tddp_wait *wait)
{
    const at::NoGradGuard no_grad;
    try {
        exchange_sparse(wait);
    } catch (const std::exception &error) {
        broken_ = error.what();
        throw;
    }
}

void Core::exchange_sparse(const tddp_wait *wait)
{
    const auto count = static_cast<int64_t>(sparse_.size());
    const at::Tensor own = at::empty({count, 2}, at::TensorOptions().dtype(at::kLong));
    for (int64_t i = 0; i < count; i++) {
        const at::Tensor grad = params_[sparse_[static_cast<size_t>(i)]].tensor.grad();
        const bool there = grad.defined() && grad.layout() == at::kSparse;
        own[i][0] = there ? grad.coalesce()._nnz() : -1;
        own[i][1] = there ? grad.sparse_dim() : 0;
    }
    const at::Tensor all = gather_rows(group_, own.view({count * 2}), wait).view({-1, count, 2});
    for (int64_t i = 0; i < count; i++) {
        const size_t index = sparse_[static_cast<size_t>(i)];
        const at::Tensor entries = all.select(1, i);
        if (tddp_reducer_used(reducer_, index) && entries.select(1, 0).max().item<int64_t>() >= 0) {
            params_[index].tensor.mutable_grad() = sparse_average(index, entries, wait);
        }
    }
}

} // namespace tddp_torch
