/*
 * Products of complex numbers with C's rules: infinity times a number isn't NaN. All sets of loops
 * share this code, since gcc fuses these products and sums if the processor can, even when told not
 * to. Pure functions, any thread.
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
