// Batch normalization with the statistics of all ranks' batches. Forward gathers each rank's mean,
// sum of squared deviations and count, and combines them in float64, in the order of the ranks, so
// that all ranks get the same result; backward all-reduces the two sums that the input's gradient
// needs. Runs, and waits in the host's blocking region, on the threads that run forward and
// backward. libtorch's BatchNorm functions compute the normalization and the sums over a batch.
#include <algorithm>
#include <cmath>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/zeros.h>
#include <tddp/torch_nn.h>
#include <torch/csrc/autograd/custom_function.h>

#include "torch/tensor/blocking_ops.h"
#include "torch/tensor/parallel.h"
#include "torch/tensor/dense.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the graph saves for backward, besides tensors.
struct BackwardState : torch::CustomClassHolder {
    BackwardState(tddp_group *of, tddp_blocking_region how, double epsilon)
        : group(tddp_group_retain(of)), region(how), eps(epsilon)
    {
    }
    ~BackwardState() override
    {
        tddp_group_release_async(group);
    }
    BackwardState(const BackwardState &) = delete;
    BackwardState &operator=(const BackwardState &) = delete;

    tddp_group *group;
    tddp_blocking_region region;
    double eps;
    double count = 0; // values of a channel on all ranks
};
using BackwardStatePointer = c10::intrusive_ptr<BackwardState>;

/* --- statistics ------------------------------------------------------------------------------ */

// The statistics of all ranks' batches, in float64 on the CPU.
struct Statistics {
    at::Tensor mean;
    at::Tensor variance; // biased, as used for the normalization
    double count;
};

at::Tensor local_statistics(const at::Tensor &input)
{
    const int64_t channels = input.size(1);
    const at::Tensor local = at::zeros({2 * channels + 1}, at::kDouble);
    if (input.numel() > 0) {
        const double count = static_cast<double>(input.numel() / channels);
        const auto both = at::batch_norm_update_stats(input, {}, {}, 0);
        local.narrow(0, 0, channels).copy_(std::get<0>(both));
        local.narrow(0, channels, channels).copy_(std::get<1>(both)).mul_(count);
        local.data_ptr<double>()[2 * channels] = count;
    }
    return local.to(input.device());
}

Statistics combine_statistics(const at::Tensor &gathered, int64_t channels)
{
    const at::Tensor mean = at::zeros({channels}, at::kDouble);
    const at::Tensor variance = at::zeros({channels}, at::kDouble);
    const double *rows = gathered.data_ptr<double>();
    double *means = mean.data_ptr<double>(), *variances = variance.data_ptr<double>();
    const int64_t width = 2 * channels + 1;
    double count = 0;
    for (int64_t rank = 0; rank < gathered.size(0); rank++) {
        const double *row = rows + rank * width, more = row[width - 1];
        if (more == 0) {
            continue;
        }
        count += more;
        for (int64_t c = 0; c < channels; c++) {
            const double deviation = row[c] - means[c];
            means[c] += deviation * (more / count);
            variances[c] +=
                row[channels + c] + deviation * deviation * more * ((count - more) / count);
        }
    }
    for (int64_t c = 0; c < channels && count > 0; c++) {
        variances[c] /= count;
    }
    return {mean, variance, count};
}

Statistics global_statistics(const BackwardState &state, const at::Tensor &input,
                             tddp_blocking_region region)
{
    const at::Tensor local = local_statistics(input);
    const at::Tensor all =
        at::empty({tddp_group_world_size(state.group), local.numel()}, local.options());
    try {
        all_gather_blocking(state.group, local, all, region, nullptr);
    } catch (const Failure &failure) {
        if (failure.status != TDDP_CANCELED) {
            throw;
        }
        throw Failure(tddp_fail(TDDP_CANCELED,
                                "interrupted while the ranks exchanged their batches' statistics: "
                                "the others still wait for this one's"));
    }
    const Statistics found = combine_statistics(all.to(at::kCPU), input.size(1));
    if (found.count < 2) {
        std::ostringstream shape;
        shape << input.sizes();
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "expected more than 1 value per channel over all ranks when "
                                "training, got %.0f (this rank's input is %s)",
                                found.count, shape.str().c_str()));
    }
    return found;
}

// Bypasses the buffer's version counter, as BatchNorm does: graphs that saved it stay valid.
void update_running(const tddp_tensor *running, const at::Tensor &value, double momentum)
{
    if (running && tensor_of(running).defined()) {
        const at::Tensor buffer = tensor_of(running).variable_data();
        const at::Tensor fresh = value.to(buffer.device());
        buffer.copy_(buffer.to(at::kDouble).mul_(1 - momentum).add_(fresh, momentum));
    }
}

/* --- the gradient of the input --------------------------------------------------------------- */

// Per channel: (dy - mean_dy - (x - mean) * slope) * scale
struct Channel {
    double mean_dy, mean, slope, scale;
};

template <typename T> struct Columns {
    std::vector<T> mean_dy, mean, slope, scale;
};

