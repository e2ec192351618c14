/* The arithmetic of collectives, for every operation and dtype, and the float16 conversions. */
#include <complex.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include <tddp/backend.h>
#include <tddp/buffer.h>

#include "backend/half.h"
#include "check.h"

static double result_of(tddp_reduce_op op, double a, double b)
{
    switch (op) {
    case TDDP_REDUCE_SUM:
    case TDDP_REDUCE_AVG:
    case TDDP_REDUCE_PREMUL_SUM:
        return a + b;
    case TDDP_REDUCE_PRODUCT:
        return a * b;
    case TDDP_REDUCE_MIN:
        return fmin(a, b);
    case TDDP_REDUCE_MAX:
        return fmax(a, b);
    case TDDP_REDUCE_BAND:
        return (double)((int)a & (int)b);
    case TDDP_REDUCE_BOR:
        return (double)((int)a | (int)b);
    case TDDP_REDUCE_BXOR:
        return (double)((int)a ^ (int)b);
    }
    return NAN;
}

/* Small numbers, exact in every dtype. */
#define CHECK_NUMBERS(dtype, type, last_op)                                                     \
    do {                                                                                        \
        for (int op = 0; op <= (last_op); op++) {                                               \
            type a[19];                                                                         \
            type b[19];                                                                         \
            if (tddp_reduce_check((tddp_reduce_op)op, dtype)) {                                 \
                continue;                                                                       \
            }                                                                                   \
            for (int i = 0; i < 19; i++) {                                                      \
                a[i] = (type)(i % 7 + 1);                                                       \
                b[i] = (type)(i % 5 + 2);                                                       \
            }                                                                                   \
            tddp_combine((tddp_reduce_op)op, dtype, a, b, 19);                                  \
            for (int i = 0; i < 19; i++) {                                                      \
                CHECK_DOUBLE((double)a[i], result_of((tddp_reduce_op)op, i % 7 + 1, i % 5 + 2), \
                             0);                                                                \
            }                                                                                   \
        }                                                                                       \
    } while (0)

TEST(numbers_of_every_dtype)
{
    CHECK_NUMBERS(TDDP_UINT8, uint8_t, TDDP_REDUCE_PREMUL_SUM);
    CHECK_NUMBERS(TDDP_INT8, int8_t, TDDP_REDUCE_PREMUL_SUM);
    CHECK_NUMBERS(TDDP_INT16, int16_t, TDDP_REDUCE_PREMUL_SUM);
    CHECK_NUMBERS(TDDP_INT32, int32_t, TDDP_REDUCE_PREMUL_SUM);
    CHECK_NUMBERS(TDDP_INT64, int64_t, TDDP_REDUCE_PREMUL_SUM);
    CHECK_NUMBERS(TDDP_FLOAT32, float, TDDP_REDUCE_PREMUL_SUM);
    CHECK_NUMBERS(TDDP_FLOAT64, double, TDDP_REDUCE_PREMUL_SUM);
}

TEST(integers_wrap)
{
    int32_t a[2] = {INT32_MAX, INT32_MIN};
    int32_t b[2] = {1, -1};
    tddp_combine(TDDP_REDUCE_SUM, TDDP_INT32, a, b, 2);
    CHECK_INT(a[0], INT32_MIN);
    CHECK_INT(a[1], INT32_MAX);
    int16_t c = 300;
    int16_t d = 300;
    tddp_combine(TDDP_REDUCE_PRODUCT, TDDP_INT16, &c, &d, 1);
    CHECK_INT(c, (int16_t)90000);
    int64_t e = INT64_MAX;
    int64_t f = 2;
    tddp_combine(TDDP_REDUCE_PRODUCT, TDDP_INT64, &e, &f, 1);
    CHECK_INT(e, -2);
    int8_t g = -5;
    int8_t h = 3;
    tddp_combine(TDDP_REDUCE_MIN, TDDP_INT8, &g, &h, 1);
    CHECK_INT(g, -5);
}

TEST(min_and_max_propagate_nan)
{
    float a[4] = {NAN, 1, NAN, -1};
    float b[4] = {1, NAN, NAN, -2};
    tddp_combine(TDDP_REDUCE_MIN, TDDP_FLOAT32, a, b, 4);
    CHECK(isnan(a[0]) && isnan(a[1]) && isnan(a[2]));
    CHECK_DOUBLE(a[3], -2, 0);
    double c[3] = {NAN, 1, 3};
    double d[3] = {1, NAN, 2};
    tddp_combine(TDDP_REDUCE_MAX, TDDP_FLOAT64, c, d, 3);
    CHECK(isnan(c[0]) && isnan(c[1]));
    CHECK_DOUBLE(c[2], 3, 0);
}

