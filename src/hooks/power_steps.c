/*
 * PowerSGD's computation on a bucket, between its operations. Called by one thread of a reducer at
 * a time.
 *
 * Invariant: after an operation P and Q are equal on all ranks, and the products depend on them
 * alone, so they are equal too. If an element of M isn't finite on any rank, neither is P or Q on
 * all ranks: they all set the matrix to NaN and clear its error and its warm start.
 */
#include <math.h>
#include <string.h>

#include "hooks/power.h"

enum { CHUNK = 1024 }; /* elements on the stack */

typedef union chunk {
    float floats[CHUNK];
    double doubles[CHUNK];
} chunk;

static void *at(const tddp_power_plan *plan, void *array, size_t index)
{
    return (char *)array + index * plan->algebra->size;
}

/* The address of M. */
static void *matrix_at(const tddp_power_plan *plan, const tddp_bucket *bucket,
                       const tddp_power_matrix *matrix)
{
    return at(plan, plan->errors ? plan->errors : bucket->buffer.data, matrix->m);
}

/* Elements of a buffer in the computation's dtype: the buffer's own, or cast to `scratch`. */
static const void *view(const tddp_power_plan *plan, const tddp_buffer *buffer, size_t start,
                        size_t count, chunk *scratch)
{
    if (buffer->dtype == plan->algebra->dtype) {
        return tddp_hooks_at(buffer, start);
    }
    return tddp_hooks_floats(buffer, start, count, scratch->floats);
}

static void store(const tddp_power_plan *plan, const void *from, const tddp_buffer *buffer,
                  size_t start, size_t count)
{
    if (buffer->dtype == plan->algebra->dtype) {
        memcpy(tddp_hooks_at(buffer, start), from, count * plan->algebra->size);
    } else {
        tddp_hooks_store_floats(from, buffer, start, count);
    }
}

/* Cast P or Q to an operation's buffer and back. Nothing to do if they are the same memory. */
static void cast_to_sent(const tddp_power_plan *plan, void *array, const tddp_buffer *buffer,
                         size_t count)
{
    if (buffer->dtype != plan->algebra->dtype) {
        tddp_hooks_store_floats(array, buffer, 0, count);
    }
}

static void cast_from_sent(const tddp_power_plan *plan, const tddp_buffer *buffer, void *array,
                           size_t count)
{
    if (buffer->dtype != plan->algebra->dtype) {
        (void)tddp_hooks_floats(buffer, 0, count, array);
    }
}

/* --- before the first operation -------------------------------------------------------------- */

/* Computes M: adds the gradients to the errors. The zeros after the last piece stay zero. */
static void add_gradient(const tddp_power_sgd_opts *opts, const tddp_power_plan *plan,
                         const tddp_bucket *bucket, const tddp_power_matrix *matrix)
{
    const tddp_hooks_algebra *algebra = plan->algebra;
    chunk scratch;
    size_t done = matrix->m;
    for (size_t i = 0; i < matrix->piece_count; i++) {
        const tddp_power_piece *piece = &plan->pieces[matrix->piece + i];
        for (size_t k = 0; k < piece->count; k += CHUNK) {
            size_t count = tddp_hooks_min(CHUNK, piece->count - k);
            const void *from = view(plan, &bucket->buffer, piece->offset + k, count, &scratch);
            if (opts->error_feedback) {
                algebra->add(at(plan, plan->errors, done), from, count);
            } else {
                memcpy(at(plan, plan->errors, done), from, count * algebra->size);
            }
            done += count;
        }
    }
}

/* A random key that differs between iterations, buckets and matrices, and is equal on all ranks. */
static uint64_t key_of(const tddp_power_sgd_opts *opts, const tddp_bucket *bucket, size_t matrix)
{
    uint64_t key = tddp_hooks_mix(opts->seed, bucket->iteration);
    return tddp_hooks_mix(tddp_hooks_mix(key, bucket->index), matrix);
}

static void copy_uncompressed(const tddp_power_plan *plan, const tddp_bucket *bucket, bool back)
{
    size_t size = tddp_dtype_size(bucket->buffer.dtype);
    char *sent = tddp_hooks_at(&plan->first, plan->p_count);
    for (size_t i = plan->first_uncompressed; i < plan->piece_count; i++) {
        size_t bytes = plan->pieces[i].count * size;
        char *gradient = tddp_hooks_at(&bucket->buffer, plan->pieces[i].offset);
        memcpy(back ? gradient : sent, back ? sent : gradient, bytes);
        sent += bytes;
    }
}

void tddp_power_compute_p(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                          const tddp_bucket *bucket)
{
    const tddp_hooks_algebra *algebra = plan->algebra;
    for (size_t i = 0; i < plan->matrix_count; i++) {
        tddp_power_matrix *matrix = &plan->matrices[i];
        const tddp_hooks_shape *shape = &matrix->shape;
        void *q = at(plan, plan->q, matrix->q);
        uint64_t key = key_of(opts, bucket, i);
        if (!matrix->warm) {
            algebra->randomize(q, shape->cols, shape->rank, key);
        }
        algebra->orthonormalize(q, shape->cols, shape->rank, opts->orthogonalization_epsilon, &key);
        if (plan->errors) {
            add_gradient(opts, plan, bucket, matrix);
        }
        algebra->times(shape, matrix_at(plan, bucket, matrix), q, at(plan, plan->p, matrix->p));
        matrix->nonfinite = false;
    }
    cast_to_sent(plan, plan->p, &plan->first, plan->p_count);
    copy_uncompressed(plan, bucket, false);
}

