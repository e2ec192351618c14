/*
 * The loops for AVX2 and F16C. Pure functions, any thread that has been told that the set works.
 * Leaves the loops themselves to loops.h.
 */
#ifdef __x86_64__

#define VECTOR_BYTES 32
#include "backend/arith/vectors.h"

#include <immintrin.h>

/* This asks whether the system keeps the registers, too. */
static bool works(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

INLINE void stream_vector(void *into, words vector)
{
    _mm256_stream_si256(into, (__m256i)vector);
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
