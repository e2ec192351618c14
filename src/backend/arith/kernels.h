/*
 * The kernels of one instruction set, in GCC's and clang's vector types: each set_*.c defines SET
 * and includes this file, and is compiled with the set's flags (see CMakeLists.txt), from which its
 * vectors follow. Pure functions, any thread.
 *
 * A kernel combines all sources in registers and writes the result to all results. An element is
 * read from all sources before it is written, as a result may be the memory of a source. Overflow
 * of integers wraps (-fwrapv).
 */
#include <string.h>

#include "backend/arith/set.h"
#include "backend/half.h"

/* STREAM stores to a multiple of VECTOR_BYTES, past the cache; ANY_NAN may be true without any;
 * WIDEN and NARROW convert a vector of float32 from and to float16. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define SET_NAME "avx512"
#define VECTOR_BYTES 64
#define STREAM(into, vector) _mm512_stream_si512((void *)(into), (__m512i)(vector))
#define ANY_NAN(a, b) (_mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_UNORD_Q) != 0)
#define WIDEN(from) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from)))
#define NARROW(into, from) \
    _mm256_storeu_si256((void *)(into), _mm512_cvtps_ph((__m512)(from), _MM_FROUND_TO_NEAREST_INT))
#elif defined(__AVX2__)
#include <immintrin.h>
#define SET_NAME "avx2"
#define VECTOR_BYTES 32
#define STREAM(into, vector) _mm256_stream_si256((void *)(into), (__m256i)(vector))
#define ANY_NAN(a, b) \
    (_mm256_movemask_ps(_mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_UNORD_Q)) != 0)
#define WIDEN(from) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from)))
#define NARROW(into, from) \
    _mm_storeu_si128((void *)(into), _mm256_cvtps_ph((__m256)(from), _MM_FROUND_TO_NEAREST_INT))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define SET_NAME "neon"
#define VECTOR_BYTES 16
#define STREAM(into, vector) memcpy(into, &(vector), sizeof(vector)) /* there is only a pair's */
#define WIDEN(from) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))
#define NARROW(into, from) vst1_u16(into, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(from))))
#else
#define SET_NAME "baseline"
#define VECTOR_BYTES 16
#ifdef __x86_64__
#include <emmintrin.h>
#define STREAM(into, vector) _mm_stream_si128((void *)(into), (__m128i)(vector))
#define ANY_NAN(a, b) (_mm_movemask_ps(_mm_cmpunord_ps((__m128)(a), (__m128)(b))) != 0)
#else
#define STREAM(into, vector) memcpy(into, &(vector), sizeof(vector))
#endif
#endif

#ifndef ANY_NAN
#define ANY_NAN(a, b) true
#endif

#define INLINE static inline __attribute__((always_inline))
#define VECTOR __attribute__((vector_size(VECTOR_BYTES), may_alias))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bfloat16 lie in words by their order");

/* --- formats: how elements lie in memory, and what they are computed in ----------------------- */

typedef uint32_t words VECTOR;

#define FORMAT(part) uint8_##part
#define ELEMENT uint8_t
#include "backend/arith/format.h"
#define FORMAT(part) int8_##part
#define ELEMENT int8_t
#include "backend/arith/format.h"
#define FORMAT(part) int16_##part
#define ELEMENT int16_t
#include "backend/arith/format.h"
#define FORMAT(part) int32_##part
#define ELEMENT int32_t
#include "backend/arith/format.h"
#define FORMAT(part) int64_##part
#define ELEMENT int64_t
#include "backend/arith/format.h"
#define FORMAT(part) float32_##part
#define ELEMENT float
#include "backend/arith/format.h"
#define FORMAT(part) float64_##part
#define ELEMENT double
#include "backend/arith/format.h"

INLINE float32_vector bfloat16_first(uint16_t element)
{
    return (float32_vector){tddp_backend_from_bfloat16(element)};
}

INLINE uint16_t bfloat16_get(float32_vector vector)
{
    return tddp_backend_to_bfloat16(vector[0]);
}

/* The elements with even numbers, in the lower halves of words, and those with odd ones. */
INLINE float32_two bfloat16_load(const uint16_t *from)
{
    words both;
    memcpy(&both, from, sizeof both);
    return (float32_two){(float32_vector)(both << 16), (float32_vector)(both & 0xffff0000u)};
}

/* Like tddp_backend_to_bfloat16(), which the upper halves of the words are; for numbers that aren't
 * NaN. */
INLINE words rounded(float32_vector real)
{
    return (words)real + 0x7fffu + (((words)real >> 16) & 1u);
}