/* --- between the operations ------------------------------------------------------------------ */

void tddp_power_compute_q(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                          const tddp_bucket *bucket)
{
    const tddp_hooks_algebra *algebra = plan->algebra;
    copy_uncompressed(plan, bucket, true);
    cast_from_sent(plan, &plan->first, plan->p, plan->p_count);
    for (size_t i = 0; i < plan->matrix_count; i++) {
        tddp_power_matrix *matrix = &plan->matrices[i];
        const tddp_hooks_shape *shape = &matrix->shape;
        void *p = at(plan, plan->p, matrix->p);
        void *q = at(plan, plan->q, matrix->q);
        if (!algebra->finite(p, shape->rows * shape->rank)) {
            matrix->nonfinite = true;
            algebra->fill(q, 0.0, shape->cols * shape->rank);
            continue;
        }
        algebra->orthonormalize(p, shape->rows, shape->rank, opts->orthogonalization_epsilon, NULL);
        algebra->transposed_times(shape, matrix_at(plan, bucket, matrix), p, q);
    }
    cast_to_sent(plan, plan->q, &plan->second, plan->q_count);
}

/* --- after the second operation -------------------------------------------------------------- */

/* A position among a matrix's elements in the bucket. */
typedef struct cursor {
    const tddp_power_piece *piece;
    size_t left; /* pieces, this one included */
    size_t done; /* elements of this piece */
} cursor;

/* Stores the next `count` elements in the bucket and subtracts them from the errors. */
static void store_values(const tddp_power_sgd_opts *opts, const tddp_power_plan *plan,
                         const tddp_bucket *bucket, cursor *to, chunk *values, size_t error,
                         size_t count)
{
    size_t stored = 0;
    while (stored < count && to->left > 0) {
        size_t part = tddp_hooks_min(count - stored, to->piece->count - to->done);
        size_t start = to->piece->offset + to->done;
        void *from = at(plan, values, stored);
        store(plan, from, &bucket->buffer, start, part);
        if (bucket->buffer.dtype != plan->algebra->dtype) {
            /* The error is relative to the rounded values in the bucket. */
            (void)tddp_hooks_floats(&bucket->buffer, start, part, from);
        }
        stored += part;
        to->done += part;
        if (to->done == to->piece->count) {
            *to = (cursor){to->piece + 1, to->left - 1, 0};
        }
    }
    if (opts->error_feedback) {
        plan->algebra->subtract(at(plan, plan->errors, error), values, count);
    }
}

/* Computes P Q^T several short rows at a time, or long rows in parts. */
static void store_product(const tddp_power_sgd_opts *opts, const tddp_power_plan *plan,
                          const tddp_bucket *bucket, const tddp_power_matrix *matrix)
{
    const tddp_hooks_shape *shape = &matrix->shape;
    const void *p = at(plan, plan->p, matrix->p);
    const void *q = at(plan, plan->q, matrix->q);
    chunk values;
    cursor to = {&plan->pieces[matrix->piece], matrix->piece_count, 0};
    size_t step = shape->cols < CHUNK ? CHUNK / shape->cols : 1;
    for (size_t row = 0; row < shape->rows; row += step) {
        size_t rows = tddp_hooks_min(step, shape->rows - row);
        for (size_t from = 0; from < shape->cols; from += CHUNK) {
            size_t width = tddp_hooks_min(CHUNK, shape->cols - from);
            for (size_t i = 0; i < rows; i++) {
                plan->algebra->row_of_product(shape, p, q, row + i, from, width,
                                              at(plan, &values, i * width));
            }
            size_t error = matrix->m + row * shape->cols + from;
            store_values(opts, plan, bucket, &to, &values, error, rows * width);
        }
    }
}

static void store_nan(const tddp_power_plan *plan, const tddp_bucket *bucket,
                      const tddp_power_matrix *matrix)
{
    chunk values;
    plan->algebra->fill(&values, (double)NAN, CHUNK);
    for (size_t i = 0; i < matrix->piece_count; i++) {
        const tddp_power_piece *piece = &plan->pieces[matrix->piece + i];
        for (size_t k = 0; k < piece->count; k += CHUNK) {
            store(plan, &values, &bucket->buffer, piece->offset + k,
                  tddp_hooks_min(CHUNK, piece->count - k));
        }
    }
    if (plan->errors) {
        plan->algebra->fill(at(plan, plan->errors, matrix->m), 0.0,
                            matrix->shape.rows * matrix->shape.cols);
    }
}

void tddp_power_decompress(const tddp_power_sgd_opts *opts, tddp_power_plan *plan,
                           const tddp_bucket *bucket)
{
    cast_from_sent(plan, &plan->second, plan->q, plan->q_count);
    for (size_t i = 0; i < plan->matrix_count; i++) {
        tddp_power_matrix *matrix = &plan->matrices[i];
        const tddp_hooks_shape *shape = &matrix->shape;
        const void *q = at(plan, plan->q, matrix->q);
        if (matrix->nonfinite || !plan->algebra->finite(q, shape->cols * shape->rank)) {
            store_nan(plan, bucket, matrix);
            matrix->warm = false;
        } else {
            store_product(opts, plan, bucket, matrix);
            matrix->warm = opts->warm_start;
        }
    }
}
