// The total norm of gradients, over all ranks if they are sharded, gradient clipping, and the
// unscaling of gradients. Each gradient is read once for the norm, and a second time only if it
// must be scaled; it is unscaled and checked at once. Called by the
// training thread. The sums of chunks are added in a fixed order, so the result doesn't depend on
// the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <tddp/torch_nn.h>
#include <tddp/torch_optim.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/tensor/blocking_ops.h"
#include "torch/tensor/device.h"
#include "torch/optim/fused_kernels.h"
#include "torch/tensor/parallel.h"
#include "torch/tensor/dense.h"

namespace tddp_torch
{

namespace
{

using Tensors = std::vector<at::Tensor>;

NormKind kind_of(double order)
{
    if (!(order > 0)) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "norm_type %g: expected a number above 0, or infinity", order));
    }
    return std::isinf(order) ? NormKind::largest
           : order == 2      ? NormKind::squares
           : order == 1      ? NormKind::absolutes
                             : NormKind::powers;
}

double combine(NormKind kind, double sum, double part)
{
    if (kind != NormKind::largest) {
        return sum + part;
    }
    return part > sum || std::isnan(part) ? part : sum;
}

// For tensors without a kernel: on another device, with gaps, sparse. The host waits once for each
// device.
double sum_by_operations(const Tensors &tensors, NormKind kind, double order)
{
    std::map<std::string, Tensors> norms;
    for (const at::Tensor &tensor : tensors) {
        const at::Tensor values =
            tensor.layout() == at::kSparse ? tensor.coalesce().values() : tensor;
        if (values.numel() > 0) {
            const at::Tensor real = values.is_complex() ? values.abs() : values;
            norms[tensor.device().str()].push_back(
                at::linalg_vector_norm(real, order, c10::nullopt, false, at::kDouble));
        }
    }
    double sum = 0;
    for (const auto &[device, each] : norms) {
        const double norm = at::linalg_vector_norm(at::stack(each), order).item().toDouble();
        sum = combine(kind, sum, kind == NormKind::largest ? norm : std::pow(norm, order));
    }
    return sum;
}

struct Chunk {
    const char *data;
    int64_t count;
    NormLoop loop;
};

void add_chunks(const at::Tensor &tensor, NormLoop loop, std::vector<Chunk> &chunks)
{
    const char *data = static_cast<const char *>(tensor.data_ptr());
    for (int64_t begin = 0; begin < tensor.numel(); begin += grain_size) {
        const int64_t count = std::min(grain_size, tensor.numel() - begin);
        chunks.push_back({data + begin * tensor.element_size(), count, loop});
    }
}

double local_norm(const Tensors &tensors, NormKind kind, double order)
{
    std::vector<Chunk> chunks;
    Tensors others;
    for (const at::Tensor &tensor : tensors) {
        const NormLoop loop =
            is_dense_on_cpu(tensor) ? norm_loop(tensor.scalar_type(), kind) : nullptr;
        if (loop) {
            add_chunks(tensor, loop, chunks);
        } else {
            others.push_back(tensor);
        }
    }
    std::vector<double> parts(chunks.size());
    parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t first, int64_t last) {
        for (int64_t at = first; at < last; at++) {
            const size_t i = static_cast<size_t>(at);
            parts[i] = chunks[i].loop(chunks[i].data, chunks[i].count, order);
        }
    });
    double sum = sum_by_operations(others, kind, order);
    for (double part : parts) {
        sum = combine(kind, sum, part);
    }
    return sum;
}

// Reduces numbers in the CPU's memory where the group takes them: with NCCL alone, on the GPU of
// the first tensor there, or the current one.
at::Tensor over_ranks(tddp_group *group, const Tensors &tensors, const at::Tensor &numbers,
                      tddp_reduce_op op, const tddp_wait *wait)
{
    const auto there = std::find_if(tensors.begin(), tensors.end(),
                                    [](const at::Tensor &tensor) { return tensor.is_cuda(); });
    const int32_t index = there == tensors.end() ? -1 : there->get_device();
    const at::Tensor sent =
        tddp_group_takes(group, TDDP_CPU) ? numbers : numbers.to(device_named(TDDP_CUDA, index));
    all_reduce_blocking(group, sent, op, nullptr, wait);
    return sent.to(at::kCPU);
}

