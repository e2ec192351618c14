/*
 * The arithmetic of collectives, for every dtype: plain loops that the compiler vectorises. Pure
 * functions, any thread. Backends call them with arguments that tddp_reduce_check() has allowed.
 *
 * Integers are combined as unsigned numbers, so that an overflow wraps instead of being undefined.
 */
#include <complex.h>
#include <math.h>
#include <stdbool.h>

#include <tddp/backend.h>

#include "backend/half.h"

typedef float complex complex64;
typedef double complex complex128;

#define DEFINE_LOOP(name, type, expression)                                        \
    static void name(void *restrict into, const void *restrict from, size_t count) \
    {                                                                              \
        type *restrict a = into;                                                   \
        const type *restrict b = from;                                             \
        for (size_t i = 0; i < count; i++) {                                       \
            a[i] = (type)(expression);                                             \
        }                                                                          \
    }

#define MIN_OF(x, y) ((y) < (x) ? (y) : (x))
#define MAX_OF(x, y) ((y) > (x) ? (y) : (x))
/* NaN is handed on, wherever it comes from: `x != x` holds for it alone. */
#define MIN_FLOAT(x, y) ((y) < (x) || (y) != (y) ? (y) : (x))
#define MAX_FLOAT(x, y) ((y) > (x) || (y) != (y) ? (y) : (x))

