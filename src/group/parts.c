/*
 * The pieces of an operation, one for each rank: copied from the caller or cut from one piece of
 * memory, so that backends always find them in the same form. Runs on the thread that queues.
 *
 * Invariant: a work's parts live and die with it, and its operation points to them.
 */
#include <stdlib.h>
#include <string.h>

#include "group/group.h"

static bool has_input_parts(const tddp_op *op, int rank)
{
    return op->kind == TDDP_OP_REDUCE_SCATTER || op->kind == TDDP_OP_ALL_TO_ALL ||
           (op->kind == TDDP_OP_SCATTER && op->root == rank);
}

static bool has_output_parts(const tddp_op *op, int rank)
{
    return op->kind == TDDP_OP_ALL_GATHER || op->kind == TDDP_OP_ALL_TO_ALL ||
           (op->kind == TDDP_OP_GATHER && op->root == rank);
}

/* Equal parts of one piece of memory. */
static void cut(const tddp_buffer *whole, tddp_buffer *parts, size_t world)
{
    size_t each = whole->count / world;
    size_t bytes = each * tddp_dtype_size(whole->dtype);
    for (size_t i = 0; i < world; i++) {
        parts[i] = *whole;
        parts[i].count = each;
        if (whole->data) {
            parts[i].data = (char *)whole->data + i * bytes;
        }
    }
}

/* What the parts are together: one piece of memory, or only a number of elements. */
static void join(const tddp_buffer *parts, tddp_buffer *whole, size_t world)
{
    size_t size = tddp_dtype_size(parts[0].dtype);
    const char *end = parts[0].data;
    bool adjoin = true;
    *whole = parts[0];
    whole->count = 0;
    for (size_t i = 0; i < world; i++) {
        adjoin = adjoin && parts[i].data == end;
        end += parts[i].count * size;
        whole->count += parts[i].count;
    }
    if (!adjoin) {
        whole->data = NULL;
    }
}

static void settle(const tddp_buffer **given, tddp_buffer *whole, tddp_buffer *parts, size_t world)
{
    if (*given) {
        memcpy(parts, *given, world * sizeof *parts);
        join(parts, whole, world);
    } else {
        cut(whole, parts, world);
    }
    *given = parts;
}

tddp_status tddp_group_work_parts(const tddp_group *group, tddp_work *work)
{
    tddp_op *op = &work->op;
    size_t world = (size_t)group->world_size;
    bool inputs = has_input_parts(op, group->rank);
    bool outputs = has_output_parts(op, group->rank);
    if (!inputs && !outputs) {
        return TDDP_OK;
    }
    work->parts = tddp_alloc_array(world * ((size_t)inputs + (size_t)outputs), sizeof *work->parts);
    if (!work->parts) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (inputs) {
        settle(&op->input_parts, &op->input, work->parts, world);
    }
    if (outputs) {
        settle(&op->output_parts, &op->output, work->parts + (inputs ? world : 0), world);
    }
    return TDDP_OK;
}