// The maximum over the ranks, or NaN if a rank's value is NaN, which backends need not propagate.
double largest_over_ranks(tddp_group *group, const Tensors &tensors, double value,
                          const tddp_wait *wait)
{
    const at::Tensor both = at::empty({2}, at::kDouble);
    double *numbers = both.data_ptr<double>();
    numbers[0] = std::isnan(value) ? 0 : value;
    numbers[1] = std::isnan(value) ? 1 : 0;
    const at::Tensor largest = over_ranks(group, tensors, both, TDDP_REDUCE_MAX, wait);
    return largest.data_ptr<double>()[1] > 0 ? std::numeric_limits<double>::quiet_NaN()
                                             : *largest.data_ptr<double>();
}

double sum_over_ranks(tddp_group *group, const Tensors &tensors, double value,
                      const tddp_wait *wait)
{
    const at::Tensor one = at::full({1}, value, at::kDouble);
    return *over_ranks(group, tensors, one, TDDP_REDUCE_SUM, wait).data_ptr<double>();
}

double norm_of(const Tensors &tensors, double order, tddp_group *group, const tddp_wait *wait)
{
    const at::NoGradGuard no_grad;
    const NormKind kind = kind_of(order);
    double sum = local_norm(tensors, kind, order);
    if (group) {
        sum = kind == NormKind::largest ? largest_over_ranks(group, tensors, sum, wait)
                                        : sum_over_ranks(group, tensors, sum, wait);
    }
    return kind == NormKind::squares  ? std::sqrt(sum)
           : kind == NormKind::powers ? std::pow(sum, 1 / order)
                                      : sum;
}

// A part of a tensor, and the loop for its dtype.
template <typename Loop> struct LoopChunk {
    char *data;
    int64_t count;
    Loop loop;
};

// Divides tensors that are to be written to into chunks for loops; the others, which are no arrays
// or have no loop, go to `others`.
template <typename Loop>
std::vector<LoopChunk<Loop>> chunks_of(const Tensors &tensors, Loop (*loop_for)(c10::ScalarType),
                                       Tensors &others)
{
    std::vector<LoopChunk<Loop>> chunks;
    for (const at::Tensor &tensor : tensors) {
        const Loop loop = is_dense_on_cpu(tensor) ? loop_for(tensor.scalar_type()) : nullptr;
        if (!loop) {
            others.push_back(tensor);
            continue;
        }
        torch::autograd::impl::bump_version(tensor);
        char *data = static_cast<char *>(tensor.data_ptr());
        for (int64_t begin = 0; begin < tensor.numel(); begin += grain_size) {
            const int64_t count = std::min(grain_size, tensor.numel() - begin);
            chunks.push_back({data + begin * tensor.element_size(), count, loop});
        }
    }
    return chunks;
}

void scale_chunks(const Tensors &tensors, double factor)
{
    Tensors others;
    const auto chunks = chunks_of<ScaleLoop>(tensors, scale_loop, others);
    for (const at::Tensor &tensor : others) {
        tensor.mul_(factor);
    }
    parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const LoopChunk<ScaleLoop> &chunk = chunks[static_cast<size_t>(i)];
            chunk.loop(chunk.data, chunk.count, factor);
        }
    });
}

void clip_to(const Tensors &gradients, double max_norm, double norm)
{
    const double factor = max_norm / (norm + 1e-6);
    if (!(factor >= 1)) { // also if the norm is NaN, to make the gradients NaN
        const at::NoGradGuard no_grad;
        scale_chunks(gradients, factor);
    }
}

// A gradient that two parameters share, or a parameter that occurs twice, counts once.
Tensors gradients_of(const tddp_tensor *const *params, size_t count)
{
    Tensors gradients;
    std::vector<const c10::TensorImpl *> seen;
    for (size_t i = 0; i < count; i++) {
        if (tddp_has_gradient(params[i])) {
            gradients.push_back(tensor_of(params[i]).grad());
        }
    }
    for (const at::Tensor &gradient : gradients) {
        seen.push_back(gradient.unsafeGetTensorImpl());
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) == seen.end()) {
        return gradients;
    }
    Tensors unique;
    for (const at::Tensor &gradient : gradients) {
        const bool known = std::any_of(unique.begin(), unique.end(), [&](const at::Tensor &other) {
            return other.is_same(gradient);
        });
        if (!known) {
            unique.push_back(gradient);
        }
    }
    return unique;
}