/* `wide` is an unsigned type at least as wide as int, in which nothing overflows undefined. */
#define DEFINE_INTEGER(name, type, wide)                       \
    DEFINE_LOOP(name##_sum, type, (wide)a[i] + (wide)b[i])     \
    DEFINE_LOOP(name##_product, type, (wide)a[i] * (wide)b[i]) \
    DEFINE_LOOP(name##_min, type, MIN_OF(a[i], b[i]))          \
    DEFINE_LOOP(name##_max, type, MAX_OF(a[i], b[i]))          \
    DEFINE_LOOP(name##_band, type, a[i] & b[i])                \
    DEFINE_LOOP(name##_bor, type, a[i] | b[i])                 \
    DEFINE_LOOP(name##_bxor, type, a[i] ^ b[i])

DEFINE_INTEGER(uint8, uint8_t, unsigned)
DEFINE_INTEGER(int8, int8_t, unsigned)
DEFINE_INTEGER(int16, int16_t, unsigned)
DEFINE_INTEGER(int32, int32_t, uint32_t)
DEFINE_INTEGER(int64, int64_t, uint64_t)

DEFINE_LOOP(bool_and, uint8_t, (a[i] != 0) & (b[i] != 0))
DEFINE_LOOP(bool_or, uint8_t, (a[i] != 0) | (b[i] != 0))
DEFINE_LOOP(bool_xor, uint8_t, (a[i] != 0) ^ (b[i] != 0))

#define DEFINE_FLOAT(name, type)                         \
    DEFINE_LOOP(name##_sum, type, a[i] + b[i])           \
    DEFINE_LOOP(name##_product, type, a[i] * b[i])       \
    DEFINE_LOOP(name##_min, type, MIN_FLOAT(a[i], b[i])) \
    DEFINE_LOOP(name##_max, type, MAX_FLOAT(a[i], b[i]))

DEFINE_FLOAT(float32, float)
DEFINE_FLOAT(float64, double)

#define DEFINE_COMPLEX(name, type)             \
    DEFINE_LOOP(name##_sum, type, a[i] + b[i]) \
    DEFINE_LOOP(name##_product, type, a[i] * b[i])

DEFINE_COMPLEX(complex64, complex64)
DEFINE_COMPLEX(complex128, complex128)

#define DEFINE_HALF_LOOP(name, half, expression)                                   \
    static void name(void *restrict into, const void *restrict from, size_t count) \
    {                                                                              \
        uint16_t *restrict a = into;                                               \
        const uint16_t *restrict b = from;                                         \
        for (size_t i = 0; i < count; i++) {                                       \
            float x = tddp_backend_from_##half(a[i]);                              \
            float y = tddp_backend_from_##half(b[i]);                              \
            a[i] = tddp_backend_to_##half(expression);                             \
        }                                                                          \
    }

#define DEFINE_HALF(half)                               \
    DEFINE_HALF_LOOP(half##_sum, half, x + y)           \
    DEFINE_HALF_LOOP(half##_product, half, x *y)        \
    DEFINE_HALF_LOOP(half##_min, half, MIN_FLOAT(x, y)) \
    DEFINE_HALF_LOOP(half##_max, half, MAX_FLOAT(x, y))

DEFINE_HALF(float16)
DEFINE_HALF(bfloat16)

typedef void (*combine)(void *restrict into, const void *restrict from, size_t count);

enum { OP_COUNT = TDDP_REDUCE_PREMUL_SUM + 1, DTYPE_COUNT = TDDP_BOOL + 1 };

#define INTEGER_ROW(name)                                                       \
    {                                                                           \
        [TDDP_REDUCE_SUM] = name##_sum, [TDDP_REDUCE_PRODUCT] = name##_product, \
        [TDDP_REDUCE_MIN] = name##_min, [TDDP_REDUCE_MAX] = name##_max,         \
        [TDDP_REDUCE_BAND] = name##_band, [TDDP_REDUCE_BOR] = name##_bor,       \
        [TDDP_REDUCE_BXOR] = name##_bxor,                                       \
    }
#define FLOAT_ROW(name)                                                                \
    {                                                                                  \
        [TDDP_REDUCE_SUM] = name##_sum, [TDDP_REDUCE_AVG] = name##_sum,                \
        [TDDP_REDUCE_PREMUL_SUM] = name##_sum, [TDDP_REDUCE_PRODUCT] = name##_product, \
        [TDDP_REDUCE_MIN] = name##_min, [TDDP_REDUCE_MAX] = name##_max,                \
    }
#define COMPLEX_ROW(name)                                                              \
    {                                                                                  \
        [TDDP_REDUCE_SUM] = name##_sum, [TDDP_REDUCE_AVG] = name##_sum,                \
        [TDDP_REDUCE_PREMUL_SUM] = name##_sum, [TDDP_REDUCE_PRODUCT] = name##_product, \
    }

static const combine table[DTYPE_COUNT][OP_COUNT] = {
    [TDDP_UINT8] = INTEGER_ROW(uint8),
    [TDDP_INT8] = INTEGER_ROW(int8),
    [TDDP_INT16] = INTEGER_ROW(int16),
    [TDDP_INT32] = INTEGER_ROW(int32),
    [TDDP_INT64] = INTEGER_ROW(int64),
    [TDDP_FLOAT16] = FLOAT_ROW(float16),
    [TDDP_BFLOAT16] = FLOAT_ROW(bfloat16),
    [TDDP_FLOAT32] = FLOAT_ROW(float32),
    [TDDP_FLOAT64] = FLOAT_ROW(float64),
    [TDDP_COMPLEX64] = COMPLEX_ROW(complex64),
    [TDDP_COMPLEX128] = COMPLEX_ROW(complex128),
    [TDDP_BOOL] = {[TDDP_REDUCE_SUM] = bool_or,
                   [TDDP_REDUCE_PRODUCT] = bool_and,
                   [TDDP_REDUCE_MIN] = bool_and,
                   [TDDP_REDUCE_MAX] = bool_or,
                   [TDDP_REDUCE_BAND] = bool_and,
                   [TDDP_REDUCE_BOR] = bool_or,
                   [TDDP_REDUCE_BXOR] = bool_xor},
};

static combine find(tddp_reduce_op op, tddp_dtype dtype)
{
    bool known = (unsigned)op < OP_COUNT && (unsigned)dtype < DTYPE_COUNT;
    return known ? table[dtype][op] : NULL;
}

const char *tddp_reduce_op_name(tddp_reduce_op op)
{
    switch (op) {
#define TEXT(name, code, text) \
    case TDDP_REDUCE_##name:   \
        return text;
        TDDP_REDUCE_OP_MAP(TEXT)
#undef TEXT
    }
    return "unknown";
}

tddp_status tddp_reduce_check(tddp_reduce_op op, tddp_dtype dtype)
{
    if ((unsigned)op >= OP_COUNT) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "reduce operation %d: expected 0 to %d", (int)op,
                         OP_COUNT - 1);
    }
    if ((unsigned)dtype >= DTYPE_COUNT) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "dtype %d: expected 0 to %d", (int)dtype,
                         DTYPE_COUNT - 1);
    }
    if (find(op, dtype)) {
        return TDDP_OK;
    }
    const char *expected = op >= TDDP_REDUCE_BAND && op <= TDDP_REDUCE_BXOR ? "integers or bool"
                           : op == TDDP_REDUCE_MIN || op == TDDP_REDUCE_MAX
                               ? "numbers that have an order"
                               : "floating-point or complex numbers";
    return tddp_fail(TDDP_UNSUPPORTED, "cannot reduce %s by %s: expected %s",
                     tddp_dtype_name(dtype), tddp_reduce_op_name(op), expected);
}

void tddp_combine(tddp_reduce_op op, tddp_dtype dtype, void *into, const void *from, size_t count)
{
    combine loop = find(op, dtype);
    if (loop && count > 0) {
        loop(into, from, count);
    }
}

#define SCALE(type, factor_type, number)        \
    do {                                        \
        type *values = data;                    \
        factor_type by = (factor_type)factor;   \
        for (size_t i = 0; i < (number); i++) { \
            values[i] *= by;                    \
        }                                       \
    } while (0)

#define SCALE_HALF(half)                                                                  \
    do {                                                                                  \
        uint16_t *values = data;                                                          \
        float by = (float)factor;                                                         \
        for (size_t i = 0; i < count; i++) {                                              \
            values[i] = tddp_backend_to_##half(tddp_backend_from_##half(values[i]) * by); \
        }                                                                                 \
    } while (0)

void tddp_scale(tddp_dtype dtype, void *data, size_t count, double factor)
{
    switch (dtype) {
    case TDDP_FLOAT16:
        SCALE_HALF(float16);
        break;
    case TDDP_BFLOAT16:
        SCALE_HALF(bfloat16);
        break;
    case TDDP_FLOAT32:
        SCALE(float, float, count);
        break;
    case TDDP_FLOAT64:
        SCALE(double, double, count);
        break;
    /* A complex number is two real ones; the factor is real. */
    case TDDP_COMPLEX64:
        SCALE(float, float, count * 2);
        break;
    case TDDP_COMPLEX128:
        SCALE(double, double, count * 2);
        break;
    default:
        break;
    }
}