TEST(bools)
{
    const uint8_t a[4] = {0, 0, 1, 2};
    const uint8_t b[4] = {0, 1, 0, 1};
    const struct {
        tddp_reduce_op op;
        int result[4];
    } cases[] = {
        {TDDP_REDUCE_SUM, {0, 1, 1, 1}},  {TDDP_REDUCE_PRODUCT, {0, 0, 0, 1}},
        {TDDP_REDUCE_MIN, {0, 0, 0, 1}},  {TDDP_REDUCE_MAX, {0, 1, 1, 1}},
        {TDDP_REDUCE_BAND, {0, 0, 0, 1}}, {TDDP_REDUCE_BOR, {0, 1, 1, 1}},
        {TDDP_REDUCE_BXOR, {0, 1, 1, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t into[4];
        memcpy(into, a, sizeof into);
        tddp_combine(cases[i].op, TDDP_BOOL, into, b, 4);
        for (int k = 0; k < 4; k++) {
            CHECK_INT(into[k], cases[i].result[k]);
        }
    }
}

TEST(complex_numbers)
{
    double complex a = 1 + 2 * I;
    double complex b = 3 - 1 * I;
    tddp_combine(TDDP_REDUCE_PRODUCT, TDDP_COMPLEX128, &a, &b, 1);
    CHECK_DOUBLE(creal(a), 5, 0);
    CHECK_DOUBLE(cimag(a), 5, 0);
    tddp_scale(TDDP_COMPLEX128, &a, 1, 0.5);
    CHECK_DOUBLE(cimag(a), 2.5, 0);
    float complex c = 1 + 2 * I;
    float complex d = 2 + 3 * I;
    tddp_combine(TDDP_REDUCE_SUM, TDDP_COMPLEX64, &c, &d, 1);
    tddp_scale(TDDP_COMPLEX64, &c, 1, 2);
    CHECK_DOUBLE(crealf(c), 6, 0);
    CHECK_DOUBLE(cimagf(c), 10, 0);
}

TEST(halves)
{
    for (int dtype = TDDP_FLOAT16; dtype <= TDDP_BFLOAT16; dtype++) {
        bool is16 = dtype == TDDP_FLOAT16;
        uint16_t a[5];
        uint16_t b[5];
        for (int i = 0; i < 5; i++) {
            float x = (float)i + 0.5f;
            a[i] = is16 ? tddp_backend_to_float16(x) : tddp_backend_to_bfloat16(x);
            b[i] = is16 ? tddp_backend_to_float16(-2) : tddp_backend_to_bfloat16(-2);
        }
        tddp_combine(TDDP_REDUCE_PRODUCT, (tddp_dtype)dtype, a, b, 5);
        tddp_combine(TDDP_REDUCE_SUM, (tddp_dtype)dtype, a, b, 5);
        tddp_scale((tddp_dtype)dtype, a, 5, 0.5);
        for (int i = 0; i < 5; i++) {
            float x = is16 ? tddp_backend_from_float16(a[i]) : tddp_backend_from_bfloat16(a[i]);
            CHECK_DOUBLE(x, -(i + 0.5) - 1, 0);
        }
    }
}

/* What a float16's bits mean, by the definition. */
static double meaning(uint16_t half)
{
    double sign = half & 0x8000 ? -1 : 1;
    int exponent = (half >> 10) & 31;
    int fraction = half & 1023;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

TEST(every_float16_round_trips)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float value = tddp_backend_from_float16((uint16_t)bits);
        if ((bits & 0x7c00) == 0x7c00) {
            CHECK(bits & 0x3ff ? isnan(value) : isinf(value));
            CHECK(bits & 0x3ff ? isnan(tddp_backend_from_float16(tddp_backend_to_float16(value)))
                               : tddp_backend_to_float16(value) == bits);
            continue;
        }
        CHECK_DOUBLE(value, meaning((uint16_t)bits), 0);
        CHECK_INT(tddp_backend_to_float16(value), bits);
    }
}

TEST(rounding_is_to_nearest_even)
{
    /* Between each two neighbours: the middle goes to the even one, either side to its own. */
    for (uint32_t bits = 0; bits < 0x7bff; bits++) {
        double low = meaning((uint16_t)bits);
        double high = meaning((uint16_t)(bits + 1));
        float middle = (float)((low + high) / 2);
        CHECK_INT(tddp_backend_to_float16(middle), bits & 1 ? bits + 1 : bits);
        CHECK_INT(tddp_backend_to_float16(nextafterf(middle, 0)), bits);
        CHECK_INT(tddp_backend_to_float16(nextafterf(middle, 1e9f)), bits + 1);
    }
    CHECK_INT(tddp_backend_to_float16(65519.0f), 0x7bff);
    CHECK_INT(tddp_backend_to_float16(65520.0f), 0x7c00);
    CHECK_INT(tddp_backend_to_float16(-1e30f), 0xfc00);
    CHECK_INT(tddp_backend_to_bfloat16(tddp_backend_bits_to_float(0x3f808000)), 0x3f80);
    CHECK_INT(tddp_backend_to_bfloat16(tddp_backend_bits_to_float(0x3f818000)), 0x3f82);
    CHECK_INT(tddp_backend_to_bfloat16(INFINITY), 0x7f80);
    CHECK(isnan(tddp_backend_from_bfloat16(tddp_backend_to_bfloat16(NAN))));
    CHECK(isnan(tddp_backend_from_bfloat16(
        tddp_backend_to_bfloat16(tddp_backend_bits_to_float(0x7f800001)))));
}

TEST(undefined_reductions_are_refused)
{
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_AVG, TDDP_INT32), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "cannot reduce int32 by avg");
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_AVG, TDDP_BOOL), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_PREMUL_SUM, TDDP_INT64), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_BAND, TDDP_FLOAT32), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "integers or bool");
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_MAX, TDDP_COMPLEX64), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_reduce_check((tddp_reduce_op)9, TDDP_FLOAT32), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reduce_check((tddp_reduce_op)-1, TDDP_FLOAT32), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_SUM, TDDP_FLOAT8_E4M3FN), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_reduce_check(TDDP_REDUCE_SUM, (tddp_dtype)14), TDDP_INVALID_ARGUMENT);
    CHECK_OK(tddp_reduce_check(TDDP_REDUCE_AVG, TDDP_COMPLEX128));
    CHECK_OK(tddp_reduce_check(TDDP_REDUCE_BXOR, TDDP_BOOL));
    CHECK_TEXT(tddp_reduce_op_name(TDDP_REDUCE_PREMUL_SUM), "premul_sum");
    CHECK_TEXT(tddp_reduce_op_name((tddp_reduce_op)77), "unknown");
    tddp_combine(TDDP_REDUCE_SUM, TDDP_FLOAT32, NULL, NULL, 0);
}
