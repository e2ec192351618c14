/*
 * The collectives with a buffer for each rank, which may differ in size: arguments are checked,
 * then the operation is queued; prepare.c copies the lists. Called by entry_points.c; any thread.
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

tddp_status tddp_group_all_gather_list(tddp_group *group, const tddp_op_args *args,
                                       tddp_work **work)
{
    const tddp_op_kind kind = args->kind;
    tddp_status status = check_lists(group, kind, "input", &args->input, "outputs", args->outputs,
                                     args->output_count);
    if (status == TDDP_OK) {
        status = tddp_group_check_disjoint(kind, "outputs", args->outputs, args->output_count);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind, .input = args->input, .output_parts = args->outputs};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_gather(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    const tddp_op_kind kind = args->kind;
    const tddp_buffer *outputs = args->outputs;
    size_t count = args->output_count;
    tddp_status status = tddp_group_check_root(group, kind, args->root);
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind,
                      .input = args->input,
                      .output = nothing_like(args->input),
                      .root = args->root};
    if (args->root == group->rank) {
        status = check_lists(group, kind, "input", &args->input, "outputs", outputs, count);
        if (status == TDDP_OK) {
            status = tddp_group_check_disjoint(kind, "outputs", outputs, count);
        }
        wanted.output_parts = outputs;
    } else {
        status = tddp_group_check_buffer(group, kind, "input", &args->input);
        if (status == TDDP_OK) {
            status = check_no_parts(group, kind, "outputs", outputs, count, args->root);
        }
    }
    return status ? status : tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_scatter(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    const tddp_op_kind kind = args->kind;
    const tddp_buffer *inputs = args->inputs;
    size_t count = args->input_count;
    tddp_status status = tddp_group_check_root(group, kind, args->root);
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind,
                      .input = nothing_like(args->output),
                      .output = args->output,
                      .root = args->root};
    if (args->root == group->rank) {
        status = check_lists(group, kind, "output", &args->output, "inputs", inputs, count);
        wanted.input_parts = inputs;
    } else {
        status = tddp_group_check_buffer(group, kind, "output", &args->output);
        if (status == TDDP_OK) {
            status = check_no_parts(group, kind, "inputs", inputs, count, args->root);
        }
    }
    return status ? status : tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_reduce_scatter_list(tddp_group *group, const tddp_op_args *args,
                                           tddp_work **work)
{
    tddp_status status = check_lists(group, args->kind, "output", &args->output, "inputs",
                                     args->inputs, args->input_count);
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, args->reduce, &args->output);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = args->kind,
                      .output = args->output,
                      .input_parts = args->inputs,
                      .reduce = args->reduce,
                      .premul = args->premul};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_all_to_all(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    const tddp_op_kind kind = args->kind;
    tddp_status status =
        tddp_group_check_parts(group, kind, "inputs", args->inputs, args->input_count);
    if (status == TDDP_OK) {
        status = tddp_group_check_parts(group, kind, "outputs", args->outputs, args->output_count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_disjoint(kind, "outputs", args->outputs, args->output_count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_exchange(group, kind, args->inputs, args->outputs);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = kind, .input_parts = args->inputs, .output_parts = args->outputs};
    return tddp_group_submit(group, &wanted, args, work);
}