// The samples [first, last), each with `length` numbers per channel.
template <typename T>
void sample_gradients(const Columns<T> &by, const T *dy, const T *x, T *dx, int64_t length,
                      int64_t first, int64_t last)
{
    const int64_t width = static_cast<int64_t>(by.mean.size());
    const T *mean_dy = by.mean_dy.data(), *mean = by.mean.data();
    const T *slope = by.slope.data(), *scale = by.scale.data();
    for (int64_t at = first * width * length; at < last * width * length;) {
        for (int64_t c = 0; length == 1 && c < width; c++, at++) {
            dx[at] = (dy[at] - mean_dy[c] - (x[at] - mean[c]) * slope[c]) * scale[c];
        }
        for (int64_t c = 0; length != 1 && c < width; c++) {
            for (const int64_t end = at + length; at < end; at++) {
                dx[at] = (dy[at] - mean_dy[c] - (x[at] - mean[c]) * slope[c]) * scale[c];
            }
        }
    }
}

template <typename T>
void input_gradient(const at::Tensor &grad, const at::Tensor &input,
                    const std::vector<Channel> &channels, const at::Tensor &out)
{
    Columns<T> by;
    for (const Channel &channel : channels) {
        by.mean_dy.push_back(static_cast<T>(channel.mean_dy));
        by.mean.push_back(static_cast<T>(channel.mean));
        by.slope.push_back(static_cast<T>(channel.slope));
        by.scale.push_back(static_cast<T>(channel.scale));
    }
    const int64_t samples = input.size(0), sample = input.numel() / samples;
    const int64_t batch_samples = std::max<int64_t>(grain_size / sample, 1);
    parallel_for((samples + batch_samples - 1) / batch_samples, [&](int64_t first, int64_t last) {
        sample_gradients<T>(by, grad.data_ptr<T>(), input.data_ptr<T>(), out.data_ptr<T>(),
                            sample / input.size(1), first * batch_samples,
                            std::min(last * batch_samples, samples));
    });
}

at::Tensor per_channel(const std::vector<Channel> &channels, double Channel::*what,
                       const at::Tensor &input)
{
    std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
    shape[1] = input.size(1);
    const at::Tensor values = at::empty(shape, at::kDouble);
    for (size_t c = 0; c < channels.size(); c++) {
        values.data_ptr<double>()[c] = channels[c].*what;
    }
    return values.to(input.options());
}

at::Tensor input_gradient_of(const at::Tensor &grad, const at::Tensor &input,
                             const std::vector<Channel> &channels)
{
    if (input.numel() == 0) {
        return at::zeros_like(input);
    }
    const bool single = input.scalar_type() == at::kFloat;
    if (is_dense_on_cpu(input) && (single || input.scalar_type() == at::kDouble)) {
        const at::Tensor out = at::empty_like(input);
        (single ? input_gradient<float> : input_gradient<double>)(grad, input, channels, out);
        return out;
    }
    const at::Tensor deviation = input.sub(per_channel(channels, &Channel::mean, input))
                                     .mul_(per_channel(channels, &Channel::slope, input));
    return grad.sub(per_channel(channels, &Channel::mean_dy, input))
        .sub_(deviation)
        .mul_(per_channel(channels, &Channel::scale, input));
}

using MaybeTensor = c10::optional<at::Tensor>;

MaybeTensor present(const at::Tensor &tensor)
{
    return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor();
}

/* --- the function ---------------------------------------------------------------------------- */

// This rank's sums, [2, C]: of dy, and of dy * (x - mean) / standard deviation.
at::Tensor local_sums(const variable_list &saved, const at::Tensor &input, const at::Tensor &grad,
                      double eps, at::Tensor &weight_grad, at::Tensor &bias_grad)
{
    const auto options = input.options();
    const at::Tensor sums = at::zeros({2, input.size(1)}, options.dtype(at::kDouble));
    if (input.numel() == 0) {
        weight_grad = at::zeros({input.size(1)}, options);
        bias_grad = at::zeros({input.size(1)}, options);
        return sums;
    }
    // By the given statistics; there are none of the batch, which on a GPU must be said so.
    const at::Tensor none = at::empty({0}, options);
    const auto found = at::native_batch_norm_backward(grad, input, present(saved[1]),
                                                      saved[2].to(options), saved[3].to(options),
                                                      none, none, false, eps, {false, true, true});
    weight_grad = std::get<1>(found);
    bias_grad = std::get<2>(found);
    sums.select(0, 0).copy_(bias_grad);
    sums.select(0, 1).copy_(weight_grad);
    return sums;
}

std::vector<Channel> channel_terms(const variable_list &saved, const at::Tensor &sums, double eps,
                                   double count)
{
    const int64_t channels = sums.size(1);
    const double *both = sums.data_ptr<double>();
    const double *mean = saved[2].data_ptr<double>(), *variance = saved[3].data_ptr<double>();
    const at::Tensor weight = saved[1].defined()
                                  ? saved[1].detach().to(at::kCPU, at::kDouble).contiguous()
                                  : at::Tensor();
    std::vector<Channel> all;
    for (int64_t c = 0; c < channels; c++) {
        const double scale = 1 / std::sqrt(variance[c] + eps);
        all.push_back({both[c] / count, mean[c], both[channels + c] * scale / count,
                       weight.defined() ? scale * weight.data_ptr<double>()[c] : scale});
    }
    return all;
}

