/*
 * A fresh work and the pieces of its operation, one for each rank: copied from the caller or cut
 * from one piece of memory, so that backends always find them in the same form. Runs on the thread
 * that queues.
 *
 * Invariant: a work's parts live and die with it, and its operation points to them.
 */
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

void tddp_group_merge_buffers(const tddp_buffer *parts, size_t count, tddp_buffer *whole)
{
    size_t size = tddp_dtype_size(parts[0].dtype);
    bool adjoin = true;
    *whole = parts[0];
    whole->data = NULL;
    whole->count = 0;
    for (size_t i = 0; i < count; i++) {
        if (parts[i].count == 0) {
            continue; /* may lie anywhere */
        }
        if (whole->count == 0) {
            whole->data = parts[i].data;
        }
        adjoin = adjoin && parts[i].data == (char *)whole->data + whole->count * size;
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
        tddp_group_merge_buffers(parts, world, whole);
    } else {
        cut(whole, parts, world);
    }
    *given = parts;
}

static tddp_status add_parts(const tddp_group *group, tddp_work *work)
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

/* What a fresh work's operation has beside the caller's arguments. */
static tddp_status complete(const tddp_group *group, const tddp_op_args *args, tddp_work *work)
{
    work->op.timeout_ms = args->timeout_ms > 0
                              ? args->timeout_ms
                              : atomic_load_explicit(&group->timeout_ms, memory_order_relaxed);
    tddp_status status = tddp_group_describe_work(work, args->description);
    return status ? status : add_parts(group, work);
}

tddp_status tddp_group_prepare(const tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                               tddp_work **out)
{
    tddp_work *work;
    tddp_status status = tddp_group_work_create(op, &work);
    if (status) {
        return status;
    }
    status = complete(group, args, work);
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    *out = work;
    return TDDP_OK;
}

tddp_status tddp_group_prepare_here(const tddp_group *group, const tddp_op *op,
                                    const tddp_op_args *args, tddp_work *work)
{
    tddp_group_work_init(work, op);
    return complete(group, args, work);
}
