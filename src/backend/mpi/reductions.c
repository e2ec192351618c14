/*
 * all_reduce, reduce and reduce_scatter. Large buffers take several calls, since MPI counts in
 * ints.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/mpi/mpi.h"

/* From so many on MPI's blocking calls are faster, though they take a thread. */
enum { BLOCKING_BYTES = 256 * 1024 };

static bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* Means of small floats are of scaled numbers, since the sum may not fit. */
static double factor_before(const tddp_mpi *self, const tddp_op *op)
{
    if (op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        return op->premul;
    }
    return op->reduce == TDDP_REDUCE_AVG && is_half(op->output.dtype) ? 1.0 / self->size : 1.0;
}

static double factor_after(const tddp_mpi *self, const tddp_op *op)
{
    return op->reduce == TDDP_REDUCE_AVG && !is_half(op->output.dtype) ? 1.0 / self->size : 1.0;
}

static void scale(tddp_dtype dtype, void *data, size_t count, double factor)
{
    if (factor != 1.0) {
        tddp_scale(dtype, data, count, factor);
    }
}

static tddp_status reduce_piece(const tddp_mpi_limits *limits, const tddp_mpi_piece *it,
                                size_t element)
{
    const MPI_Comm comm = limits->group->collectives;
    if ((size_t)it->count * element >= BLOCKING_BYTES) {
        return tddp_mpi_reduce_blocking(limits, it);
    }
    MPI_Request request;
    int code = it->root < 0 ? MPI_Iallreduce(it->from, it->into, it->count, it->how.type,
                                             it->how.op, comm, &request)
                            : MPI_Ireduce(it->from, it->into, it->count, it->how.type, it->how.op,
                                          it->root, comm, &request);
    return tddp_mpi_wait(limits, code, &request, 1, it->root < 0 ? "all_reduce" : "reduce");
}

/* One call for each piece that an int can count; `root` < 0: for all ranks. */
static tddp_status reduce_pieces(const tddp_mpi_limits *limits, const tddp_mpi_reduction *how,
                                 const void *from, char *into, size_t count, size_t element,
                                 int root)
{
    tddp_status status = TDDP_OK;
    for (size_t at = 0; at < count && status == TDDP_OK; at += TDDP_MPI_MOST) {
        const tddp_mpi_piece piece = {
            .from = from == MPI_IN_PLACE ? from : (const char *)from + at * element,
            .into = into ? into + at * element : NULL,
            .count = (int)(count - at < TDDP_MPI_MOST ? count - at : TDDP_MPI_MOST),
            .how = *how,
            .root = root};
        status = reduce_piece(limits, &piece, element);
    }
    return status;
}

static tddp_status all_reduce(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits,
                              const tddp_mpi_reduction *how)
{
    const tddp_buffer *all = &op->output;
    scale(all->dtype, all->data, all->count, factor_before(self, op));
    const size_t element = tddp_dtype_size(all->dtype);
    tddp_status status =
        reduce_pieces(limits, how, MPI_IN_PLACE, all->data, all->count, element, -1);
    if (status == TDDP_OK) {
        scale(all->dtype, all->data, all->count, factor_after(self, op));
    }
    return status;
}

void tddp_mpi_carry(const tddp_mpi *self, const tddp_op *op, tddp_mpi_comparison *out)
{
    const tddp_buffer *all = &op->output;
    const size_t bytes = all->count * tddp_dtype_size(all->dtype);
    out->carried = 0;
    if (op->kind == TDDP_OP_ALL_REDUCE && bytes > 0 && bytes <= TDDP_MPI_CARRIED &&
        tddp_reduce_check(op->reduce, all->dtype) == TDDP_OK) {
        out->carried = all->count;
        out->dtype = all->dtype;
        out->reduce = op->reduce;
        memcpy(out->data, all->data, bytes);
        scale(all->dtype, out->data, all->count, factor_before(self, op));
    }
}

void tddp_mpi_take_carried(const tddp_mpi *self, const tddp_op *op)
{
    const tddp_buffer *all = &op->output;
    memcpy(all->data, self->all.data, all->count * tddp_dtype_size(all->dtype));
    scale(all->dtype, all->data, all->count, factor_after(self, op));
}

/* A copy of `count` elements that are multiplied; NULL: out of memory. */
static void *scaled_copy(tddp_dtype dtype, const void *data, size_t count, double factor)
{
    void *copy = malloc(count * tddp_dtype_size(dtype) + 1);
    if (copy && count > 0) {
        memcpy(copy, data, count * tddp_dtype_size(dtype));
        scale(dtype, copy, count, factor);
    }
    return copy;
}

