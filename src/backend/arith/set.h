/*
 * The interface of a set: the loops of one instruction set. All sets are compiled from the same
 * source (loops.h) and give the same bits; choose.c selects one.
 */
#ifndef TDDP_ARITH_SET_H
#define TDDP_ARITH_SET_H

#include <stdbool.h>

#include "backend/arith/arith.h"

enum {
    TDDP_ARITH_OPS = TDDP_REDUCE_PREMUL_SUM + 1,
    TDDP_ARITH_DTYPES = TDDP_BOOL + 1,
};

/* into[i] = a[i] op b[i]; `into` may be `a` or `b`. */
typedef void (*tddp_arith_combine)(void *into, const void *a, const void *b, size_t count);

/* into[i] = from[i] · factor; `into` may be `from`. Of complex numbers each part is an element. */
typedef void (*tddp_arith_scale)(void *into, const void *from, size_t count, double factor);

/* Runs a whole job that is a sum of `count` real numbers each, without factors on the sources.
 * If `streaming`: at most two results, with the same distance to a multiple of vector_bytes. */
typedef void (*tddp_arith_sum)(const tddp_arith_job *job, size_t count, bool streaming);

typedef struct tddp_arith_set {
    const char *name;
    bool (*works)(void); /* whether processor and system support it */
    size_t vector_bytes;
    /* NULL for float16 and bfloat16, which are computed in float32. */
    tddp_arith_combine combine[TDDP_ARITH_DTYPES][TDDP_ARITH_OPS];
    tddp_arith_sum sum[TDDP_ARITH_DTYPES]; /* NULL: combine is used */
    tddp_arith_scale scale_float32;
    tddp_arith_scale scale_float64;
    void (*widen_float16)(float *into, const uint16_t *from, size_t count);
    void (*widen_bfloat16)(float *into, const uint16_t *from, size_t count);
    void (*narrow_float16)(uint16_t *into, const float *from, size_t count);
    void (*narrow_bfloat16)(uint16_t *into, const float *from, size_t count);
    /* Like memcpy, with stores past the cache; other processors see them after the set's
     * fence(). */
    void (*stream)(void *into, const void *from, size_t bytes);
    void (*fence)(void);
} tddp_arith_set;

extern const tddp_arith_set tddp_arith_baseline;
#ifdef __x86_64__
extern const tddp_arith_set tddp_arith_avx2;
extern const tddp_arith_set tddp_arith_avx512;
#endif

/* complex.c, for all sets. */
void tddp_arith_complex64_product(void *into, const void *a, const void *b, size_t count);
void tddp_arith_complex128_product(void *into, const void *a, const void *b, size_t count);

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
