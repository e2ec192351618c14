/*
 * The linear algebra of PowerSGD, in float32 and float64. A matrix M is stored in row-major order;
 * the narrow ones, P of rows x rank and Q of cols x rank, in column-major order. Pure functions,
 * any thread; results are bitwise reproducible.
 */
#ifndef TDDP_HOOKS_MATRIX_H
#define TDDP_HOOKS_MATRIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tddp/buffer.h>

typedef struct tddp_hooks_shape {
    size_t rows;
    size_t cols;
    size_t rank;
} tddp_hooks_shape;

/* Arrays are of `dtype`, float or double, whose size is `size`. */
typedef struct tddp_hooks_algebra {
    tddp_dtype dtype;
    size_t size;

    /* P = M Q; Q = M^T P. */
    void (*times)(const tddp_hooks_shape *shape, const void *m, const void *q, void *p);
    void (*transposed_times)(const tddp_hooks_shape *shape, const void *m, const void *p, void *q);

    /* Elements [from, from + width) of row `row` of P Q^T. */
    void (*row_of_product)(const tddp_hooks_shape *shape, const void *p, const void *q, size_t row,
                           size_t from, size_t width, void *out);

    /* Makes columns orthogonal, with norm 1, or norm / (norm + epsilon). A linearly dependent
     * column becomes random by `key`, or zero if `key` is NULL. */
    void (*orthonormalize)(void *columns, size_t length, size_t count, double epsilon,
                           const uint64_t *key);
    void (*randomize)(void *columns, size_t length, size_t count, uint64_t key);

    void (*add)(void *into, const void *from, size_t count);
    void (*subtract)(void *from, const void *what, size_t count);
    void (*fill)(void *array, double value, size_t count);
    bool (*finite)(const void *array, size_t count);
} tddp_hooks_algebra;

/* The algebra for buckets of a dtype: float64 for float64, else float32. Static. */
const tddp_hooks_algebra *tddp_hooks_algebra_of(tddp_dtype dtype);

/* A hash of both numbers. */
uint64_t tddp_hooks_mix(uint64_t key, uint64_t more);

#endif
