/*
 * The set for AVX2 and F16C. Pure functions, any thread, if works() returns true. The loops are in
 * loops.h.
 */
#ifdef __x86_64__

#define VECTOR_BYTES 32
#include "backend/arith/vectors.h"

#include <cpuid.h>
#include <immintrin.h>

/* The first check includes the system's support for the registers; clang doesn't know "f16c". */
static bool works(void)
{
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

INLINE void stream_vector(void *into, words vector)
{
    _mm256_stream_si256(into, (__m256i)vector);
}

INLINE bool any_nan(floats a, floats b)
{
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
}

static void fence(void)
{
    _mm_sfence();
}

#define HAS_FLOAT16

INLINE floats float16_load(const uint16_t *from)
{
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

INLINE __m128i narrowed(floats vector)
{
    return _mm256_cvtps_ph((__m256)vector, _MM_FROUND_TO_NEAREST_INT);
}

INLINE void float16_store(uint16_t *into, floats vector)
{
    _mm_storeu_si128((__m128i *)into, narrowed(vector));
}

INLINE void float16_stream(uint16_t *into, floats vector)
{
    _mm_stream_si128((__m128i *)into, narrowed(vector));
}

#include "backend/arith/loops.h"

DEFINE_SET(tddp_arith_avx2, "avx2");

#endif
