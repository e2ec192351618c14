// Pieces: several tensors as parts of a flat one, so that a device is spoken to once for all of
// them, and their way between devices. Any thread, on the current stream of each device; all of it
// under no_grad. Parts begin at multiples of 64 bytes, where vector loads and matrix products are
// fastest. Between GPUs NCCL carries pieces where libtorch was built with it.
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

#include "torch/data_parallel/pieces.h"

namespace tddp_torch
{

namespace
{

constexpr int64_t alignment = 64; // bytes

// From the end of a part to where the next one begins.
int64_t gap_after(const Form &form)
{
    const int64_t each = static_cast<int64_t>(c10::elementSize(form.dtype));
    const int64_t unit = alignment / each;
    return (unit - form.count % unit) % unit;
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

at::Tensor line_of(const at::Tensor &tensor, const Form &form)
{
    if (form.fits(tensor)) {
        return tensor.as_strided({form.count}, {1});
    }
    const at::Tensor laid = at::empty_strided(form.sizes, form.strides, tensor.options());
    laid.copy_(tensor);
    return laid.as_strided({form.count}, {1});
}

#ifdef TDDP_WITH_CUDA
bool different_gpus(at::Device home, const std::vector<at::Device> &others)
{
    std::vector<at::Device> all(others);
    all.push_back(home);
    for (size_t i = 0; i < all.size(); i++) {
        if (!all[i].is_cuda() || std::find(all.begin(), all.begin() + static_cast<ptrdiff_t>(i),
                                           all[i]) != all.begin() + static_cast<ptrdiff_t>(i)) {
            return false;
        }
    }
    return true;
}

// libtorch's own question, nccl::is_available, is not exported everywhere.
bool nccl_adds(at::ScalarType dtype)
{
    return torch::cuda::nccl::version() != 0 && (dtype == at::kFloat || dtype == at::kDouble ||
                                                 dtype == at::kHalf || dtype == at::kBFloat16);
}

// By bytes, since NCCL does not know every dtype.
std::vector<at::Tensor> send_to_gpus(const at::Tensor &flat, const std::vector<at::Device> &devices)
{
    std::vector<int64_t> numbers{flat.device().index()};
    for (const at::Device device : devices) {
        numbers.push_back(device.index());
    }
    std::vector<at::Tensor> sent = torch::cuda::broadcast(flat.view(at::kByte), numbers);
    sent.erase(sent.begin());
    for (at::Tensor &one : sent) {
        one = one.view(flat.scalar_type());
    }
    return sent;
}

at::Tensor sum_of_gpus(at::Device home, const std::vector<at::Tensor> &parts)
{
    at::Tensor sum = at::zeros(parts[0].sizes(), parts[0].options().device(home));
    std::vector<at::Tensor> inputs{sum};
    inputs.insert(inputs.end(), parts.begin(), parts.end());
    torch::cuda::nccl::reduce(inputs, sum, 0);
    return sum;
}
#endif

} // namespace

Form::Form(const at::Tensor &tensor)
    : sizes(tensor.sizes().vec()), count(tensor.numel()), dtype(tensor.scalar_type()),
      contiguous(!travels_flat(tensor) || tensor.is_contiguous() ||
                 !tensor.is_non_overlapping_and_dense())
{
    strides = contiguous ? contiguous_strides(sizes) : tensor.strides().vec();
}

size_t Form::bytes() const
{
    return static_cast<size_t>(count) * c10::elementSize(dtype);
}

bool Form::fits(const at::Tensor &tensor) const
{
    return !tensor.is_conj() && !tensor.is_neg() &&
           (contiguous ? tensor.is_contiguous() : tensor.strides() == at::IntArrayRef(strides));
}

bool travels_flat(const at::Tensor &tensor)
{
    return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
           !tensor._is_zerotensor();
}

std::vector<std::vector<size_t>> pieces_of(const std::vector<Form> &forms, size_t limit)
{
    struct Open {
        at::ScalarType dtype;
        size_t bytes;
        std::vector<size_t> members;
    };
    std::vector<Open> all;
    for (size_t i = 0; i < forms.size(); i++) {
        const size_t bytes = forms[i].bytes();
        const auto last = std::find_if(all.rbegin(), all.rend(), [&](const Open &open) {
            return open.dtype == forms[i].dtype && open.bytes <= limit;
        });
        if (bytes <= limit && last != all.rend() && last->bytes + bytes <= limit) {
            last->bytes += bytes;
            last->members.push_back(i);
        } else {
            all.push_back({forms[i].dtype, bytes, {i}});
        }
    }
    std::vector<std::vector<size_t>> pieces;
    for (Open &open : all) {
        pieces.push_back(std::move(open.members));
    }
    return pieces;
}

at::Tensor flatten(const std::vector<at::Tensor> &tensors, const std::vector<Form> &forms)
{
    if (tensors.size() == 1) {
        return line_of(tensors[0], forms[0]);
    }
    const at::Tensor &some = *std::find_if(tensors.begin(), tensors.end(),
                                           [](const at::Tensor &each) { return each.defined(); });
    const at::TensorOptions options = some.options();
    const at::Tensor filling =
        at::zeros({alignment / static_cast<int64_t>(some.element_size())}, options);
    std::vector<at::Tensor> lines;
    for (size_t i = 0; i < tensors.size(); i++) {
        lines.push_back(tensors[i].defined() ? line_of(tensors[i], forms[i])
                                             : at::zeros({forms[i].count}, options));
        const int64_t gap = gap_after(forms[i]);
        if (gap > 0) {
            lines.push_back(filling.as_strided({gap}, {1}));
        }
    }
    return at::cat(lines);
}

std::vector<at::Tensor> unflatten(const at::Tensor &flat, const std::vector<Form> &forms)
{
    std::vector<at::Tensor> parts;
    int64_t at = flat.storage_offset();
    for (const Form &form : forms) {
        const at::Tensor part = flat.as_strided(form.sizes, form.strides, at);
        // Those of inference mode have none.
        parts.push_back(part.is_inference() ? part : part.variable_data());
        at += form.count + gap_after(form);
    }
    return parts;
}

std::vector<at::Tensor> send(const at::Tensor &flat, const std::vector<at::Device> &devices,
                             bool fresh)
{
#ifdef TDDP_WITH_CUDA
    if (flat.numel() > 0 && different_gpus(flat.device(), devices)) {
        return send_to_gpus(flat, devices);
    }
#endif
    std::vector<at::Tensor> sent;
    for (const at::Device device : devices) {
        const bool here = device == flat.device();
        sent.push_back(here && !fresh ? flat.clone() : flat.to(device));
        fresh = fresh && !here;
    }
    return sent;
}

at::Tensor sum_on(at::Device home, const std::vector<at::Tensor> &parts)
{
#ifdef TDDP_WITH_CUDA
    std::vector<at::Device> devices;
    for (const at::Tensor &part : parts) {
        devices.push_back(part.device());
    }
    if (parts.size() > 1 && parts[0].numel() > 0 && nccl_adds(parts[0].scalar_type()) &&
        different_gpus(home, devices)) {
        return sum_of_gpus(home, parts);
    }
#endif
    at::Tensor sum = parts[0].device() == home ? parts[0].clone() : parts[0].to(home);
    for (size_t i = 1; i < parts.size(); i++) {
        sum.add_(parts[i].to(home));
    }
    return sum;
}

} // namespace tddp_torch
