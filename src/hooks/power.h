/*
 * PowerSGD's state of a bucket: which gradients are compressed, and the matrices.
 *
 *     first operation:    | P of each matrix | uncompressed gradients |
 *     second operation:   | Q of each matrix |
 *     errors:             | M of each matrix: the last iteration's error, then plus the gradient |
 *
 * The operations use the bucket's dtype. If the computation uses another one, P and Q have memory
 * besides the operations' buffers; else they are the same memory.
 */
#ifndef TDDP_HOOKS_POWER_H
#define TDDP_HOOKS_POWER_H

#include "hooks/hooks.h"
#include "hooks/matrix.h"

/* A range of the bucket's elements. */
typedef struct tddp_power_piece {
    size_t offset;
    size_t count;
} tddp_power_piece;

typedef struct tddp_power_matrix {
    tddp_hooks_shape shape;
    size_t m;     /* offset in `errors`, or in the bucket without `errors` */
    size_t p;     /* offset in P */
    size_t q;     /* offset in Q */
    size_t piece; /* its elements are these pieces of the bucket, concatenated, then zeros */
    size_t piece_count;
    bool warm;      /* Q is the last iteration's */
    bool nonfinite; /* it isn't finite in this iteration */
} tddp_power_matrix;

typedef struct tddp_power_plan {
    const tddp_hooks_algebra *algebra;
    size_t matrix_count;
    tddp_power_matrix *matrices;
    tddp_power_piece *pieces; /* the matrices', then the uncompressed ones */
    size_t piece_count;
    size_t first_uncompressed; /* index of the first uncompressed piece */
    size_t m_count;            /* elements of all matrices */
    size_t p_count;
    size_t q_count;
    size_t uncompressed_count;

    void *errors; /* NULL: M is the bucket */
    void *p;
    void *q;
    tddp_buffer first; /* the operations' buffers: the bucket's dtype, in the group's memory */
    tddp_buffer second;
    tddp_group_memory *sent[2];
    void *memory[3]; /* the other allocations */
} tddp_power_plan;

TDDP_NODISCARD tddp_status tddp_power_plan_make(const tddp_power_sgd_opts *opts, tddp_group *group,
                                                const tddp_bucket *bucket, tddp_power_plan **out);
void tddp_power_plan_free(void *plan);

/* --- power_steps.c: the computation before, between and after the operations ----------------- */

/* Before the first operation: computes M, Q and P of each matrix, and fills the first buffer. */
void tddp_power_compute_p(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                          const tddp_bucket *bucket);

/* After the first operation: orthonormalizes P, computes Q, fills the second buffer, and copies the
 * uncompressed gradients back. */
void tddp_power_compute_q(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                          const tddp_bucket *bucket);

/* After the second operation: stores the products P Q^T in the bucket, the error in `errors`. */
void tddp_power_decompress(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                           const tddp_bucket *bucket);

#endif