class SyncBatchNorm : public torch::autograd::Function<SyncBatchNorm>
{
  public:
    static at::Tensor forward(AutogradContext *context, const at::Tensor &input,
                              const MaybeTensor &weight, const MaybeTensor &bias,
                              const at::Tensor &mean, const at::Tensor &variance,
                              BackwardStatePointer state)
    {
        context->save_for_backward({input, weight.value_or(at::Tensor()), mean, variance});
        const double eps = state->eps;
        context->saved_data["state"] = c10::IValue::make_capsule(
            c10::intrusive_ptr<torch::CustomClassHolder>(std::move(state)));
        if (input.numel() == 0) {
            return at::empty_like(input);
        }
        const auto options = input.options();
        return std::get<0>(at::native_batch_norm(input, weight, bias, mean.to(options),
                                                 variance.to(options), false, 0, eps));
    }

    static variable_list backward(AutogradContext *context, variable_list gradients)
    {
        if (at::GradMode::is_enabled()) {
            throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                    "SyncBatchNorm has no second derivative: run backward without "
                                    "create_graph"));
        }
        const variable_list saved = context->get_saved_variables();
        const auto capsule = context->saved_data["state"].toCapsule();
        const BackwardState &state = static_cast<const BackwardState &>(*capsule);
        const at::Tensor input = saved[0].contiguous();
        const at::Tensor grad =
            gradients[0].defined() ? gradients[0].contiguous() : at::zeros_like(input);
        at::Tensor weight_grad, bias_grad;
        const at::Tensor sums = local_sums(saved, input, grad, state.eps, weight_grad, bias_grad);
        all_reduce_blocking(state.group, sums, TDDP_REDUCE_SUM, state.region, nullptr);
        const at::Tensor input_grad = input_gradient_of(
            grad, input, channel_terms(saved, sums.to(at::kCPU), state.eps, state.count));
        if (!saved[1].defined()) {
            weight_grad.reset();
            bias_grad.reset();
        }
        return {input_grad, weight_grad, bias_grad, {}, {}, {}};
    }
};

/* --- arguments ------------------------------------------------------------------------------- */

at::Tensor optional_of(const tddp_tensor *tensor)
{
    return tensor ? tensor_of(tensor) : at::Tensor();
}

void check_vector(const at::Tensor &input, const tddp_tensor *vector, const char *name)
{
    const at::Tensor tensor = optional_of(vector);
    if (tensor.defined() && (tensor.dim() != 1 || tensor.size(0) != input.size(1))) {
        throw Failure(tddp_fail(
            TDDP_INVALID_ARGUMENT, "the input has %lld channels, but %s has %lld elements",
            static_cast<long long>(input.size(1)), name, static_cast<long long>(tensor.numel())));
    }
}

void check_arguments(const at::Tensor &input, const tddp_sync_batch_norm_opts &opts)
{
    if (opts.size != sizeof opts) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "opts.size is %zu, expected %zu", opts.size,
                                sizeof opts));
    }
    if (!input.defined() || input.dim() < 2 || input.size(1) == 0) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "expected an input of at least 2 dimensions, [N, C, ...]"));
    }
    if (input.scalar_type() != at::kFloat && input.scalar_type() != at::kDouble) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "input of dtype %s: expected float32 or float64",
                                c10::toString(input.scalar_type())));
    }
    const at::Tensor weight = optional_of(opts.weight);
    if (weight.defined() && weight.scalar_type() != input.scalar_type()) {
        throw Failure(tddp_fail(
            TDDP_INVALID_ARGUMENT, "input of dtype %s, but weight of dtype %s: convert one of them",
            c10::toString(input.scalar_type()), c10::toString(weight.scalar_type())));
    }
    check_vector(input, opts.weight, "weight");
    check_vector(input, opts.bias, "bias");
    check_vector(input, opts.running_mean, "running_mean");
    check_vector(input, opts.running_var, "running_var");
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_sync_batch_norm(tddp_group *group, const tddp_tensor *input,
                                 const tddp_sync_batch_norm_opts *opts, tddp_tensor *output)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::Tensor &batch = tensor_of(input);
        check_arguments(batch, *opts);
        const auto state =
            c10::make_intrusive<BackwardState>(group, opts->backward_blocking_region, opts->eps);
        Statistics found;
        {
            const at::NoGradGuard no_grad;
            found = global_statistics(*state, batch, opts->blocking_region);
            state->count = found.count;
            update_running(opts->running_mean, found.mean, opts->momentum);
            update_running(opts->running_var, found.variance.mul(found.count / (found.count - 1)),
                           opts->momentum);
        }
        const at::Tensor result = SyncBatchNorm::apply(batch, present(optional_of(opts->weight)),
                                                       present(optional_of(opts->bias)), found.mean,
                                                       found.variance, state);
        *reinterpret_cast<at::Tensor *>(output) = result;
    });
}
