/*
 * The arithmetic of collectives over any number of sources, with vector code chosen at run time
 * (tddp_combine() and tddp_scale() of <tddp/backend.h> use it). Pure functions, any thread.
 *
 * The bits don't depend on the instruction set: sources are combined in order, element by element,
 * and no multiplication is fused with an addition.
 */
#ifndef TDDP_ARITH_H
#define TDDP_ARITH_H

#include <stdbool.h>

#include <tddp/backend.h>

typedef struct tddp_arith_job {
    tddp_reduce_op op; /* allowed by tddp_reduce_check(); AVG and PREMUL_SUM add */
    tddp_dtype dtype;
    size_t count; /* elements of each source and result */
    const void *const *sources;
    int source_count; /* at least 1 */
    /* Each gets the result. Each may be the memory of a different source; otherwise they do not
     * overlap. */
    void *const *results;
    int result_count;
    /* A factor for each source, applied first; NULL: none. Floating-point and complex dtypes. */
    const double *factors;
    double factor;  /* of the result, applied before rounding; 1: none */
    bool streaming; /* results are too large for the cache: stores may bypass it */
} tddp_arith_job;

/*
 * result = (sources[0]·factors[0] op sources[1]·factors[1] op ...) · factor. float16 and bfloat16
 * are computed in float32 and rounded once, to nearest even. No alignment beyond the dtype's own is
 * needed.
 */
void tddp_arith_reduce(const tddp_arith_job *job);

/* memcpy, with stores past the cache if `streaming`. Does nothing for 0 bytes. */
void tddp_arith_copy(void *into, const void *from, size_t bytes, bool streaming);

/* float16 or bfloat16 to float32 and back, rounded to nearest even; they do not overlap. */
void tddp_arith_widen(tddp_dtype half, float *into, const uint16_t *from, size_t count);
void tddp_arith_narrow(tddp_dtype half, uint16_t *into, const float *from, size_t count);

/* The chosen set: "avx512", "avx2", "baseline", "neon". Static. TDDP_ARITH=name overrides the
 * choice if the processor supports it. */
const char *tddp_arith_name(void);

#endif
