// The norm of many gradients at once, over all ranks where they are parts of a whole, and their
// clipping. Each is read once for the norm, and once more only if it has to be scaled. Called by
// the thread that trains. Sums of pieces are kept apart and added in order, so the result depends
// neither on the number of threads nor on chance.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <tddp/torch_nn.h>
#include <tddp/torch_optim.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/tensor/agree.h"
#include "torch/optim/fused_kernels.h"
#include "torch/tensor/parallel.h"
#include "torch/tensor/plain_memory.h"

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

double put_together(NormKind kind, double sum, double part)
{
    if (kind != NormKind::largest) {
        return sum + part;
    }
    return part > sum || std::isnan(part) ? part : sum;
}

// Of tensors that no loop of ours can read: on another device, with gaps, sparse. The host waits
// once for each device.
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
        sum = put_together(kind, sum, kind == NormKind::largest ? norm : std::pow(norm, order));
    }
    return sum;
}

struct Piece {
    const char *data;
    int64_t count;
    NormLoop loop;
};

void add_pieces(const at::Tensor &tensor, NormLoop loop, std::vector<Piece> &pieces)
{
    const char *data = static_cast<const char *>(tensor.data_ptr());
    for (int64_t begin = 0; begin < tensor.numel(); begin += piece_elements) {
        const int64_t count = std::min(piece_elements, tensor.numel() - begin);
        pieces.push_back({data + begin * tensor.element_size(), count, loop});
    }
}

double norm_here(const Tensors &tensors, NormKind kind, double order)
{
    std::vector<Piece> pieces;
    Tensors others;
    for (const at::Tensor &tensor : tensors) {
        const NormLoop loop =
            lies_plainly(tensor) ? norm_loop(tensor.scalar_type(), kind) : nullptr;
        if (loop) {
            add_pieces(tensor, loop, pieces);
        } else {
            others.push_back(tensor);
        }
    }
    std::vector<double> parts(pieces.size());
    in_parallel(static_cast<int64_t>(pieces.size()), [&](int64_t first, int64_t last) {
        for (int64_t at = first; at < last; at++) {
            const size_t i = static_cast<size_t>(at);
            parts[i] = pieces[i].loop(pieces[i].data, pieces[i].count, order);
        }
    });
    double sum = sum_by_operations(others, kind, order);
    for (double part : parts) {
        sum = put_together(kind, sum, part);
    }
    return sum;
}

// The largest of numbers among which one may be none, which backends need not pass on.
double largest_over_ranks(tddp_group *group, double value, const tddp_wait *wait)
{
    const at::Tensor both = at::empty({2}, at::kDouble);
    double *numbers = both.data_ptr<double>();
    numbers[0] = std::isnan(value) ? 0 : value;
    numbers[1] = std::isnan(value) ? 1 : 0;
    combine_over_ranks(group, both, TDDP_REDUCE_MAX, nullptr, wait);
    return numbers[1] > 0 ? std::numeric_limits<double>::quiet_NaN() : numbers[0];
}

double sum_over_ranks(tddp_group *group, double value, const tddp_wait *wait)
{
    const at::Tensor one = at::empty({1}, at::kDouble);
    *one.data_ptr<double>() = value;
    combine_over_ranks(group, one, TDDP_REDUCE_SUM, nullptr, wait);
    return *one.data_ptr<double>();
}

double norm_of(const Tensors &tensors, double order, tddp_group *group, const tddp_wait *wait)
{
    const at::NoGradGuard no_grad;
    const NormKind kind = kind_of(order);
    double sum = norm_here(tensors, kind, order);
    if (group) {
        sum = kind == NormKind::largest ? largest_over_ranks(group, sum, wait)
                                        : sum_over_ranks(group, sum, wait);
    }
    return kind == NormKind::squares  ? std::sqrt(sum)
           : kind == NormKind::powers ? std::pow(sum, 1 / order)
                                      : sum;
}

void scale_pieces(const Tensors &tensors, double factor)
{
    struct Target {
        char *data;
        int64_t count;
        ScaleLoop loop;
    };
    std::vector<Target> pieces;
    for (const at::Tensor &tensor : tensors) {
        const ScaleLoop loop = lies_plainly(tensor) ? scale_loop(tensor.scalar_type()) : nullptr;
        if (!loop) {
            tensor.mul_(factor);
            continue;
        }
        torch::autograd::impl::bump_version(tensor);
        char *data = static_cast<char *>(tensor.data_ptr());
        for (int64_t begin = 0; begin < tensor.numel(); begin += piece_elements) {
            const int64_t count = std::min(piece_elements, tensor.numel() - begin);
            pieces.push_back({data + begin * tensor.element_size(), count, loop});
        }
    }
    in_parallel(static_cast<int64_t>(pieces.size()), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const Target &piece = pieces[static_cast<size_t>(i)];
            piece.loop(piece.data, piece.count, factor);
        }
    });
}

void clip_to(const Tensors &gradients, double max_norm, double norm)
{
    const double factor = max_norm / (norm + 1e-6);
    if (!(factor >= 1)) { // also where the norm is no number: that shall be seen
        const at::NoGradGuard no_grad;
        scale_pieces(gradients, factor);
    }
}

// A gradient that two parameters share, or a parameter that comes twice, counts once.
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
    Tensors once;
    for (const at::Tensor &gradient : gradients) {
        const bool known = std::any_of(once.begin(), once.end(), [&](const at::Tensor &other) {
            return other.is_same(gradient);
        });
        if (!known) {
            once.push_back(gradient);
        }
    }
    return once;
}

} // namespace

} // namespace tddp_torch

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
                                    "clipped to %g: look for what made it, or pass "
                                    "error_if_nonfinite: false to scale by it all the same",
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
