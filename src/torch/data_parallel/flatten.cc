// Flattens tensors into chunks, so that one copy between devices transfers all of them, and copies
// or reduces chunks between devices. Any thread, on the current stream of each device, under
// no_grad. Each tensor is aligned to 64 bytes in its chunk, where vector loads and matrix products
// are fastest. Between GPUs NCCL transfers chunks if libtorch was built with it.
#include <algorithm>

#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#ifdef TDDP_WITH_CUDA
#include <torch/csrc/cuda/comm.h>
#include <torch/csrc/cuda/nccl.h>
#endif

#include "torch/data_parallel/flatten.h"

namespace tddp_torch
{

namespace
{

constexpr int64_t alignment = 64; // bytes

// The elements between a tensor's end and the next one's start.
int64_t padding_after(const TensorLayout &layout)
{
    const int64_t each = static_cast<int64_t>(c10::elementSize(layout.dtype));
    const int64_t unit = alignment / each;
    return (unit - layout.count % unit) % unit;
}

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes)
{
    std::vector<int64_t> strides(sizes.size());
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
        strides[i] = step;
        step *= std::max<int64_t>(sizes[i], 1);
    }
    return strides;
}

at::Tensor as_1d(const at::Tensor &tensor, const TensorLayout &layout)
{
    if (layout.matches(tensor)) {
        return tensor.as_strided({layout.count}, {1});
    }
    const at::Tensor copy = at::empty_strided(layout.sizes, layout.strides, tensor.options());
    copy.copy_(tensor);
    return copy.as_strided({layout.count}, {1});
}

#ifdef TDDP_WITH_CUDA
bool distinct_gpus(at::Device device, const std::vector<at::Device> &others)
{
    std::vector<at::Device> all(others);
    all.push_back(device);
    for (size_t i = 0; i < all.size(); i++) {
        if (!all[i].is_cuda() || std::find(all.begin(), all.begin() + static_cast<ptrdiff_t>(i),
                                           all[i]) != all.begin() + static_cast<ptrdiff_t>(i)) {
            return false;
        }
    }
    return true;
}

// Not every build of libtorch exports nccl::is_available.
bool nccl_supports(at::ScalarType dtype)
{
    return torch::cuda::nccl::version() != 0 && (dtype == at::kFloat || dtype == at::kDouble ||
                                                 dtype == at::kHalf || dtype == at::kBFloat16);
}

// As bytes, since NCCL doesn't support every dtype.
std::vector<at::Tensor> nccl_broadcast(const at::Tensor &flat,
                                       const std::vector<at::Device> &devices)
{
    std::vector<int64_t> numbers{flat.device().index()};
    for (const at::Device device : devices) {
        numbers.push_back(device.index());
    }
    std::vector<at::Tensor> copies = torch::cuda::broadcast(flat.view(at::kByte), numbers);
    copies.erase(copies.begin());
    for (at::Tensor &one : copies) {
        one = one.view(flat.scalar_type());
    }
    return copies;
}

at::Tensor nccl_reduce(at::Device device, const std::vector<at::Tensor> &parts)
{
    at::Tensor sum = at::zeros(parts[0].sizes(), parts[0].options().device(device));
    std::vector<at::Tensor> inputs{sum};
    inputs.insert(inputs.end(), parts.begin(), parts.end());
    torch::cuda::nccl::reduce(inputs, sum, 0);
    return sum;
}
#endif

} // namespace

TensorLayout::TensorLayout(const at::Tensor &tensor)
    : sizes(tensor.sizes().vec()), count(tensor.numel()), dtype(tensor.scalar_type()),
      contiguous(!can_flatten(tensor) || tensor.is_contiguous() ||
                 !tensor.is_non_overlapping_and_dense())
{
    strides = contiguous ? contiguous_strides(sizes) : tensor.strides().vec();
}

size_t TensorLayout::bytes() const
{
    return static_cast<size_t>(count) * c10::elementSize(dtype);
}

