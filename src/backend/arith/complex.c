/*
 * Products of complex numbers with C's rules: infinity times a number isn't NaN. All sets share
 * this code, since gcc fuses these products and sums if the processor can, even when told not to.
 * Pure functions, any thread.
 */
#include <complex.h>

#include "backend/arith/set.h"

#define DEFINE_PRODUCT(name, real)                                                         \
    void name(const tddp_arith_job *job, size_t start, size_t count, void *const *results, \
              int result_count)                                                            \
    {                                                                                      \
        for (size_t i = 0; i < count; i++) {                                               \
            real complex result = 1;                                                       \
            for (int k = 0; k < job->source_count; k++) {                                  \
                real complex next = ((const real complex *)job->sources[k])[start + i];    \
                next = job->factors ? next * (real)job->factors[k] : next;                 \
                result = k > 0 ? result * next : next;                                     \
            }                                                                              \
            result = job->factor != 1 ? result * (real)job->factor : result;               \
            for (int k = 0; k < result_count; k++) {                                       \
                ((real complex *)results[k])[i] = result;                                  \
            }                                                                              \
        }                                                                                  \
    }

DEFINE_PRODUCT(tddp_arith_complex64_product, float)
DEFINE_PRODUCT(tddp_arith_complex128_product, double)
