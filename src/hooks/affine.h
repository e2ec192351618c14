/* Affine quantization of float32 to eight bits: x = scale * (byte - zero). */
#ifndef TDDP_HOOKS_AFFINE_H
#define TDDP_HOOKS_AFFINE_H

#include <stddef.h>
#include <stdint.h>

/* The range of some numbers and 0; all zero at first. `nonfinite` is NaN if one isn't finite. */
typedef struct tddp_hooks_range {
    float low;
    float high;
    float nonfinite;
} tddp_hooks_range;

/* `scale` is NaN if a number isn't finite: then all elements dequantize to NaN. */
typedef struct tddp_hooks_affine {
    float scale;
    uint8_t zero;
} tddp_hooks_affine;

/* Extends the range by `count` numbers. */
void tddp_hooks_extend_range(const float *x, size_t count, tddp_hooks_range *range);

/* Divides the range into 255 steps, such that 0 is exact. */
tddp_hooks_affine tddp_hooks_affine_of(const tddp_hooks_range *range);

/* Quantizes numbers of the range, rounding to nearest even. The scale must not be NaN. */
void tddp_hooks_quantize(const float *x, size_t count, tddp_hooks_affine affine, uint8_t *to);

/* Adds the dequantized bytes to `sum`. */
void tddp_hooks_dequantize_add(const uint8_t *from, size_t count, tddp_hooks_affine affine,
                               float *sum);

void tddp_hooks_divide(float *x, size_t count, float divisor);

#endif
