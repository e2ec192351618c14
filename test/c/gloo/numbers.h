/*
 * Numbers of every dtype that differ between ranks and positions, and the results of combining
 * them.
 */
#ifndef TDDP_TEST_NUMBERS_H
#define TDDP_TEST_NUMBERS_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include <tddp.h>

#include "check.h"
#include "repeats.h"

/* The numbers repeat after so many elements. */
enum { NUMBERS_PERIOD = 4 };

/* Small numbers that every dtype holds exactly, different on each rank and at each position. */
static inline double number(int rank, size_t i)
{
    return (double)((i * 3 + (size_t)rank * 5) % 4 + 1);
}

static inline void put(void *data, tddp_dtype dtype, size_t i, double value)
{
    uint16_t half;
    float single = (float)value;
    uint32_t bits;
    switch (dtype) {
    case TDDP_UINT8:
    case TDDP_FLOAT8_E4M3FN:
    case TDDP_FLOAT8_E5M2:
    case TDDP_INT8:
        ((int8_t *)data)[i] = (int8_t)value;
        break;
    case TDDP_BOOL:
        ((uint8_t *)data)[i] = value > 2;
        break;
    case TDDP_INT16:
        ((int16_t *)data)[i] = (int16_t)value;
        break;
    case TDDP_INT32:
        ((int32_t *)data)[i] = (int32_t)value;
        break;
    case TDDP_INT64:
        ((int64_t *)data)[i] = (int64_t)value;
        break;
    case TDDP_FLOAT16: {
        /* Exact for these: normal numbers with few digits. */
        int exponent;
        double fraction = frexp(value, &exponent);
        half = (uint16_t)(((exponent + 14) << 10) | (int)((fraction * 2 - 1) * 1024));
        ((uint16_t *)data)[i] = half;
        break;
    }
    case TDDP_BFLOAT16:
        memcpy(&bits, &single, sizeof bits);
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        break;
    case TDDP_FLOAT32:
        ((float *)data)[i] = single;
        break;
    case TDDP_FLOAT64:
        ((double *)data)[i] = value;
        break;
    case TDDP_COMPLEX64:
        ((float *)data)[2 * i] = single;
        ((float *)data)[2 * i + 1] = -single;
        break;
    case TDDP_COMPLEX128:
        ((double *)data)[2 * i] = value;
        ((double *)data)[2 * i + 1] = -value;
        break;
    }
}

static inline double get(const void *data, tddp_dtype dtype, size_t i)
{
    uint32_t bits;
    float single;
    switch (dtype) {
    case TDDP_UINT8:
    case TDDP_FLOAT8_E4M3FN:
    case TDDP_FLOAT8_E5M2:
    case TDDP_BOOL:
        return ((const uint8_t *)data)[i];
    case TDDP_INT8:
        return ((const int8_t *)data)[i];
    case TDDP_INT16:
        return ((const int16_t *)data)[i];
    case TDDP_INT32:
        return ((const int32_t *)data)[i];
    case TDDP_INT64:
        return (double)((const int64_t *)data)[i];
    case TDDP_FLOAT16:
        bits = ((const uint16_t *)data)[i];
        return bits ? ldexp((double)(1024 + (bits & 1023)), (int)(bits >> 10) - 25) : 0;
    case TDDP_BFLOAT16:
        bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        memcpy(&single, &bits, sizeof single);
        return single;
    case TDDP_FLOAT32:
        return ((const float *)data)[i];
    case TDDP_FLOAT64:
        return ((const double *)data)[i];
    case TDDP_COMPLEX64:
        return ((const float *)data)[2 * i];
    case TDDP_COMPLEX128:
        return ((const double *)data)[2 * i];
    }
    return NAN;
}

/* The real part of the result at position i. */
static inline double expected(tddp_reduce_op op, tddp_dtype dtype, int world_size, size_t i,
                              double premul)
{
    bool complex_number = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
    double real = 0;
    double imaginary = 0;
    for (int rank = 0; rank < world_size; rank++) {
        double x = number(rank, i);
        int integer = (int)x;
        if (dtype == TDDP_BOOL) {
            x = integer = x > 2;
        }
        if (rank == 0) {
            real = x;
            imaginary = complex_number ? -x : 0;
            continue;
        }
        double before = real;
        switch (op) {
        case TDDP_REDUCE_PRODUCT:
            real = complex_number ? before * x + imaginary * x : before * x;
            imaginary = complex_number ? imaginary * x - before * x : 0;
            break;
        case TDDP_REDUCE_MIN:
            real = fmin(real, x);
            break;
        case TDDP_REDUCE_MAX:
            real = fmax(real, x);
            break;
        case TDDP_REDUCE_BAND:
            real = (int)real & integer;
            break;
        case TDDP_REDUCE_BOR:
            real = (int)real | integer;
            break;
        case TDDP_REDUCE_BXOR:
            real = (int)real ^ integer;
            break;
        default:
            real = dtype == TDDP_BOOL ? fmax(real, x) : real + x;
            break;
        }
    }
    return op == TDDP_REDUCE_AVG          ? real / world_size
           : op == TDDP_REDUCE_PREMUL_SUM ? real * premul
                                          : real;
}

/* float16 and bfloat16 round at each step; the others are exact except for the division. */
static inline double tolerance(tddp_dtype dtype, tddp_reduce_op op, double value)
{
    double unit = dtype == TDDP_FLOAT16 ? 1.0 / 1024 : dtype == TDDP_BFLOAT16 ? 1.0 / 64 : 1e-6;
    bool exact = op != TDDP_REDUCE_AVG && op != TDDP_REDUCE_PREMUL_SUM && op != TDDP_REDUCE_PRODUCT;
    return exact ? 0 : fabs(value) * unit;
}

/* Writes a rank's numbers from position `start` on. */
static inline void fill_numbers(void *data, tddp_dtype dtype, int rank, size_t start, size_t count)
{
    size_t size = tddp_dtype_size(dtype);
    for (size_t i = 0; i < count && i < NUMBERS_PERIOD; i++) {
        put(data, dtype, i, number(rank, start + i));
    }
    repeat_bytes(data, NUMBERS_PERIOD * size, count * size);
}

/* Checks that they are unchanged since fill_numbers(). */
static inline void check_numbers(const void *data, tddp_dtype dtype, int rank, size_t start,
                                 size_t count)
{
    char element[16];
    size_t size = tddp_dtype_size(dtype);
    size_t checked = elements_to_check(data, size, NUMBERS_PERIOD, count);
    for (size_t i = 0; i < checked; i++) {
        put(element, dtype, 0, number(rank, start + i));
        CHECK(memcmp((const char *)data + i * size, element, size) == 0);
    }
}

/* Checks that they are the result of all ranks' numbers. */
static inline void check_combined(const void *data, tddp_dtype dtype, tddp_reduce_op op,
                                  int world_size, size_t start, size_t count,
                                  double tolerance_factor)
{
    size_t checked = elements_to_check(data, tddp_dtype_size(dtype), NUMBERS_PERIOD, count);
    for (size_t i = 0; i < checked; i++) {
        double value = expected(op, dtype, world_size, start + i, 0.5);
        CHECK_DOUBLE(get(data, dtype, i), value, tolerance_factor * tolerance(dtype, op, value));
    }
}

#endif
