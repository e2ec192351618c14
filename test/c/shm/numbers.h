/*
 * Numbers of all dtypes for tests of reductions: written and read as doubles, which hold all values
 * in the tests exactly.
 */
#ifndef TDDP_TEST_SHM_NUMBERS_H
#define TDDP_TEST_SHM_NUMBERS_H

#include <math.h>
#include <stdbool.h>

#include <tddp/backend.h>

#include "backend/half.h"
#include "check.h"
#include "repeats.h"

static inline bool is_complex(tddp_dtype dtype)
{
    return dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
}

/* Writes `value` as a number of this dtype; both parts of a complex number. */
static inline void put_number(tddp_dtype dtype, void *data, size_t i, double value)
{
    switch (dtype) {
#define PUT(name, type)                  \
    case TDDP_##name:                    \
        ((type *)data)[i] = (type)value; \
        break;
        PUT(UINT8, uint8_t)
        PUT(FLOAT8_E4M3FN, uint8_t) /* bits without arithmetic */
        PUT(FLOAT8_E5M2, uint8_t)
        PUT(INT8, int8_t)
        PUT(INT16, int16_t)
        PUT(INT32, int32_t)
        PUT(INT64, int64_t)
        PUT(FLOAT32, float)
        PUT(FLOAT64, double)
#undef PUT
    case TDDP_FLOAT16:
        ((uint16_t *)data)[i] = tddp_backend_to_float16((float)value);
        break;
    case TDDP_BFLOAT16:
        ((uint16_t *)data)[i] = tddp_backend_to_bfloat16((float)value);
        break;
    case TDDP_COMPLEX64:
        ((float *)data)[2 * i] = ((float *)data)[2 * i + 1] = (float)value;
        break;
    case TDDP_COMPLEX128:
        ((double *)data)[2 * i] = ((double *)data)[2 * i + 1] = value;
        break;
    case TDDP_BOOL:
        ((uint8_t *)data)[i] = value != 0;
        break;
    }
}

/* Reads a number; of a complex one part 0, the real one, or part 1. */
static inline double get_number(tddp_dtype dtype, const void *data, size_t i, int part)
{
    switch (dtype) {
#define GET(name, type) \
    case TDDP_##name:   \
        return (double)((const type *)data)[i];
        GET(UINT8, uint8_t)
        GET(FLOAT8_E4M3FN, uint8_t)
        GET(FLOAT8_E5M2, uint8_t)
        GET(INT8, int8_t)
        GET(INT16, int16_t)
        GET(INT32, int32_t)
        GET(INT64, int64_t)
        GET(FLOAT32, float)
        GET(FLOAT64, double)
        GET(BOOL, uint8_t)
#undef GET
    case TDDP_FLOAT16:
        return (double)tddp_backend_from_float16(((const uint16_t *)data)[i]);
    case TDDP_BFLOAT16:
        return (double)tddp_backend_from_bfloat16(((const uint16_t *)data)[i]);
    case TDDP_COMPLEX64:
        return (double)((const float *)data)[2 * i + (size_t)part];
    case TDDP_COMPLEX128:
        return ((const double *)data)[2 * i + (size_t)part];
    }
    return NAN;
}

/* The numbers repeat after so many elements. */
enum { NUMBERS_PERIOD = 22 };

/* A rank's contribution: small, so that sums and products of a few ranks are exact in every
 * dtype. */
static inline double input_number(tddp_reduce_op op, int rank, size_t i)
{
    size_t of = i * 7 + (size_t)rank * 5;
    return op == TDDP_REDUCE_PRODUCT ? (double)(1 + of % 2) : (double)(of % 11);
}

/* Factors of PREMUL_SUM that are exact. */
static inline double given_factor(int rank)
{
    return 0.5 * (double)(rank + 1);
}

/* The real part of the result of `size` ranks; and the imaginary part, for complex numbers whose
 * two parts are equal. */
