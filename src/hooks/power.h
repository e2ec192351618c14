/*
 * What PowerSGD keeps for a bucket: which of its gradients are compressed, and the matrices.
 *
 *     first operation:    | P of each matrix | gradients that are not compressed |
 *     second operation:   | Q of each matrix |
 *     errors:             | M of each matrix: what the last round lost, then with the gradient |
 *
 * Operations carry the bucket's dtype. Where computing is done in another one, P and Q lie apart
 * from what is sent; else they are the same memory.
 */
#ifndef TDDP_REDUCER_HOOKS_POWER_H
#define TDDP_REDUCER_HOOKS_POWER_H

#include "hooks/hooks.h"
#include "hooks/matrix.h"

/* Elements of the bucket. */
typedef struct tddp_power_piece {
    size_t offset;
    size_t count;
} tddp_power_piece;

typedef struct tddp_power_matrix {
    tddp_hooks_shape shape;
    size_t m; /* where each begins: in errors, or the bucket if there are none; in P; in Q */
    size_t p;
    size_t q;
    size_t piece; /* its elements: so many pieces of the bucket one after the other, then zeros */
    size_t piece_count;
    bool warm;   /* Q is of a round before */
    bool broken; /* in this round, by numbers that are not finite */
} tddp_power_matrix;

typedef struct tddp_power_plan {
    const tddp_hooks_algebra *algebra;
    size_t matrix_count;
    tddp_power_matrix *matrices;
    tddp_power_piece *pieces; /* those of the matrices, then those that are not compressed */
    size_t piece_count;
    size_t first_plain; /* number of the first piece that is not compressed */
    size_t m_count;     /* elements in all */
    size_t p_count;
    size_t q_count;
    size_t plain_count;

    void *errors; /* NULL: M is the bucket */
    void *p;
    void *q;
    tddp_buffer first;  /* what the operations carry, in the group's memory */
    tddp_buffer second; /* of the bucket's dtype */
    tddp_group_memory *sent[2];
    void *memory[3]; /* what is not sent, to free */
} tddp_power_plan;

TDDP_NODISCARD tddp_status tddp_power_plan_make(const tddp_power_sgd_opts *opts, tddp_group *group,
                                                const tddp_bucket *bucket, tddp_power_plan **out);
void tddp_power_plan_free(void *plan);

/* --- power_steps.c: what is computed before, between and after the operations ---------------- */

/* M, Q and P of each matrix, and what is not compressed, into the first operation's memory. */
void tddp_power_begin(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                      const tddp_bucket *bucket);

/* After the first operation: the second one's Q; what is not compressed is in its place. */
void tddp_power_project(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                        const tddp_bucket *bucket);

/* After the second: the products are in their place, and what was lost is in `errors`. */
void tddp_power_end(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                    const tddp_bucket *bucket);

#endif