INLINE words rounded_or_nan(float32_vector real)
{
    const words nan = (words)(real != real);
    return (rounded(real) & ~nan) | (((words)real | 0x00400000u) & nan);
}

INLINE void bfloat16_store(uint16_t *into, float32_two two)
{
    words even = rounded(two.a);
    words odd = rounded(two.b);
    if (__builtin_expect(ANY_NAN(two.a, two.b), 0)) {
        even = rounded_or_nan(two.a);
        odd = rounded_or_nan(two.b);
    }
    even = (even >> 16) | (odd & 0xffff0000u);
    memcpy(into, &even, sizeof even);
}

#define FORMAT(part) bfloat16_##part
#define HALF
#include "backend/arith/format.h"

INLINE float32_vector float16_first(uint16_t element)
{
    return (float32_vector){tddp_backend_from_float16(element)};
}

INLINE uint16_t float16_get(float32_vector vector)
{
    return tddp_backend_to_float16(vector[0]);
}

#ifndef WIDEN
#define WIDEN(from) widened(from)
#define NARROW(into, from) narrow_vector(into, from)

INLINE float32_vector widened(const uint16_t *from)
{
    float32_vector vector;
    for (int i = 0; i < float32_lanes; i++) {
        vector[i] = tddp_backend_from_float16(from[i]);
    }
    return vector;
}

INLINE void narrow_vector(uint16_t *into, float32_vector from)
{
    for (int i = 0; i < float32_lanes; i++) {
        into[i] = tddp_backend_to_float16(from[i]);
    }
}
#endif

INLINE float32_two float16_load(const uint16_t *from)
{
    return (float32_two){(float32_vector)WIDEN(from), (float32_vector)WIDEN(from + float32_lanes)};
}

INLINE void float16_store(uint16_t *into, float32_two two)
{
    NARROW(into, two.a);
    NARROW(into + float32_lanes, two.b);
}

#define FORMAT(part) float16_##part
#define HALF
#include "backend/arith/format.h"

/* --- kernels ---------------------------------------------------------------------------------- */

#define SUM(x, y) ((x) + (y))
#define PRODUCT(x, y) ((x) * (y))
#define SELECT(mask, x, y) \
    ((__typeof__(x))(((mask) & (__typeof__(mask))(x)) | (~(mask) & (__typeof__(mask))(y))))
#define MIN(x, y) SELECT((y) < (x), y, x)
#define MAX(x, y) SELECT((y) > (x), y, x)
/* Propagates NaN from either side: `y != y` holds only for NaN. */
#define MIN_FLOAT(x, y) SELECT(((y) < (x)) | ((y) != (y)), y, x)
#define MAX_FLOAT(x, y) SELECT(((y) > (x)) | ((y) != (y)), y, x)
#define BAND(x, y) ((x) & (y))
#define BOR(x, y) ((x) | (y))
#define BXOR(x, y) ((x) ^ (y))
#define BOOL_AND(x, y) ((uint8_vector)(((x) != 0) & ((y) != 0)) & 1)
#define BOOL_OR(x, y) ((uint8_vector)(((x) | (y)) != 0) & 1)
#define BOOL_XOR(x, y) ((uint8_vector)(((x) != 0) ^ ((y) != 0)) & 1)

/* `is_sum` also gives it loops for several numbers of sources. */
#define DEFINE_KERNEL(name, format, COMBINE, is_sum)                                              \
    INLINE format##_vector name##_combine(format##_vector x, format##_vector y)                   \
    {                                                                                             \
        return COMBINE(x, y);                                                                     \
    }                                                                                             \
    static void name(const tddp_arith_job *job, size_t start, size_t count, void *const *results, \
                     int result_count)                                                            \
    {                                                                                             \
        format##_run(job, start, count, results, result_count, is_sum, name##_combine);           \
    }

