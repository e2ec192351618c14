// The kernels of fused optimizer steps and gradient norms, over dense memory.
#ifndef TDDP_TORCH_FUSED_KERNELS_H
#define TDDP_TORCH_FUSED_KERNELS_H

#include <cstdint>

#include <c10/core/ScalarType.h>

namespace tddp_torch
{

// One parameter's memory and the constants of its formula, in float64.
struct FusedTask {
    void *param = nullptr;
    const void *grad = nullptr;
    void *state[3] = {nullptr, nullptr, nullptr};
    int64_t count = 0;
    double lr = 0; // Adam: divided by the bias correction of the first moment
    double decay = 0;
    double shrink = 1; // AdamW: 1 - lr * weight_decay
    double momentum = 0;
    double undamped = 1; // 1 - dampening
    double beta1 = 0;
    double beta2 = 0;
    double root = 1; // of the bias correction of the second moment
    double eps = 0;
    bool first = false;
    bool nesterov = false;
};

// Steps the elements [begin, end).
using FusedLoop = void (*)(const FusedTask &task, int64_t begin, int64_t end);

// NULL if there is no kernel for the type.
FusedLoop sgd_loop(c10::ScalarType type, bool momentum);
FusedLoop adam_loop(c10::ScalarType type, bool amsgrad);

// How norms are accumulated.
enum class NormKind { largest, absolutes, squares, powers };

// The sum of |x| ** order over `count` elements, or the largest |x|; NaN if one is.
using NormLoop = double (*)(const void *data, int64_t count, double order);
NormLoop norm_loop(c10::ScalarType type, NormKind kind);

// Multiplies the elements in place.
using ScaleLoop = void (*)(void *data, int64_t count, double factor);
ScaleLoop scale_loop(c10::ScalarType type);

// The same; returns whether all elements were finite.
using UnscaleLoop = bool (*)(void *data, int64_t count, double factor);
UnscaleLoop unscale_loop(c10::ScalarType type);

} // namespace tddp_torch

#endif
