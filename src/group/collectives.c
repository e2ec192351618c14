/*
 * The collectives on one buffer, and those with equal parts: they check the arguments, then submit
 * the operation. Called by entry_points.c; any thread.
 */
#include <stdint.h>

#include "group/checks.h"

/* Checks a pair of buffers of which `large` is world_size times `small`. */
static tddp_status check_pair(const tddp_group *group, tddp_op_kind kind, const tddp_buffer *input,
                              const tddp_buffer *output)
{
    const char *op = tddp_op_name(kind);
    tddp_status status = tddp_group_check_buffer(group, kind, "input", input);
    if (status == TDDP_OK) {
        status = tddp_group_check_buffer(group, kind, "output", output);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_same_type(kind, "input", input, "output", output);
    }
    if (status) {
        return status;
    }
    bool gathers = kind == TDDP_OP_ALL_GATHER;
    const tddp_buffer *small = gathers ? input : output;
    const tddp_buffer *large = gathers ? output : input;
    size_t world = (size_t)group->world_size;
    if (large->count % world != 0 || large->count / world != small->count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: %s has %zu elements, %s %zu: expected %d times as many", op,
                         gathers ? "input" : "output", small->count, gathers ? "output" : "input",
                         large->count, group->world_size);
    }
    /* The one valid overlap: the small buffer as this rank's part of the large one. */
    size_t offset = (size_t)group->rank * small->count * tddp_dtype_size(small->dtype);
    if (tddp_group_overlap(small, large) &&
        (uintptr_t)small->data != (uintptr_t)large->data + offset) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: input and output overlap: only part %d of %s may be %s", op,
                         group->rank, gathers ? "output" : "input", gathers ? "input" : "output");
    }
    return TDDP_OK;
}

tddp_status tddp_group_all_reduce(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_status status = tddp_group_check_buffer(group, args->kind, "buffer", &args->output);
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, args->reduce, &args->output);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = args->kind,
                      .input = args->output,
                      .output = args->output,
                      .reduce = args->reduce,
                      .premul = args->premul};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_reduce(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_status status = tddp_group_check_buffer(group, args->kind, "buffer", &args->output);
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, args->reduce, &args->output);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_root(group, args->kind, args->root);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = args->kind,
                      .input = args->output,
                      .output = args->output,
                      .reduce = args->reduce,
                      .premul = args->premul,
                      .root = args->root};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_broadcast(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_status status = tddp_group_check_buffer(group, args->kind, "buffer", &args->output);
    if (status == TDDP_OK) {
        status = tddp_group_check_root(group, args->kind, args->root);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {
        .kind = args->kind, .input = args->output, .output = args->output, .root = args->root};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_barrier(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_op wanted = {.kind = args->kind};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_all_gather(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_status status = check_pair(group, args->kind, &args->input, &args->output);
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = args->kind, .input = args->input, .output = args->output};
    return tddp_group_submit(group, &wanted, args, work);
}

tddp_status tddp_group_reduce_scatter(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    tddp_status status = check_pair(group, args->kind, &args->input, &args->output);
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, args->reduce, &args->input);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = args->kind,
                      .input = args->input,
                      .output = args->output,
                      .reduce = args->reduce,
                      .premul = args->premul};
    return tddp_group_submit(group, &wanted, args, work);
}
