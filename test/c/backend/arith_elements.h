/* Arithmetic over many sources, one element at a time, as a reference for tests. */
#ifndef TDDP_TEST_ARITH_ELEMENTS_H
#define TDDP_TEST_ARITH_ELEMENTS_H

#include <complex.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/half.h"

/* Volatile, so that no compiler fuses a product with a sum. */
#define DEFINE_REAL(real, suffix)                                                  \
    static real combine_##suffix(tddp_reduce_op op, real a, real b, bool *any_nan) \
    {                                                                              \
        volatile real result;                                                      \
        *any_nan = *any_nan || (isnan(a) && isnan(b));                             \
        switch (op) {                                                              \
        case TDDP_REDUCE_PRODUCT:                                                  \
            result = a * b;                                                        \
            return result;                                                         \
        case TDDP_REDUCE_MIN:                                                      \
            return isnan(a) ? a : isnan(b) || b < a ? b : a;                       \
        case TDDP_REDUCE_MAX:                                                      \
            return isnan(a) ? a : isnan(b) || b > a ? b : a;                       \
        default:                                                                   \
            result = a + b;                                                        \
            return result;                                                         \
        }                                                                          \
    }                                                                              \
    static real times_##suffix(real a, double factor)                              \
    {                                                                              \
        volatile real result = a * (real)factor;                                   \
        return result;                                                             \
    }

DEFINE_REAL(float, float)
DEFINE_REAL(double, double)

static uint64_t integer(tddp_dtype dtype, const void *from)
{
    uint8_t one;
    int16_t two;
    int32_t four;
    uint64_t eight;
    switch (dtype) {
    case TDDP_UINT8:
        memcpy(&one, from, 1);
        return one;
    case TDDP_INT8:
        memcpy(&one, from, 1);
        return (uint64_t)(int8_t)one;
    case TDDP_INT16:
        memcpy(&two, from, 2);
        return (uint64_t)two;
    case TDDP_INT32:
        memcpy(&four, from, 4);
        return (uint64_t)four;
    case TDDP_BOOL:
        memcpy(&one, from, 1);
        return one != 0;
    default:
        memcpy(&eight, from, 8);
        return eight;
    }
}

static uint64_t combine_integer(tddp_reduce_op op, bool is_bool, uint64_t a, uint64_t b)
{
    switch (op) {
    case TDDP_REDUCE_SUM:
        return is_bool ? a | b : a + b;
    case TDDP_REDUCE_PRODUCT:
        return a * b;
    case TDDP_REDUCE_MIN:
        return (int64_t)b < (int64_t)a ? b : a;
    case TDDP_REDUCE_MAX:
        return (int64_t)b > (int64_t)a ? b : a;
    case TDDP_REDUCE_BAND:
        return a & b;
    case TDDP_REDUCE_BOR:
        return a | b;
    default:
        return a ^ b;
    }
}

static const char *at(const tddp_arith_job *job, int source, size_t i)
{
    return (const char *)job->sources[source] + i * tddp_dtype_size(job->dtype);
}

static float arith_half(tddp_dtype dtype, const void *from)
{
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return dtype == TDDP_FLOAT16 ? tddp_backend_from_float16(half)
                                 : tddp_backend_from_bfloat16(half);
}

#define EXPECT_REAL(real, suffix, read)                                     \
    real sum = 0;                                                           \
    for (int k = 0; k < job->source_count; k++) {                           \
        real next;                                                          \
        read;                                                               \
        next = job->factors ? times_##suffix(next, job->factors[k]) : next; \
        sum = k ? combine_##suffix(job->op, sum, next, &any_nan) : next;    \
    }                                                                       \
    sum = job->factor != 1 ? times_##suffix(sum, job->factor) : sum

static bool expect_float(const tddp_arith_job *job, size_t i, void *into)
{
    bool any_nan = false;
    EXPECT_REAL(float, float, memcpy(&next, at(job, k, i), sizeof next));
    memcpy(into, &sum, sizeof sum);
    return any_nan;
}

static bool expect_double(const tddp_arith_job *job, size_t i, void *into)
{
    bool any_nan = false;
    EXPECT_REAL(double, double, memcpy(&next, at(job, k, i), sizeof next));
    memcpy(into, &sum, sizeof sum);
    return any_nan;
}

static bool expect_half(const tddp_arith_job *job, size_t i, void *into)
{
    bool any_nan = false;
    EXPECT_REAL(float, float, next = arith_half(job->dtype, at(job, k, i)));
    uint16_t half =
        job->dtype == TDDP_FLOAT16 ? tddp_backend_to_float16(sum) : tddp_backend_to_bfloat16(sum);
    memcpy(into, &half, sizeof half);
    return any_nan;
}

#define EXPECT_COMPLEX(real)                                                               \
    do {                                                                                   \
        real complex sum = 0;                                                              \
        for (int k = 0; k < job->source_count; k++) {                                      \
            real complex next;                                                             \
            memcpy(&next, at(job, k, i), sizeof next);                                     \
            if (job->factors) {                                                            \
                real *parts = (real *)&next;                                               \
                parts[0] = times_##real(parts[0], job->factors[k]);                        \
                parts[1] = times_##real(parts[1], job->factors[k]);                        \
            }                                                                              \
            volatile real complex result;                                                  \
            result = !k ? next : job->op == TDDP_REDUCE_PRODUCT ? sum * next : sum + next; \
            sum = result;                                                                  \
        }                                                                                  \
        real *parts = (real *)&sum;                                                        \
        parts[0] = job->factor != 1 ? times_##real(parts[0], job->factor) : parts[0];      \
        parts[1] = job->factor != 1 ? times_##real(parts[1], job->factor) : parts[1];      \
        memcpy(into, &sum, sizeof sum);                                                    \
    } while (0)

/* Whether the bits of NaN may differ: where two NaN meet, either may be the result. */
static bool arith_expect(const tddp_arith_job *job, size_t i, void *into)
{
    if (job->source_count == 1 && job->factor == 1 && !job->factors) {
        memcpy(into, at(job, 0, i), tddp_dtype_size(job->dtype));
        return false;
    }
    switch (job->dtype) {
    case TDDP_FLOAT32:
        return expect_float(job, i, into);
    case TDDP_FLOAT64:
        return expect_double(job, i, into);
    case TDDP_FLOAT16:
    case TDDP_BFLOAT16:
        return expect_half(job, i, into);
    case TDDP_COMPLEX64:
        EXPECT_COMPLEX(float);
        return true;
    case TDDP_COMPLEX128:
        EXPECT_COMPLEX(double);
        return true;
    default:
        break;
    }
    if (job->source_count == 1) {
        memcpy(into, at(job, 0, i), tddp_dtype_size(job->dtype));
        return false;
    }
    uint64_t sum = integer(job->dtype, at(job, 0, i));
    for (int k = 1; k < job->source_count; k++) {
        sum = combine_integer(job->op, job->dtype == TDDP_BOOL, sum,
                              integer(job->dtype, at(job, k, i)));
    }
    memcpy(into, &sum, tddp_dtype_size(job->dtype));
    return false;
}

#endif
