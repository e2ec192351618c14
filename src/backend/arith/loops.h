/*
 * The loops of one instruction set. Each set_*.c includes this file once, after vectors.h, and is
 * compiled with the set's flags (see CMakeLists.txt). Sums are in sum.h; all others are plain loops
 * that the compiler vectorises. Pure functions, any thread.
 *
 * Integers are combined as unsigned numbers, so that overflow wraps instead of being undefined. A
 * result may be the memory of a source: each element is read before it is written, and no element
 * depends on another, which INDEPENDENT tells the compiler.
 */
#include "backend/arith/set.h"

#define DEFINE_LOOP(name, type, expression)                                         \
    static void name(void *into, const void *left, const void *right, size_t count) \
    {                                                                               \
        type *result = into;                                                        \
        const type *a = left;                                                       \
        const type *b = right;                                                      \
        INDEPENDENT                                                                 \
        for (size_t i = 0; i < count; i++) {                                        \
            result[i] = (type)(expression);                                         \
        }                                                                           \
    }

#define MIN_OF(x, y) ((y) < (x) ? (y) : (x))
#define MAX_OF(x, y) ((y) > (x) ? (y) : (x))
/* Propagates NaN from either side: `x != x` holds only for NaN. */
#define MIN_FLOAT(x, y) ((y) < (x) || (y) != (y) ? (y) : (x))
#define MAX_FLOAT(x, y) ((y) > (x) || (y) != (y) ? (y) : (x))

/* `wide` is an unsigned type at least as wide as int, so that overflow is defined. */
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

/* The sum of complex numbers is the sum of twice as many real numbers. */
#define DEFINE_COMPLEX(name, real)                                                        \
    static void name##_sum(void *into, const void *left, const void *right, size_t count) \
    {                                                                                     \
        real##_sum(into, left, right, count * 2);                                         \
    }

DEFINE_COMPLEX(complex64, float32)
DEFINE_COMPLEX(complex128, float64)

#define DEFINE_SCALE(name, type)                                                \
    static void name(void *into, const void *from, size_t count, double factor) \
    {                                                                           \
        type *result = into;                                                    \
        const type *a = from;                                                   \
        const type by = (type)factor;                                           \
        INDEPENDENT                                                             \
        for (size_t i = 0; i < count; i++) {                                    \
            result[i] = a[i] * by;                                              \
        }                                                                       \
    }

DEFINE_SCALE(scale_float32, float)
DEFINE_SCALE(scale_float64, double)

#define KIT(part) float32_##part
#include "backend/arith/sum.h"
#undef KIT
#define KIT(part) float64_##part
#include "backend/arith/sum.h"
#undef KIT
#define KIT(part) bfloat16_##part
#include "backend/arith/sum.h"
#undef KIT

static void widen_bfloat16(float *restrict into, const uint16_t *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        into[i] = tddp_backend_from_bfloat16(from[i]);
    }
}

static void narrow_bfloat16(uint16_t *restrict into, const float *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        into[i] = tddp_backend_to_bfloat16(from[i]);
    }
}

/* A set whose processor converts float16 defines how a vector of it is loaded and stored. */
#ifdef HAS_FLOAT16
#define KIT(part) float16_##part
#include "backend/arith/sum.h"
#undef KIT
#endif

static void widen_float16(float *restrict into, const uint16_t *restrict from, size_t count)
{
    size_t i = 0;
#ifdef HAS_FLOAT16
    for (; i + FLOATS <= count; i += FLOATS) {
        float32_store(into + i, float16_load(from + i));
    }
#endif
    for (; i < count; i++) {
        into[i] = tddp_backend_from_float16(from[i]);
    }
}

static void narrow_float16(uint16_t *restrict into, const float *restrict from, size_t count)
{
    size_t i = 0;
#ifdef HAS_FLOAT16
    for (; i + FLOATS <= count; i += FLOATS) {
        float16_store(into + i, float32_load(from + i));
    }
#endif
    for (; i < count; i++) {
        into[i] = tddp_backend_to_float16(from[i]);
    }
}

/* Whole vectors bypass the cache; the bytes before the first and after the last don't. */
static void stream(void *into, const void *from, size_t bytes)
{
    unsigned char *to = into;
    const unsigned char *at = from;
    const size_t before = -(uintptr_t)to % VECTOR_BYTES;
    const size_t head = before < bytes ? before : bytes;
    memcpy(to, at, head);
    size_t i = head;
    for (; i + 4 * VECTOR_BYTES <= bytes; i += 4 * VECTOR_BYTES) {
        words four[4];
        memcpy(four, at + i, sizeof four);
        UNROLLED
        for (int v = 0; v < 4; v++) {
            stream_vector(to + i + v * VECTOR_BYTES, four[v]);
        }
    }
    memcpy(to + i, at + i, bytes - i);
}

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
#define COMPLEX_ROW(name)                                               \
    {                                                                   \
        [TDDP_REDUCE_SUM] = name##_sum, [TDDP_REDUCE_AVG] = name##_sum, \
        [TDDP_REDUCE_PREMUL_SUM] = name##_sum,                          \
        [TDDP_REDUCE_PRODUCT] = tddp_arith_##name##_product,            \
    }
#define BOOL_ROW                                                                                  \
    {                                                                                             \
        [TDDP_REDUCE_SUM] = bool_or, [TDDP_REDUCE_PRODUCT] = bool_and,                            \
        [TDDP_REDUCE_MIN] = bool_and, [TDDP_REDUCE_MAX] = bool_or, [TDDP_REDUCE_BAND] = bool_and, \
        [TDDP_REDUCE_BOR] = bool_or, [TDDP_REDUCE_BXOR] = bool_xor,                               \
    }

#define COMBINE_TABLE                                                                   \
    {                                                                                   \
        [TDDP_UINT8] = INTEGER_ROW(uint8), [TDDP_INT8] = INTEGER_ROW(int8),             \
        [TDDP_INT16] = INTEGER_ROW(int16), [TDDP_INT32] = INTEGER_ROW(int32),           \
        [TDDP_INT64] = INTEGER_ROW(int64), [TDDP_FLOAT32] = FLOAT_ROW(float32),         \
        [TDDP_FLOAT64] = FLOAT_ROW(float64), [TDDP_COMPLEX64] = COMPLEX_ROW(complex64), \
        [TDDP_COMPLEX128] = COMPLEX_ROW(complex128), [TDDP_BOOL] = BOOL_ROW,            \
    }

#ifdef HAS_FLOAT16
#define SUM_FLOAT16 float16_sum_job
#else
#define SUM_FLOAT16 NULL
#endif

#define DEFINE_SET(set, set_name)                     \
    const tddp_arith_set set = {                      \
        .name = (set_name),                           \
        .works = works,                               \
        .vector_bytes = VECTOR_BYTES,                 \
        .combine = COMBINE_TABLE,                     \
        .sum = {[TDDP_FLOAT16] = SUM_FLOAT16,         \
                [TDDP_BFLOAT16] = bfloat16_sum_job,   \
                [TDDP_FLOAT32] = float32_sum_job,     \
                [TDDP_FLOAT64] = float64_sum_job,     \
                [TDDP_COMPLEX64] = float32_sum_job,   \
                [TDDP_COMPLEX128] = float64_sum_job}, \
        .scale_float32 = scale_float32,               \
        .scale_float64 = scale_float64,               \
        .widen_float16 = widen_float16,               \
        .widen_bfloat16 = widen_bfloat16,             \
        .narrow_float16 = narrow_float16,             \
        .narrow_bfloat16 = narrow_bfloat16,           \
        .stream = stream,                             \
        .fence = fence,                               \
    }