bool TensorLayout::matches(const at::Tensor &tensor) const
{
    return !tensor.is_conj() && !tensor.is_neg() &&
           (contiguous ? tensor.is_contiguous() : tensor.strides() == at::IntArrayRef(strides));
}

bool can_flatten(const at::Tensor &tensor)
{
    return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
           !tensor._is_zerotensor();
}

std::vector<std::vector<size_t>> group_into_chunks(const std::vector<TensorLayout> &layouts,
                                                   size_t limit)
{
    struct Open {
        at::ScalarType dtype;
        size_t bytes;
        std::vector<size_t> members;
    };
    std::vector<Open> all;
    for (size_t i = 0; i < layouts.size(); i++) {
        const size_t bytes = layouts[i].bytes();
        const auto last = std::find_if(all.rbegin(), all.rend(), [&](const Open &open) {
            return open.dtype == layouts[i].dtype && open.bytes <= limit;
        });
        if (bytes <= limit && last != all.rend() && last->bytes + bytes <= limit) {
            last->bytes += bytes;
            last->members.push_back(i);
        } else {
            all.push_back({layouts[i].dtype, bytes, {i}});
        }
    }
    std::vector<std::vector<size_t>> chunks;
    for (Open &open : all) {
        chunks.push_back(std::move(open.members));
    }
    return chunks;
}

at::Tensor flatten(const std::vector<at::Tensor> &tensors, const std::vector<TensorLayout> &layouts)
{
    if (tensors.size() == 1) {
        return as_1d(tensors[0], layouts[0]);
    }
    const at::Tensor &first = *std::find_if(tensors.begin(), tensors.end(),
                                            [](const at::Tensor &each) { return each.defined(); });
    const at::TensorOptions options = first.options();
    const at::Tensor zeros =
        at::zeros({alignment / static_cast<int64_t>(first.element_size())}, options);
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < tensors.size(); i++) {
        parts.push_back(tensors[i].defined() ? as_1d(tensors[i], layouts[i])
                                             : at::zeros({layouts[i].count}, options));
        const int64_t padding = padding_after(layouts[i]);
        if (padding > 0) {
            parts.push_back(zeros.as_strided({padding}, {1}));
        }
    }
    return at::cat(parts);
}

std::vector<at::Tensor> unflatten(const at::Tensor &flat, const std::vector<TensorLayout> &layouts)
{
    std::vector<at::Tensor> parts;
    int64_t at = flat.storage_offset();
    for (const TensorLayout &layout : layouts) {
        const at::Tensor part = flat.as_strided(layout.sizes, layout.strides, at);
        // Inference tensors have no version counter.
        parts.push_back(part.is_inference() ? part : part.variable_data());
        at += layout.count + padding_after(layout);
    }
    return parts;
}

std::vector<at::Tensor> broadcast_flat(const at::Tensor &flat,
                                       const std::vector<at::Device> &devices, bool exclusive)
{
#ifdef TDDP_WITH_CUDA
    if (flat.numel() > 0 && distinct_gpus(flat.device(), devices)) {
        return nccl_broadcast(flat, devices);
    }
#endif
    std::vector<at::Tensor> copies;
    for (const at::Device device : devices) {
        const bool here = device == flat.device();
        copies.push_back(here && !exclusive ? flat.clone() : flat.to(device));
        exclusive = exclusive && !here;
    }
    return copies;
}

at::Tensor reduce_add(at::Device device, const std::vector<at::Tensor> &parts)
{
#ifdef TDDP_WITH_CUDA
    std::vector<at::Device> devices;
    for (const at::Tensor &part : parts) {
        devices.push_back(part.device());
    }
    if (parts.size() > 1 && parts[0].numel() > 0 && nccl_supports(parts[0].scalar_type()) &&
        distinct_gpus(device, devices)) {
        return nccl_reduce(device, parts);
    }
#endif
    at::Tensor sum = parts[0].device() == device ? parts[0].clone() : parts[0].to(device);
    for (size_t i = 1; i < parts.size(); i++) {
        sum.add_(parts[i].to(device));
    }
    return sum;
}

} // namespace tddp_torch
