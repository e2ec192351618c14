/*
 * Prepares a work: the operation's timeout and description, and its parts, one buffer for each
 * rank. Parts are copied from the caller's list or split from one buffer, so that backends always
 * find both forms. Runs on the thread that submits.
 *
 * Invariant: a work owns its parts, and its operation points to them.
 */
#include <string.h>

#include "group/group.h"

/* Splits a buffer into equal parts. */
static void split(const tddp_buffer *buffer, tddp_buffer *parts, size_t world)
{
    size_t each = buffer->count / world;
    size_t bytes = each * tddp_dtype_size(buffer->dtype);
    for (size_t i = 0; i < world; i++) {
        parts[i] = *buffer;
        parts[i].count = each;
        if (buffer->data) {
            parts[i].data = (char *)buffer->data + i * bytes;
        }
    }
}

/* Fills in `parts` or `*buffer`, whichever the caller left out. */
static void fill_in(const tddp_buffer **list, tddp_buffer *buffer, tddp_buffer *parts, size_t world)
{
    if (*list) {
        memcpy(parts, *list, world * sizeof *parts);
        *buffer = tddp_buffers_joined(parts, world);
    } else {
        split(buffer, parts, world);
    }
    *list = parts;
}

static tddp_status add_parts(const tddp_group *group, tddp_work *work)
{
    tddp_op *op = &work->op;
    size_t world = (size_t)group->world_size;
    const tddp_op_row *row = tddp_op_row_of(op->kind);
    const bool is_root = op->root == group->rank;
    const bool inputs = row->input == TDDP_SIDE_PARTS && (is_root || !row->roots_input);
    const bool outputs = row->output == TDDP_SIDE_PARTS && (is_root || !row->roots_output);
    if (!inputs && !outputs) {
        return TDDP_OK;
    }
    work->parts = tddp_alloc_array(world * ((size_t)inputs + (size_t)outputs), sizeof *work->parts);
    if (!work->parts) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (inputs) {
        fill_in(&op->input_parts, &op->input, work->parts, world);
    }
    if (outputs) {
        fill_in(&op->output_parts, &op->output, work->parts + (inputs ? world : 0), world);
    }
    return TDDP_OK;
}

tddp_status tddp_group_prepare(const tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                               tddp_work *work)
{
    tddp_group_work_init(work, op);
    work->op.timeout_ms = args->timeout_ms > 0
                              ? args->timeout_ms
                              : atomic_load_explicit(&group->timeout_ms, memory_order_relaxed);
    tddp_status status = tddp_group_describe_work(work, args->description);
    return status ? status : add_parts(group, work);
}
