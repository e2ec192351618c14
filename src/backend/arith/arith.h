/*
 * The arithmetic of collectives over any number of sources, with vector code chosen at run time
 * (tddp_combine() and tddp_scale() of <tddp/backend.h> are made of it). Pure functions, any thread.
 *
 * The same bits whatever the instructions: sources are combined in their order, element by element,
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
    /* Each gets the result. They may be the very memory of sources, each of another one; otherwise
     * they do not overlap. */
    void *const *results;
    int result_count;
    /* One for each source, by which it is multiplied first; NULL: none. Floating and complex. */
    const double *factors;
    double factor;  /* on the result, before it is rounded; 1 for none */
    bool streaming; /* results are too large to stay in the cache: they may be written past it */
} tddp_arith_job;

/*
 * result = (sources[0]·factors[0] op sources[1]·factors[1] op ...) · factor. float16 and bfloat16
 * are computed in float32 and rounded once, to nearest even. No alignment beyond the dtype's own is
 * needed.
 */
void tddp_arith_reduce(const tddp_arith_job *job);

/* memcpy, past the cache if `streaming`. Nothing happens for 0 bytes. */
void tddp_arith_copy(void *into, const void *from, size_t bytes, bool streaming);

/* float16 or bfloat16 to float32 and back, rounded to nearest even; they do not overlap. */
void tddp_arith_widen(tddp_dtype half, float *into, const uint16_t *from, size_t count);
void tddp_arith_narrow(tddp_dtype half, uint16_t *into, const float *from, size_t count);

/* What was chosen: "avx512", "avx2", "baseline", "neon". Static. TDDP_ARITH=name overrides it where
 * the processor has it. */
const char *tddp_arith_name(void);

#endif
