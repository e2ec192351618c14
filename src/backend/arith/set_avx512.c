/*
 * The set for AVX-512: F, BW, VL and DQ, which every server processor with 512-bit vectors has.
 * Pure functions, any thread, if works() returns true. The loops are in loops.h.
 */
#ifdef __x86_64__

#define VECTOR_BYTES 64
#include "backend/arith/vectors.h"

#include <immintrin.h>

/* This includes the system's support for the registers. */
static bool works(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

INLINE void stream_vector(void *into, words vector)
{
    _mm512_stream_si512(into, (__m512i)vector);
}

INLINE bool any_nan(floats a, floats b)
{
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
}

static void fence(void)
{
    _mm_sfence();
}

#define HAS_FLOAT16

INLINE floats float16_load(const uint16_t *from)
{
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE __m256i narrowed(floats vector)
{
    return _mm512_cvtps_ph((__m512)vector, _MM_FROUND_TO_NEAREST_INT);
}

INLINE void float16_store(uint16_t *into, floats vector)
{
    _mm256_storeu_si256((__m256i *)into, narrowed(vector));
}

INLINE void float16_stream(uint16_t *into, floats vector)
{
    _mm256_stream_si256((__m256i *)into, narrowed(vector));
}

#include "backend/arith/loops.h"

DEFINE_SET(tddp_arith_avx512, "avx512");

#endif
