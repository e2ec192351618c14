/* Small integers in every dtype, which all of them hold exactly. */
#ifndef TDDP_TEST_NCCL_ELEMENTS_H
#define TDDP_TEST_NCCL_ELEMENTS_H

#include <math.h>
#include <string.h>

#include <tddp/buffer.h>

#include "check.h"

static inline uint16_t half_of(double value)
{
    int exponent;
    double part = frexp(value, &exponent); /* 0.5 <= part < 1 */
    int bits = ((exponent + 14) << 10) + (int)((part * 2 - 1) * 1024);
    return value == 0 ? (uint16_t)0 : (uint16_t)bits;
}

static inline double of_half(uint16_t bits)
{
    return bits == 0 ? 0 : ldexp(1 + (bits & 1023) / 1024.0, (bits >> 10) - 15);
}

/* Sets element `i`; of a complex number the real part. */
static inline void set_element(void *data, tddp_dtype dtype, size_t i, double value)
{
    unsigned char *at = (unsigned char *)data + i * tddp_dtype_size(dtype);
    float single = (float)value;
    int64_t integer = (int64_t)value;
    uint16_t half = half_of(value);
    uint32_t bits;
    memset(at, 0, tddp_dtype_size(dtype));
    switch (dtype) {
    case TDDP_FLOAT64:
    case TDDP_COMPLEX128:
        memcpy(at, &value, sizeof value);
        break;
    case TDDP_FLOAT32:
    case TDDP_COMPLEX64:
        memcpy(at, &single, sizeof single);
        break;
    case TDDP_FLOAT16:
        memcpy(at, &half, sizeof half);
        break;
    case TDDP_BFLOAT16:
        memcpy(&bits, &single, sizeof bits);
        half = (uint16_t)(bits >> 16);
        memcpy(at, &half, sizeof half);
        break;
    default: /* the low bytes come first */
        memcpy(at, &integer, tddp_dtype_size(dtype));
    }
}

static inline double element(const void *data, tddp_dtype dtype, size_t i)
{
    const unsigned char *at = (const unsigned char *)data + i * tddp_dtype_size(dtype);
    double value = 0;
    float single = 0;
    int64_t integer = 0;
    uint16_t half = 0;
    uint32_t bits = 0;
    switch (dtype) {
    case TDDP_FLOAT64:
    case TDDP_COMPLEX128:
        memcpy(&value, at, sizeof value);
        return value;
    case TDDP_FLOAT32:
    case TDDP_COMPLEX64:
        memcpy(&single, at, sizeof single);
        return (double)single;
    case TDDP_FLOAT16:
        memcpy(&half, at, sizeof half);
        return of_half(half);
    case TDDP_BFLOAT16:
        memcpy(&half, at, sizeof half);
        bits = (uint32_t)half << 16;
        memcpy(&single, &bits, sizeof single);
        return (double)single;
    default: /* whole numbers here are not negative */
        memcpy(&integer, at, tddp_dtype_size(dtype));
        return (double)integer;
    }
}

#endif
