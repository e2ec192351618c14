/*
 * The set for every processor of the architecture: SSE2 of x86-64, NEON of AArch64. Pure functions,
 * any thread. The loops are in loops.h.
 */
#define VECTOR_BYTES 16
#include "backend/arith/vectors.h"

static bool works(void)
{
    return true;
}

#if defined(__x86_64__)

#include <emmintrin.h>

#define NAME "baseline"

INLINE void stream_vector(void *into, words vector)
{
    _mm_stream_si128(into, (__m128i)vector);
}

INLINE bool any_nan(floats a, floats b)
{
    return _mm_movemask_ps(_mm_cmpunord_ps((__m128)a, (__m128)b)) != 0;
}

static void fence(void)
{
    _mm_sfence();
}

#elif defined(__aarch64__)

#include <arm_neon.h>

#define NAME "neon"

/* Stores past the cache exist only in pairs, and need no fence. */
INLINE void stream_vector(void *into, words vector)
{
    memcpy(into, &vector, sizeof vector);
}

static void fence(void) {}

#define HAS_FLOAT16

INLINE floats float16_load(const uint16_t *from)
{
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

INLINE void float16_store(uint16_t *into, floats vector)
{
    vst1_u16(into, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)vector)));
}

INLINE void float16_stream(uint16_t *into, floats vector)
{
    float16_store(into, vector);
}

#else

#define NAME "baseline"

INLINE void stream_vector(void *into, words vector)
{
    memcpy(into, &vector, sizeof vector);
}

static void fence(void) {}

#endif

#include "backend/arith/loops.h"

DEFINE_SET(tddp_arith_baseline, NAME);
