/*
 * The loops for what every processor of the architecture has: SSE2 of x86-64, NEON of AArch64.
 * Leaves their text to loops.h.
 */
#include <string.h>

#include "backend/arith/loops.h"

static bool works(void)
{
    return true;
}

static void stream(void *into, const void *from, size_t bytes)
{
    memcpy(into, from, bytes);
}

static void fence(void) {}

#ifdef __aarch64__
#define NAME "neon"
#else
#define NAME "baseline"
#endif

const tddp_arith_set tddp_arith_baseline = {
    .name = NAME,
    .works = works,
    .combine = COMBINE_TABLE,
    .scale_float32 = scale_float32,
    .scale_float64 = scale_float64,
    .widen_float16 = widen_float16,
    .widen_bfloat16 = widen_bfloat16,
    .narrow_float16 = narrow_float16,
    .narrow_bfloat16 = narrow_bfloat16,
    .stream = stream,
    .fence = fence,
};
