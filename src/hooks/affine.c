/*
 * Affine quantization of float32 to eight bits, in loops that the compiler vectorizes. Pure
 * functions, any thread.
 */
#include <float.h>
#include <math.h>

#include "hooks/affine.h"

/* Independent accumulators, because the compiler may not reorder a sum or minimum. */
enum { LANES = 32 };

static float lower(float a, float b)
{
    return a < b ? a : b;
}

static float higher(float a, float b)
{
    return a > b ? a : b;
}

void tddp_hooks_extend_range(const float *restrict x, size_t count, tddp_hooks_range *range)
{
    float low[LANES];
    float high[LANES];
    float nonfinite[LANES];
    size_t i = 0;
    for (size_t j = 0; j < LANES; j++) {
        low[j] = range->low;
        high[j] = range->high;
        nonfinite[j] = 0.0f;
    }
    for (; i + LANES <= count; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            low[j] = lower(x[i + j], low[j]);
            high[j] = higher(x[i + j], high[j]);
            nonfinite[j] += x[i + j] * 0.0f; /* NaN for what is not finite */
        }
    }
    for (; i < count; i++) {
        low[0] = lower(x[i], low[0]);
        high[0] = higher(x[i], high[0]);
        nonfinite[0] += x[i] * 0.0f;
    }
    for (size_t j = 0; j < LANES; j++) {
        range->low = lower(low[j], range->low);
        range->high = higher(high[j], range->high);
        range->nonfinite += nonfinite[j];
    }
}

/* 1.5 * 2^23: adding and subtracting it rounds a number below 2^22 to nearest even, without a
 * call. */
static const float rounder = 12582912.0f;

tddp_hooks_affine tddp_hooks_affine_of(const tddp_hooks_range *range)
{
    if (range->nonfinite != 0.0f) {
        return (tddp_hooks_affine){NAN, 0};
    }
    float scale = (range->high - range->low) / 255.0f;
    if (isinf(scale)) {
        scale = range->high / 255.0f - range->low / 255.0f;
    }
    if (scale < FLT_MIN) {
        scale = FLT_MIN;
    }
    float zero = -(range->low / scale + rounder - rounder);
    return (tddp_hooks_affine){scale, (uint8_t)lower(zero, 255.0f)};
}

void tddp_hooks_quantize(const float *restrict x, size_t count, tddp_hooks_affine affine,
                         uint8_t *restrict to)
{
    float scale = affine.scale;
    float zero = affine.zero;
    for (size_t i = 0; i < count; i++) {
        float step = x[i] / scale + rounder - rounder + zero;
        step = step > 0.0f ? step : 0.0f;
        step = step < 255.0f ? step : 255.0f;
        to[i] = (uint8_t)(int32_t)step;
    }
}

void tddp_hooks_dequantize_add(const uint8_t *restrict from, size_t count, tddp_hooks_affine affine,
                               float *restrict sum)
{
    float scale = affine.scale;
    int32_t zero = affine.zero;
    for (size_t i = 0; i < count; i++) {
        sum[i] += scale * (float)((int32_t)from[i] - zero);
    }
}

void tddp_hooks_divide(float *x, size_t count, float divisor)
{
    for (size_t i = 0; i < count; i++) {
        x[i] /= divisor;
    }
}
