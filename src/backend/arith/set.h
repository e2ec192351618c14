/*
 * The interface of a set: the kernels of one instruction set. All sets are compiled from the same
 * source (kernels.h) and give the same bits; choose.c selects one.
 */
#ifndef TDDP_ARITH_SET_H
#define TDDP_ARITH_SET_H

#include "backend/arith/arith.h"

enum {
    TDDP_ARITH_OPS = TDDP_REDUCE_PREMUL_SUM + 1,
    TDDP_ARITH_DTYPES = TDDP_BOOL + 1,
};

/* Combines `count` elements of the job's sources, from element `start` on, into other results than
 * the job's, if need be. Of sums of complex numbers each part is an element. */
typedef void (*tddp_arith_kernel)(const tddp_arith_job *job, size_t start, size_t count,
                                  void *const *results, int result_count);

typedef struct tddp_arith_set {
    const char *name;
    tddp_arith_kernel kernels[TDDP_ARITH_DTYPES][TDDP_ARITH_OPS]; /* NULL: not defined */
    void (*widen_float16)(float *into, const uint16_t *from, size_t count);
    void (*widen_bfloat16)(float *into, const uint16_t *from, size_t count);
    void (*narrow_float16)(uint16_t *into, const float *from, size_t count);
    void (*narrow_bfloat16)(uint16_t *into, const float *from, size_t count);
    /* Like memcpy, with stores past the cache, which a fence has to follow. */
    void (*stream)(void *into, const void *from, size_t bytes);
} tddp_arith_set;

extern const tddp_arith_set tddp_arith_baseline;
#ifdef __x86_64__
extern const tddp_arith_set tddp_arith_avx2;
extern const tddp_arith_set tddp_arith_avx512;
#endif

/* complex.c, for all sets. */
void tddp_arith_complex64_product(const tddp_arith_job *job, size_t start, size_t count,
                                  void *const *results, int result_count);
void tddp_arith_complex128_product(const tddp_arith_job *job, size_t start, size_t count,
                                   void *const *results, int result_count);

/* The set in use. */
const tddp_arith_set *tddp_arith_chosen(void);

/* The best set that works here if `name` is NULL, else that one: NULL if it is unknown or the
 * processor lacks it. */
const tddp_arith_set *tddp_arith_find(const char *name);

/* tddp_arith_reduce() and tddp_arith_copy() with a given set. */
void tddp_arith_reduce_by(const tddp_arith_set *set, const tddp_arith_job *job);
void tddp_arith_copy_by(const tddp_arith_set *set, void *into, const void *from, size_t bytes,
                        bool streaming);

#endif
