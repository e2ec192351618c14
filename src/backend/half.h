/*
 * Converts float16 and bfloat16 to float32 and back, rounding to nearest even. Avoids branches that
 * depend on the data, so that loops are vectorised. The bits are those of the F16C instructions,
 * also for NaN (it becomes quiet and keeps its upper bits).
 */
#ifndef TDDP_BACKEND_HALF_H
#define TDDP_BACKEND_HALF_H

#include <stdint.h>
#include <string.h>

static inline float tddp_backend_bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t tddp_backend_float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* All ones if a < b, else zero; both are below 2^31. Selecting by such masks stays vector code,
 * where gcc turns conditions into branches. */
static inline uint32_t tddp_backend_below(uint32_t a, uint32_t b)
{
    return (uint32_t)((int32_t)(a - b) >> 31);
}

static inline float tddp_backend_from_bfloat16(uint16_t half)
{
    return tddp_backend_bits_to_float((uint32_t)half << 16);
}

static inline uint16_t tddp_backend_to_bfloat16(float value)
{
    uint32_t bits = tddp_backend_float_to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* Multiplying by 2^112 moves float16's exponent range to float32's, also for subnormal numbers. */
static inline float tddp_backend_from_float16(uint16_t half)
{
    uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    uint32_t magnitude = ((uint32_t)half & 0x7fffu) << 13;
    float scaled = tddp_backend_bits_to_float(magnitude) * 0x1p112f;
    uint32_t bits = tddp_backend_float_to_bits(scaled);
    uint32_t is_special = ~tddp_backend_below(magnitude, 0x0f800000u);
    uint32_t is_nan = tddp_backend_below(0x0f800000u, magnitude);
    bits |= (magnitude | 0x7f800000u) & is_special;
    bits |= 0x00400000u & is_nan;
    return tddp_backend_bits_to_float(bits | sign);
}

/* Adding a number whose last bit is float16's last bit rounds like float16; the rest of the sum
 * is exact. */
static inline uint16_t tddp_backend_to_float16(float value)
{
    uint32_t bits = tddp_backend_float_to_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    float shifted = tddp_backend_bits_to_float(magnitude) + 0.5f;
    uint32_t subnormal = tddp_backend_float_to_bits(shifted) - 0x3f000000u;
    uint32_t is_small = tddp_backend_below(magnitude, 0x38800000u);
    uint32_t is_finite = tddp_backend_below(magnitude, 0x477ff000u);
    uint32_t is_nan = tddp_backend_below(0x7f800000u, magnitude);
    uint32_t result = (subnormal & is_small) | (normal & ~is_small);
    result = (result & is_finite) | (0x7c00u & ~is_finite);
    result |= (0x0200u | ((magnitude >> 13) & 0x03ffu)) & is_nan;
    return (uint16_t)(result | sign);
}

#endif
