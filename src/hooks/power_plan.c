/*
 * Plans which gradients of a bucket PowerSGD compresses, and as which matrices, and allocates the
 * memory. Runs once for each bucket of a layout. Invariant: the plan depends on shapes and options
 * alone, which are equal on all ranks.
 */
#include <stdlib.h>

#include "hooks/power.h"

/* The smallest number whose square is at least `count`. */
static size_t square_side(size_t count)
{
    size_t side = 0;
    for (size_t bit = (size_t)1 << (sizeof(size_t) * 4 - 1); bit > 0; bit >>= 1) {
        size_t larger = side + bit;
        if (larger * larger < count) {
            side = larger;
        }
    }
    return count > 0 ? side + 1 : 0;
}

/* First dimension by the product of the others. Returns false if the gradient isn't compressed. */
static bool matrix_shape(const tddp_power_sgd_opts *opts, const tddp_flat_slice *gradient,
                         tddp_hooks_shape *out)
{
    if (gradient->ndim < 2 || gradient->count == 0 || gradient->dims[0] <= 0) {
        return false;
    }
    size_t rows = (size_t)gradient->dims[0];
    size_t cols = gradient->count / rows;
    size_t rank = tddp_hooks_min(tddp_hooks_min(rows, cols), (size_t)opts->rank);
    double compressed = ((double)rows + (double)cols) * (double)rank;
    *out = (tddp_hooks_shape){rows, cols, rank};
    return compressed * opts->min_compression_rate < (double)rows * (double)cols;
}

static void add_matrix(tddp_power_plan *plan, const tddp_hooks_shape *shape, size_t piece,
                       size_t piece_count)
{
    plan->matrices[plan->matrix_count++] = (tddp_power_matrix){.shape = *shape,
                                                               .m = plan->m_count,
                                                               .p = plan->p_count,
                                                               .q = plan->q_count,
                                                               .piece = piece,
                                                               .piece_count = piece_count};
    plan->m_count += shape->rows * shape->cols;
    plan->p_count += shape->rows * shape->rank;
    plan->q_count += shape->cols * shape->rank;
}

static void add_piece(tddp_power_plan *plan, const tddp_flat_slice *gradient)
{
    plan->pieces[plan->piece_count++] = (tddp_power_piece){gradient->offset, gradient->count};
}

/* One matrix for each compressed gradient; the uncompressed ones follow. */
static void plan_matrices(const tddp_power_sgd_opts *opts, const tddp_bucket *bucket,
                          tddp_power_plan *plan)
{
    tddp_hooks_shape shape;
    for (size_t i = 0; i < bucket->gradient_count; i++) {
        if (matrix_shape(opts, &bucket->gradients[i], &shape)) {
            add_matrix(plan, &shape, plan->piece_count, 1);
            add_piece(plan, &bucket->gradients[i]);
        }
    }
    plan->first_uncompressed = plan->piece_count;
    for (size_t i = 0; i < bucket->gradient_count; i++) {
        if (!matrix_shape(opts, &bucket->gradients[i], &shape)) {
            add_piece(plan, &bucket->gradients[i]);
            plan->uncompressed_count += bucket->gradients[i].count;
        }
    }
}

/* All gradients, concatenated and padded with zeros, as one square matrix. */
static void plan_square_matrix(const tddp_power_sgd_opts *opts, const tddp_bucket *bucket,
                               tddp_power_plan *plan)
{
    size_t total = 0;
    for (size_t i = 0; i < bucket->gradient_count; i++) {
        add_piece(plan, &bucket->gradients[i]);
        total += bucket->gradients[i].count;
    }
    plan->first_uncompressed = plan->piece_count;
    size_t side = square_side(total);
    if (side > 0) {
        tddp_hooks_shape shape = {side, side, tddp_hooks_min(side, (size_t)opts->rank)};
        add_matrix(plan, &shape, 0, plan->piece_count);
    }
}

/* M is the bucket's own memory. */
static void use_bucket_as_m(tddp_power_plan *plan)
{
    for (size_t i = 0; i < plan->matrix_count; i++) {
        plan->matrices[i].m = plan->pieces[plan->matrices[i].piece].offset;
    }
}

/* Allocates an operation's buffer. */
static tddp_status allocate_sent(tddp_group *group, size_t count, tddp_dtype dtype,
                                 tddp_group_memory **memory, tddp_buffer *out)
{
    size_t bytes = tddp_hooks_byte_count(count, tddp_dtype_size(dtype));
    tddp_status status = tddp_group_memory_create(group, bytes, memory);
    if (status == TDDP_OK) {
        *out = (tddp_buffer){tddp_group_memory_data(*memory), count, dtype, TDDP_CPU, 0, NULL};
    }
    return status;
}

static tddp_status allocate_memory(const tddp_power_sgd_opts *opts, tddp_group *group,
                                   const tddp_bucket *bucket, tddp_power_plan *plan)
{
    tddp_dtype dtype = bucket->buffer.dtype;
    size_t size = plan->algebra->size;
    bool same_dtype = dtype == plan->algebra->dtype;
    bool separate_m = opts->error_feedback || opts->batched || !same_dtype;
    tddp_status status = allocate_sent(group, plan->p_count + plan->uncompressed_count, dtype,
                                       &plan->sent[0], &plan->first);
    if (status == TDDP_OK) {
        status = allocate_sent(group, plan->q_count, dtype, &plan->sent[1], &plan->second);
    }
    if (status != TDDP_OK) {
        return status;
    }
    plan->memory[0] = plan->errors = separate_m ? tddp_alloc_array(plan->m_count, size) : NULL;
    plan->memory[1] = same_dtype ? NULL : tddp_alloc_array(plan->p_count, size);
    plan->memory[2] = same_dtype ? NULL : tddp_alloc_array(plan->q_count, size);
    plan->p = same_dtype ? plan->first.data : plan->memory[1];
    plan->q = same_dtype ? plan->second.data : plan->memory[2];
    if (!separate_m) {
        use_bucket_as_m(plan);
    }
    return plan->p && plan->q && (plan->errors || !separate_m) ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

void tddp_power_plan_free(void *data)
{
    tddp_power_plan *plan = data;
    for (size_t i = 0; i < sizeof plan->memory / sizeof *plan->memory; i++) {
        free(plan->memory[i]);
    }
    tddp_group_memory_release(plan->sent[0]);
    tddp_group_memory_release(plan->sent[1]);
    free(plan->matrices);
    free(plan->pieces);
    free(plan);
}

tddp_status tddp_power_plan_make(const tddp_power_sgd_opts *opts, tddp_group *group,
                                 const tddp_bucket *bucket, tddp_power_plan **out)
{
    tddp_power_plan *plan = tddp_alloc(sizeof *plan);
    if (!plan) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = TDDP_OUT_OF_MEMORY;
    plan->algebra = tddp_hooks_algebra_of(bucket->buffer.dtype);
    plan->matrices = tddp_alloc_array(bucket->gradient_count, sizeof *plan->matrices);
    plan->pieces = tddp_alloc_array(bucket->gradient_count, sizeof *plan->pieces);
    if (plan->matrices && plan->pieces) {
        if (opts->batched) {
            plan_square_matrix(opts, bucket, plan);
        } else {
            plan_matrices(opts, bucket, plan);
        }
        status = plan->matrix_count > 0 ? allocate_memory(opts, group, bucket, plan) : TDDP_OK;
    }
    if (status != TDDP_OK) {
        tddp_power_plan_free(plan);
        return status;
    }
    *out = plan;
    return TDDP_OK;
}