#define DEFINE_INTEGER(name)                            \
    DEFINE_KERNEL(name##_sum, name, SUM, false)         \
    DEFINE_KERNEL(name##_product, name, PRODUCT, false) \
    DEFINE_KERNEL(name##_min, name, MIN, false)         \
    DEFINE_KERNEL(name##_max, name, MAX, false)         \
    DEFINE_KERNEL(name##_band, name, BAND, false)       \
    DEFINE_KERNEL(name##_bor, name, BOR, false)         \
    DEFINE_KERNEL(name##_bxor, name, BXOR, false)

#define DEFINE_FLOAT(name)                              \
    DEFINE_KERNEL(name##_sum, name, SUM, true)          \
    DEFINE_KERNEL(name##_product, name, PRODUCT, false) \
    DEFINE_KERNEL(name##_min, name, MIN_FLOAT, false)   \
    DEFINE_KERNEL(name##_max, name, MAX_FLOAT, false)

DEFINE_INTEGER(uint8)
DEFINE_INTEGER(int8)
DEFINE_INTEGER(int16)
DEFINE_INTEGER(int32)
DEFINE_INTEGER(int64)
DEFINE_FLOAT(float16)
DEFINE_FLOAT(bfloat16)
DEFINE_FLOAT(float32)
DEFINE_FLOAT(float64)
DEFINE_KERNEL(bool_and, uint8, BOOL_AND, false)
DEFINE_KERNEL(bool_or, uint8, BOOL_OR, false)
DEFINE_KERNEL(bool_xor, uint8, BOOL_XOR, false)

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

static void widen_float16(float *into, const uint16_t *from, size_t count)
{
    size_t i = 0;
    for (; i + float32_lanes <= count; i += float32_lanes) {
        const float32_vector vector = (float32_vector)WIDEN(from + i);
        memcpy(into + i, &vector, sizeof vector);
    }
    for (; i < count; i++) {
        into[i] = tddp_backend_from_float16(from[i]);
    }
}

static void narrow_float16(uint16_t *into, const float *from, size_t count)
{
    size_t i = 0;
    for (; i + float32_lanes <= count; i += float32_lanes) {
        float32_vector vector;
        memcpy(&vector, from + i, sizeof vector);
        NARROW(into + i, vector);
    }
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
    for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES) {
        words vector;
        memcpy(&vector, at + i, sizeof vector);
        STREAM(to + i, vector);
    }
    memcpy(to + i, at + i, bytes - i);
}

/* --- the set ---------------------------------------------------------------------------------- */

#define SUMS(name) \
    [TDDP_REDUCE_SUM] = name, [TDDP_REDUCE_AVG] = name, [TDDP_REDUCE_PREMUL_SUM] = name
#define INTEGER(name)                                                           \
    {                                                                           \
        [TDDP_REDUCE_SUM] = name##_sum, [TDDP_REDUCE_PRODUCT] = name##_product, \
        [TDDP_REDUCE_MIN] = name##_min, [TDDP_REDUCE_MAX] = name##_max,         \
        [TDDP_REDUCE_BAND] = name##_band, [TDDP_REDUCE_BOR] = name##_bor,       \
        [TDDP_REDUCE_BXOR] = name##_bxor,                                       \
    }
#define FLOAT(name)                                                                               \
    {                                                                                             \
        SUMS(name##_sum), [TDDP_REDUCE_PRODUCT] = name##_product, [TDDP_REDUCE_MIN] = name##_min, \
                          [TDDP_REDUCE_MAX] = name##_max,                                         \
    }

const tddp_arith_set SET = {
    .name = SET_NAME,
    .kernels = {[TDDP_UINT8] = INTEGER(uint8),
                [TDDP_INT8] = INTEGER(int8),
                [TDDP_INT16] = INTEGER(int16),
                [TDDP_INT32] = INTEGER(int32),
                [TDDP_INT64] = INTEGER(int64),
                [TDDP_FLOAT16] = FLOAT(float16),
                [TDDP_BFLOAT16] = FLOAT(bfloat16),
                [TDDP_FLOAT32] = FLOAT(float32),
                [TDDP_FLOAT64] = FLOAT(float64),
                [TDDP_COMPLEX64] = {SUMS(float32_sum), [TDDP_REDUCE_PRODUCT] =
                                                           tddp_arith_complex64_product},
                [TDDP_COMPLEX128] = {SUMS(float64_sum), [TDDP_REDUCE_PRODUCT] =
                                                            tddp_arith_complex128_product},
                [TDDP_BOOL] = {[TDDP_REDUCE_SUM] = bool_or,
                               [TDDP_REDUCE_PRODUCT] = bool_and,
                               [TDDP_REDUCE_MIN] = bool_and,
                               [TDDP_REDUCE_MAX] = bool_or,
                               [TDDP_REDUCE_BAND] = bool_and,
                               [TDDP_REDUCE_BOR] = bool_or,
                               [TDDP_REDUCE_BXOR] = bool_xor}},
    .widen_float16 = widen_float16,
    .widen_bfloat16 = widen_bfloat16,
    .narrow_float16 = narrow_float16,
    .narrow_bfloat16 = narrow_bfloat16,
    .stream = stream,
};
