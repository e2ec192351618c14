/*
 * The collectives on one piece of memory, and those whose parts are equal: arguments are checked,
 * then the operation is queued. Any thread.
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
        status = tddp_group_check_alike(kind, "input", input, "output", output);
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
    /* The one overlap that makes sense: this rank's own part of the larger buffer. */
    size_t own = (size_t)group->rank * small->count * tddp_dtype_size(small->dtype);
    if (tddp_group_overlap(small, large) &&
        (uintptr_t)small->data != (uintptr_t)large->data + own) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: input and output overlap: only part %d of %s may be %s", op,
                         group->rank, gathers ? "output" : "input", gathers ? "input" : "output");
    }
    return TDDP_OK;
}

tddp_status tddp_all_reduce(tddp_group *group, tddp_buffer buffer, tddp_reduce_op op, double premul,
                            tddp_work **work)
{
    tddp_status status = tddp_group_begin(group, TDDP_OP_ALL_REDUCE);
    if (status == TDDP_OK) {
        status = tddp_group_check_buffer(group, TDDP_OP_ALL_REDUCE, "buffer", &buffer);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, op, &buffer);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_ALL_REDUCE,
                      .input = buffer,
                      .output = buffer,
                      .reduce = op,
                      .premul = premul};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_reduce(tddp_group *group, tddp_buffer buffer, tddp_reduce_op op, double premul,
                        int root, tddp_work **work)
{
    tddp_status status = tddp_group_begin(group, TDDP_OP_REDUCE);
    if (status == TDDP_OK) {
        status = tddp_group_check_buffer(group, TDDP_OP_REDUCE, "buffer", &buffer);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, op, &buffer);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_root(group, TDDP_OP_REDUCE, root);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_REDUCE,
                      .input = buffer,
                      .output = buffer,
                      .reduce = op,
                      .premul = premul,
                      .root = root};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_broadcast(tddp_group *group, tddp_buffer buffer, int root, tddp_work **work)
{
    tddp_status status = tddp_group_begin(group, TDDP_OP_BROADCAST);
    if (status == TDDP_OK) {
        status = tddp_group_check_buffer(group, TDDP_OP_BROADCAST, "buffer", &buffer);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_root(group, TDDP_OP_BROADCAST, root);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_BROADCAST, .input = buffer, .output = buffer, .root = root};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_barrier(tddp_group *group, tddp_work **work)
{
    return tddp_barrier_within(group, 0, work);
}

tddp_status tddp_barrier_within(tddp_group *group, int64_t timeout_ms, tddp_work **work)
{
    tddp_status status = tddp_group_begin(group, TDDP_OP_BARRIER);
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_BARRIER, .timeout_ms = timeout_ms};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_all_gather(tddp_group *group, tddp_buffer input, tddp_buffer output,
                            tddp_work **work)
{
    tddp_status status = tddp_group_begin(group, TDDP_OP_ALL_GATHER);
    if (status == TDDP_OK) {
        status = check_pair(group, TDDP_OP_ALL_GATHER, &input, &output);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_ALL_GATHER, .input = input, .output = output};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_reduce_scatter(tddp_group *group, tddp_buffer input, tddp_buffer output,
                                tddp_reduce_op op, double premul, tddp_work **work)
{
    tddp_status status = tddp_group_begin(group, TDDP_OP_REDUCE_SCATTER);
    if (status == TDDP_OK) {
        status = check_pair(group, TDDP_OP_REDUCE_SCATTER, &input, &output);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, op, &input);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_REDUCE_SCATTER,
                      .input = input,
                      .output = output,
                      .reduce = op,
                      .premul = premul};
    return tddp_group_submit(group, &wanted, work);
}
