/*
 * The collectives with a buffer for each rank, which may differ in size: arguments are checked,
 * then the operation is queued; parts.c copies the lists. Any thread.
 *
 * What cannot be seen here, whether the other rank's part has the size of ours, the backend finds
 * out with the operation.
 */
#include "group/checks.h"

/* Parts exist at the root alone: on other ranks the list says so by its absence. */
static tddp_status check_no_parts(const tddp_group *group, tddp_op_kind kind, const char *name,
                                  const tddp_buffer *parts, size_t count, int root)
{
    if (parts || count > 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: %s given on rank %d, root is %d: expected NULL and 0 there",
                         tddp_op_name(kind), name, group->rank, root);
    }
    return TDDP_OK;
}

/* No elements, but of the right dtype and place. */
static tddp_buffer nothing_like(tddp_buffer buffer)
{
    buffer.data = NULL;
    buffer.count = 0;
    return buffer;
}

/* The checks of an operation that has one piece on this rank, and a part for every rank. */
static tddp_status check_lists(const tddp_group *group, tddp_op_kind kind, const char *piece_name,
                               const tddp_buffer *piece, const char *parts_name,
                               const tddp_buffer *parts, size_t count)
{
    tddp_status status = tddp_group_check_buffer(group, kind, piece_name, piece);
    if (status == TDDP_OK) {
        status = tddp_group_check_parts(group, kind, parts_name, parts, count);
    }
    if (status == TDDP_OK) {
        status =
            tddp_group_check_piece(group, kind, piece_name, piece, parts_name, parts, group->rank);
    }
    return status;
}

tddp_status tddp_all_gather_list(tddp_group *group, tddp_buffer input, const tddp_buffer *outputs,
                                 size_t count, tddp_work **work)
{
    const tddp_op_kind kind = TDDP_OP_ALL_GATHER;
    tddp_status status = tddp_group_begin(group, kind);
    if (status == TDDP_OK) {
        status = check_lists(group, kind, "input", &input, "outputs", outputs, count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_apart(kind, "outputs", outputs, count);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind, .input = input, .output_parts = outputs};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_gather(tddp_group *group, tddp_buffer input, const tddp_buffer *outputs,
                        size_t count, int root, tddp_work **work)
{
    const tddp_op_kind kind = TDDP_OP_GATHER;
    tddp_status status = tddp_group_begin(group, kind);
    if (status == TDDP_OK) {
        status = tddp_group_check_root(group, kind, root);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind, .input = input, .output = nothing_like(input), .root = root};
    if (root == group->rank) {
        status = check_lists(group, kind, "input", &input, "outputs", outputs, count);
        if (status == TDDP_OK) {
            status = tddp_group_check_apart(kind, "outputs", outputs, count);
        }
        wanted.output_parts = outputs;
    } else {
        status = tddp_group_check_buffer(group, kind, "input", &input);
        if (status == TDDP_OK) {
            status = check_no_parts(group, kind, "outputs", outputs, count, root);
        }
    }
    return status ? status : tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_scatter(tddp_group *group, tddp_buffer output, const tddp_buffer *inputs,
                         size_t count, int root, tddp_work **work)
{
    const tddp_op_kind kind = TDDP_OP_SCATTER;
    tddp_status status = tddp_group_begin(group, kind);
    if (status == TDDP_OK) {
        status = tddp_group_check_root(group, kind, root);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind, .input = nothing_like(output), .output = output, .root = root};
    if (root == group->rank) {
        status = check_lists(group, kind, "output", &output, "inputs", inputs, count);
        wanted.input_parts = inputs;
    } else {
        status = tddp_group_check_buffer(group, kind, "output", &output);
        if (status == TDDP_OK) {
            status = check_no_parts(group, kind, "inputs", inputs, count, root);
        }
    }
    return status ? status : tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_reduce_scatter_list(tddp_group *group, const tddp_buffer *inputs, size_t count,
                                     tddp_buffer output, tddp_reduce_op op, double premul,
                                     tddp_work **work)
{
    const tddp_op_kind kind = TDDP_OP_REDUCE_SCATTER;
    tddp_status status = tddp_group_begin(group, kind);
    if (status == TDDP_OK) {
        status = check_lists(group, kind, "output", &output, "inputs", inputs, count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, op, &output);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {
        .kind = kind, .output = output, .input_parts = inputs, .reduce = op, .premul = premul};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_all_to_all(tddp_group *group, const tddp_buffer *inputs,
                            const tddp_buffer *outputs, size_t count, tddp_work **work)
{
    const tddp_op_kind kind = TDDP_OP_ALL_TO_ALL;
    tddp_status status = tddp_group_begin(group, kind);
    if (status == TDDP_OK) {
        status = tddp_group_check_parts(group, kind, "inputs", inputs, count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_parts(group, kind, "outputs", outputs, count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_apart(kind, "outputs", outputs, count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_exchange(group, kind, inputs, outputs);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind, .input_parts = inputs, .output_parts = outputs};
    return tddp_group_submit(group, &wanted, work);
}