static inline void expected_number(tddp_reduce_op op, tddp_dtype dtype, int size, size_t i,
                                   double out[2])
{
    double sum[2] = {0, 0};
    for (int rank = 0; rank < size; rank++) {
        double value = input_number(op, rank, i);
        value = dtype == TDDP_BOOL ? value != 0 : value;
        if (op == TDDP_REDUCE_PREMUL_SUM) {
            value *= given_factor(rank);
        }
        if (rank == 0) {
            sum[0] = sum[1] = value;
            continue;
        }
        double real = sum[0];
        switch (op) {
        case TDDP_REDUCE_SUM:
        case TDDP_REDUCE_AVG:
        case TDDP_REDUCE_PREMUL_SUM:
            sum[0] += value;
            sum[1] += value;
            break;
        case TDDP_REDUCE_PRODUCT:
            sum[0] = is_complex(dtype) ? real * value - sum[1] * value : real * value;
            sum[1] = real * value + sum[1] * value;
            break;
        case TDDP_REDUCE_MIN:
            sum[0] = value < real ? value : real;
            break;
        case TDDP_REDUCE_MAX:
            sum[0] = value > real ? value : real;
            break;
        case TDDP_REDUCE_BAND:
            sum[0] = (double)((int)real & (int)value);
            break;
        case TDDP_REDUCE_BOR:
            sum[0] = (double)((int)real | (int)value);
            break;
        case TDDP_REDUCE_BXOR:
            sum[0] = (double)((int)real ^ (int)value);
            break;
        }
    }
    for (int part = 0; part < 2; part++) {
        out[part] = op == TDDP_REDUCE_AVG                          ? sum[part] / size
                    : dtype == TDDP_BOOL && op != TDDP_REDUCE_BXOR ? sum[part] != 0
                                                                   : sum[part];
    }
}

static inline void fill_numbers(tddp_reduce_op op, tddp_dtype dtype, void *data, int rank,
                                size_t first, size_t count)
{
    for (size_t i = 0; i < count && i < NUMBERS_PERIOD; i++) {
        put_number(dtype, data, i, input_number(op, rank, first + i));
    }
    size_t size = tddp_dtype_size(dtype);
    repeat_bytes(data, NUMBERS_PERIOD * size, count * size);
}

/* A quotient is rounded once, to the dtype's precision. */
static inline double precision_of(tddp_reduce_op op, tddp_dtype dtype)
{
    return op != TDDP_REDUCE_AVG                               ? 0
           : dtype == TDDP_BFLOAT16                            ? 1.0 / 256
           : dtype == TDDP_FLOAT16                             ? 1.0 / 2048
           : dtype == TDDP_FLOAT64 || dtype == TDDP_COMPLEX128 ? 1e-15
                                                               : 1.3e-7;
}

/* Where a mean is a sum of quotients, each is rounded, and each sum of them. */
static inline void check_rounded_numbers(const char *what, tddp_reduce_op op, tddp_dtype dtype,
                                         const void *data, int size, size_t first, size_t count,
                                         int roundings)
{
    double precision = roundings * precision_of(op, dtype);
    double all_expected[NUMBERS_PERIOD][2];
    for (size_t i = 0; i < NUMBERS_PERIOD; i++) {
        expected_number(op, dtype, size, first + i, all_expected[i]);
    }
    size_t checked = elements_to_check(data, tddp_dtype_size(dtype), NUMBERS_PERIOD, count);
    for (size_t i = 0; i < checked; i++) {
        const double *expected = all_expected[i % NUMBERS_PERIOD];
        for (int part = 0; part < (is_complex(dtype) ? 2 : 1); part++) {
            double got = get_number(dtype, data, i, part);
            if (!(fabs(got - expected[part]) <= precision * fabs(expected[part]))) {
                check_failed(__FILE__, __LINE__,
                             "%s, %s of %s, %d ranks: element %zu of %zu is %.9g, expected %.9g",
                             what, tddp_reduce_op_name(op), tddp_dtype_name(dtype), size, i, count,
                             got, expected[part]);
            }
        }
    }
}

static inline void check_numbers(const char *what, tddp_reduce_op op, tddp_dtype dtype,
                                 const void *data, int size, size_t first, size_t count)
{
    check_rounded_numbers(what, op, dtype, data, size, first, count, 1);
}

#endif
