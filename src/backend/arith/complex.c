/*
 * Products of complex numbers, as C has them: infinity times a number is no NaN. They are the same
 * code for all sets of loops, since gcc fuses their products and sums where the processor can, even
 * if it is told not to. Pure functions, any thread.
 */
#include <complex.h>

#include "backend/arith/set.h"

#define DEFINE_PRODUCT(name, type)                                           \
    void name(void *into, const void *left, const void *right, size_t count) \
    {                                                                        \
        type *result = into;                                                 \
        const type *a = left;                                                \
        const type *b = right;                                               \
        for (size_t i = 0; i < count; i++) {                                 \
            result[i] = a[i] * b[i];                                         \
        }                                                                    \
    }

DEFINE_PRODUCT(tddp_arith_complex64_product, float complex)
DEFINE_PRODUCT(tddp_arith_complex128_product, double complex)
