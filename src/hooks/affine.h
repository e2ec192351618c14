/* Eight bits for a float32: scale * (byte - zero). */
#ifndef TDDP_REDUCER_HOOKS_AFFINE_H
#define TDDP_REDUCER_HOOKS_AFFINE_H

#include <stddef.h>
#include <stdint.h>

/* Of some numbers and 0; all zero to begin with. `odd` is NaN once one was not finite. */
typedef struct tddp_hooks_range {
    float low;
    float high;
    float odd;
} tddp_hooks_range;

/* `scale` is NaN where a number was not finite: then there are no bytes, all becomes NaN. */
typedef struct tddp_hooks_affine {
    float scale;
    uint8_t zero;
} tddp_hooks_affine;

/* Widens the range by `count` numbers. */
void tddp_hooks_range_of(const float *x, size_t count, tddp_hooks_range *range);

/* The range in 255 steps, such that 0 is one of them. */
tddp_hooks_affine tddp_hooks_affine_of(const tddp_hooks_range *range);

/* Numbers of the range to bytes, nearest even; the scale is a number. */
void tddp_hooks_quantize(const float *x, size_t count, tddp_hooks_affine affine, uint8_t *to);

/* Adds what the bytes stand for. */
void tddp_hooks_dequantize_add(const uint8_t *from, size_t count, tddp_hooks_affine affine,
                               float *sum);

void tddp_hooks_divide(float *x, size_t count, float divisor);

#endif