/* --- unscaling ------------------------------------------------------------------------------- */

// Of tensors without a kernel. Real and imaginary parts are checked, since an absolute value may
// overflow.
bool unscale_by_operations(const Tensors &tensors, double factor)
{
    Tensors parts;
    for (const at::Tensor &tensor : tensors) {
        const at::Tensor values = tensor.layout() == at::kSparse ? tensor._values() : tensor;
        parts.push_back(values.is_complex() ? at::view_as_real(values) : values);
    }
    const double infinity = std::numeric_limits<double>::infinity();
    const bool finite = std::isfinite(sum_by_operations(parts, NormKind::largest, infinity));
    for (at::Tensor &part : parts) {
        part.mul_(factor);
    }
    return finite;
}

// Returns whether all elements were finite.
bool unscale(const Tensors &gradients, double factor)
{
    Tensors others;
    const auto chunks = chunks_of<UnscaleLoop>(gradients, unscale_loop, others);
    std::vector<char> finite(chunks.size());
    parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t first, int64_t last) {
        for (int64_t at = first; at < last; at++) {
            const size_t i = static_cast<size_t>(at);
            finite[i] = chunks[i].loop(chunks[i].data, chunks[i].count, factor);
        }
    });
    const bool others_finite = unscale_by_operations(others, factor);
    return others_finite && std::all_of(finite.begin(), finite.end(), [](char is) { return is; });
}

void check_no_float16(const Tensors &gradients)
{
    for (const at::Tensor &gradient : gradients) {
        if (gradient.scalar_type() == at::kHalf) {
            throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                    "gradients in float16 can't be unscaled, because small ones "
                                    "would be lost: keep the parameters in float32"));
        }
    }
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_unscale_gradients(const tddp_tensor *const *params, size_t count, double factor,
                                   tddp_group *group, const tddp_wait *wait, tddp_gradients *out)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::NoGradGuard no_grad;
        const Tensors gradients = gradients_of(params, count);
        check_no_float16(gradients);
        int found = TDDP_GRADIENTS_NONE;
        if (!gradients.empty()) {
            found = unscale(gradients, factor) ? TDDP_GRADIENTS_FINITE : TDDP_GRADIENTS_NONFINITE;
        }
        if (group) {
            found = static_cast<int>(largest_over_ranks(group, gradients, found, wait));
        }
        *out = static_cast<tddp_gradients>(found);
    });
}

tddp_status tddp_total_norm(const tddp_tensor *const *tensors, size_t count, double norm_type,
                            tddp_group *group, const tddp_wait *wait, double *out)
{
    using namespace tddp_torch;
    return guard([&] {
        Tensors all;
        for (size_t i = 0; i < count; i++) {
            all.push_back(tensor_of(tensors[i]));
        }
        *out = norm_of(all, norm_type, group, wait);
    });
}

tddp_status tddp_clip_grad_norm(const tddp_tensor *const *params, size_t count, double max_norm,
                                double norm_type, int error_if_nonfinite, tddp_group *group,
                                const tddp_wait *wait, double *out)
{
    using namespace tddp_torch;
    return guard([&] {
        const Tensors gradients = gradients_of(params, count);
        const double norm = norm_of(gradients, norm_type, group, wait);
        if (error_if_nonfinite && !std::isfinite(norm)) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "the gradients' norm of order %g is %g, so they cannot be "
                                    "clipped to %g: find its cause, or pass error_if_nonfinite: "
                                    "false to scale by it nevertheless",
                                    norm_type, norm, max_norm));
        }
        clip_to(gradients, max_norm, norm);
        *out = norm;
    });
}

tddp_status tddp_scale_gradients(const tddp_tensor *const *params, size_t count, double max_norm,
                                 double norm)
{
    using namespace tddp_torch;
    return guard([&] { clip_to(gradients_of(params, count), max_norm, norm); });
}

tddp_status tddp_clip_grad_value(const tddp_tensor *const *params, size_t count, double clip_value)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::NoGradGuard no_grad;
        for (at::Tensor &gradient : gradients_of(params, count)) {
            const at::Tensor values =
                gradient.layout() == at::kSparse ? gradient._values() : gradient;
            values.clamp_(-clip_value, clip_value);
        }
    });
}
