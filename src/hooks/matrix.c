/*
 * PowerSGD's matrix products and orthonormalization; matrix_real.h is compiled for float32 and for
 * float64. The compiler vectorizes the loops without reordering sums: a dot product has many
 * independent accumulators. Each product reads the matrix once, in memory order, in blocks of
 * columns for which the narrow matrices stay in the cache.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "hooks/hooks.h"
#include "hooks/matrix.h"

enum {
    LANES = 32,   /* independent accumulators */
    BLOCK = 2048, /* columns at a time */
    ATTEMPTS = 4, /* to find a linearly independent random column */
};

/* splitmix64's finalizer. */
uint64_t tddp_hooks_mix(uint64_t key, uint64_t more)
{
    uint64_t x = key + UINT64_C(0x9e3779b97f4a7c15) * (more + 1);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Approximately normal, mean 0, variance 1: the sum of twelve uniform numbers, which unlike
 * logarithms is the same on every machine. */
static double normal(uint64_t key, uint64_t index)
{
    const uint64_t mask = (UINT64_C(1) << 21) - 1;
    uint64_t sum = 0;
    for (uint64_t k = 0; k < 4; k++) {
        uint64_t bits = tddp_hooks_mix(key, index * 4 + k);
        sum += (bits & mask) + (bits >> 21 & mask) + (bits >> 42 & mask);
    }
    return ((double)sum + 6.0) * 0x1p-21 - 6.0;
}

#define REAL float
#define DTYPE TDDP_FLOAT32
#define NAME(name) name##_float
#include "hooks/matrix_real.h"
#undef REAL
#undef DTYPE
#undef NAME

#define REAL double
#define DTYPE TDDP_FLOAT64
#define NAME(name) name##_double
#include "hooks/matrix_real.h"

const tddp_hooks_algebra *tddp_hooks_algebra_of(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT64 ? &algebra_double : &algebra_float;
}
