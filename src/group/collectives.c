/*
 * The operations of a group: every argument is checked here, on the caller's thread, before
 * anything is queued; what is queued differs between ranks only if the ranks' calls do. Any thread.
 */
#include <stdint.h>
#include <unistd.h>

#include "group/group.h"

static tddp_status check_group(const tddp_group *group, tddp_op_kind kind)
{
    if (!group) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: group is NULL", tddp_op_name(kind));
    }
    if (group->pid != getpid()) {
        return tddp_fail(TDDP_FORKED,
                         "%s: group \"%s\" was made by process %d, this is its child %d: make a "
                         "group of its own here",
                         tddp_op_name(kind), group->name, (int)group->pid, (int)getpid());
    }
    const tddp_backend_v1 *backend = group->backend;
    if ((uint32_t)kind >= backend->op_count || !backend->run[kind]) {
        return tddp_fail(TDDP_UNSUPPORTED, "backend %s has no %s", backend->name,
                         tddp_op_name(kind));
    }
    return TDDP_OK;
}

static tddp_status check_buffer(const tddp_group *group, tddp_op_kind kind, const char *what,
                                const tddp_buffer *buffer)
{
    const char *op = tddp_op_name(kind);
    size_t size = tddp_dtype_size(buffer->dtype);
    if (size == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s has dtype %d: expected 0 to %d", op, what,
                         (int)buffer->dtype, (int)TDDP_BOOL);
    }
    if (!buffer->data && buffer->count > 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s is NULL, but has %zu elements", op, what,
                         buffer->count);
    }
    if (buffer->count > (size_t)PTRDIFF_MAX / size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: %s has %zu elements of %zu bytes: more than memory can hold", op,
                         what, buffer->count, size);
    }
    if ((unsigned)buffer->device_type > 31 ||
        !(group->backend->device_types & (1u << buffer->device_type))) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s: backend %s takes no %s memory (device type %d)", op,
                         group->backend->name, tddp_device_type_name(buffer->device_type),
                         (int)buffer->device_type);
    }
    return TDDP_OK;
}

/* Checks a pair of buffers of which `large` is world_size times `small`. */
static tddp_status check_pair(const tddp_group *group, tddp_op_kind kind, const tddp_buffer *input,
                              const tddp_buffer *output)
{
    const char *op = tddp_op_name(kind);
    tddp_status status = check_buffer(group, kind, "input", input);
    if (status == TDDP_OK) {
        status = check_buffer(group, kind, "output", output);
    }
    if (status) {
        return status;
    }
    if (input->dtype != output->dtype) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: input is %s, output %s: expected the same", op,
                         tddp_dtype_name(input->dtype), tddp_dtype_name(output->dtype));
    }
    if (input->device_type != output->device_type || input->device_index != output->device_index) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: input is on %s:%d, output on %s:%d: expected the same", op,
                         tddp_device_type_name(input->device_type), (int)input->device_index,
                         tddp_device_type_name(output->device_type), (int)output->device_index);
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
    size_t size = tddp_dtype_size(small->dtype);
    uintptr_t a = (uintptr_t)small->data;
    uintptr_t b = (uintptr_t)large->data;
    size_t own = (size_t)group->rank * small->count * size;
    if (small->count > 0 && a < b + large->count * size && b < a + small->count * size &&
        a != b + own) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: input and output overlap: only part %d of %s may be %s", op,
                         group->rank, gathers ? "output" : "input", gathers ? "input" : "output");
    }
    return TDDP_OK;
}

tddp_status tddp_all_reduce(tddp_group *group, tddp_buffer buffer, tddp_reduce_op op, double premul,
                            tddp_work **work)
{
    tddp_status status = check_group(group, TDDP_OP_ALL_REDUCE);
    if (status == TDDP_OK) {
        status = check_buffer(group, TDDP_OP_ALL_REDUCE, "buffer", &buffer);
    }
    if (status == TDDP_OK) {
        status = tddp_reduce_check(op, buffer.dtype);
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

tddp_status tddp_broadcast(tddp_group *group, tddp_buffer buffer, int root, tddp_work **work)
{
    tddp_status status = check_group(group, TDDP_OP_BROADCAST);
    if (status == TDDP_OK) {
        status = check_buffer(group, TDDP_OP_BROADCAST, "buffer", &buffer);
    }
    if (status) {
        return status;
    }
    if (root < 0 || root >= group->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "broadcast: root %d: expected 0 to %d", root,
                         group->world_size - 1);
    }
    tddp_op wanted = {.kind = TDDP_OP_BROADCAST, .input = buffer, .output = buffer, .root = root};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_barrier(tddp_group *group, tddp_work **work)
{
    tddp_status status = check_group(group, TDDP_OP_BARRIER);
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = TDDP_OP_BARRIER};
    return tddp_group_submit(group, &wanted, work);
}

tddp_status tddp_all_gather(tddp_group *group, tddp_buffer input, tddp_buffer output,
                            tddp_work **work)
{
    tddp_status status = check_group(group, TDDP_OP_ALL_GATHER);
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
    tddp_status status = check_group(group, TDDP_OP_REDUCE_SCATTER);
    if (status == TDDP_OK) {
        status = check_pair(group, TDDP_OP_REDUCE_SCATTER, &input, &output);
    }
    if (status == TDDP_OK) {
        status = tddp_reduce_check(op, input.dtype);
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
