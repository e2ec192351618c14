/*
 * PowerSGD's products and orthogonal columns, for float32 and float64 from one text. Loops are such
 * that the compiler vectorises them without being allowed to reorder sums: a dot product has many
 * running sums side by side. A matrix is read in its order, once for each product, in blocks of
 * columns for which the narrow matrices stay in the cache.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "hooks/matrix.h"

enum {
    LANES = 32,   /* sums side by side */
    BLOCK = 2048, /* columns at a time */
    ATTEMPTS = 4, /* at a random column with a direction of its own */
};

/* splitmix64's finish. */
uint64_t tddp_hooks_mix(uint64_t key, uint64_t more)
{
    uint64_t x = key + UINT64_C(0x9e3779b97f4a7c15) * (more + 1);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* The sum of twelve even numbers is as good as normal here, and unlike logarithms the same on every
 * machine. Mean 0, variance 1. */
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

static size_t shorter(size_t a, size_t b)
{
    return a < b ? a : b;
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