/* What MPI has not ended with may still be read or written: it is never freed. */
static void release(void *memory)
{
    if (!tddp_mpi_given_up()) {
        free(memory);
    }
}

static tddp_status reduce(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits,
                          const tddp_mpi_reduction *how)
{
    const tddp_buffer *all = &op->output;
    const size_t element = tddp_dtype_size(all->dtype);
    const double factor = factor_before(self, op);
    if (self->rank == op->root) {
        scale(all->dtype, all->data, all->count, factor);
        tddp_status status =
            reduce_pieces(limits, how, MPI_IN_PLACE, all->data, all->count, element, op->root);
        if (status == TDDP_OK) {
            scale(all->dtype, all->data, all->count, factor_after(self, op));
        }
        return status;
    }
    if (factor == 1.0) {
        return reduce_pieces(limits, how, op->input.data, NULL, all->count, element, op->root);
    }
    void *scaled = scaled_copy(all->dtype, op->input.data, all->count, factor);
    if (!scaled) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %zu bytes", all->count * element);
    }
    tddp_status status = reduce_pieces(limits, how, scaled, NULL, all->count, element, op->root);
    release(scaled);
    return status;
}

/* --- reduce_scatter -------------------------------------------------------------------------- */

static bool parts_are_equal(const tddp_mpi *self, const tddp_buffer *parts)
{
    for (int rank = 1; rank < self->size; rank++) {
        if (parts[rank].count != parts[0].count) {
            return false;
        }
    }
    return true;
}

/* All parts end to end, multiplied: MPI does not allow the output to lie within them. */
static tddp_status pack(const tddp_mpi *self, const tddp_op *op, char **out)
{
    const size_t element = tddp_dtype_size(op->output.dtype);
    char *packed = malloc(op->input.count * element + 1);
    if (!packed) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %zu bytes", op->input.count * element);
    }
    char *at = packed;
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_buffer *part = &op->input_parts[rank];
        if (part->count > 0) {
            memcpy(at, part->data, part->count * element);
        }
        at += part->count * element;
    }
    scale(op->output.dtype, packed, op->input.count, factor_before(self, op));
    *out = packed;
    return TDDP_OK;
}

static bool output_is_within(const tddp_op *op)
{
    const char *start = op->input.data;
    const char *output = op->output.data;
    return output >= start && output < start + op->input.count * tddp_dtype_size(op->input.dtype);
}

static tddp_status scatter_parts(const tddp_mpi_limits *limits, const tddp_op *op,
                                 const tddp_mpi_reduction *how, char *parts)
{
    tddp_mpi *self = limits->group;
    const size_t element = tddp_dtype_size(op->output.dtype);
    if (parts_are_equal(self, op->input_parts) && op->output.count <= TDDP_MPI_MOST) {
        MPI_Request request;
        int code = MPI_Ireduce_scatter_block(parts, op->output.data, (int)op->output.count,
                                             how->type, how->op, self->collectives, &request);
        return tddp_mpi_wait(limits, code, &request, 1, "reduce_scatter");
    }
    tddp_status status = TDDP_OK;
    for (int root = 0; root < self->size && status == TDDP_OK; root++) {
        const size_t count = op->input_parts[root].count;
        char *into = root == self->rank ? op->output.data : NULL;
        status = reduce_pieces(limits, how, parts, into, count, element, root);
        parts += count * element;
    }
    return status;
}

static tddp_status reduce_scatter(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits,
                                  const tddp_mpi_reduction *how)
{
    char *packed = NULL;
    if (!op->input.data || factor_before(self, op) != 1.0 || output_is_within(op)) {
        tddp_status status = pack(self, op, &packed);
        if (status) {
            return status;
        }
    }
    tddp_status status = scatter_parts(limits, op, how, packed ? packed : op->input.data);
    release(packed);
    if (status == TDDP_OK) {
        scale(op->output.dtype, op->output.data, op->output.count, factor_after(self, op));
    }
    return status;
}

tddp_status tddp_mpi_reduce(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    tddp_mpi_reduction how;
    tddp_status status = tddp_mpi_reduction_of(op->output.dtype, op->reduce, &how);
    if (status) {
        return status;
    }
    switch (op->kind) {
    case TDDP_OP_ALL_REDUCE:
        return all_reduce(self, op, limits, &how);
    case TDDP_OP_REDUCE:
        return reduce(self, op, limits, &how);
    default:
        return reduce_scatter(self, op, limits, &how);
    }
}
