/*
 * Argument checks, on the caller's thread, before an operation is queued: queues of two ranks
 * differ only if the ranks' calls do. Any thread; no state.
 *
 * A check that succeeds formats no text: names of parts are formatted only for an error.
 */
#include <stdio.h>

#include "backend/staging/staging.h"
#include "group/checks.h"

enum { NAME_BYTES = 48 };

static bool supports(const tddp_backend_v1 *backend, tddp_op_kind kind)
{
    if (tddp_op_is_p2p(kind)) {
        return backend->post && backend->finish;
    }
    return (backend->launches >> kind & 1u) ||
           ((uint32_t)kind < backend->op_count && backend->run[kind]);
}

tddp_status tddp_group_check_call(const tddp_group *group, tddp_op_kind kind)
{
    tddp_status status = tddp_group_check_usable(group, tddp_op_name(kind));
    if (status) {
        return status;
    }
    /* Which backend it is depends on the memory, except for a barrier. */
    if (supports(tddp_group_backend_on(group, TDDP_CPU)->backend, kind) ||
        (kind != TDDP_OP_BARRIER &&
         supports(tddp_group_backend_on(group, TDDP_CUDA)->backend, kind))) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_UNSUPPORTED, "backend %s has no %s", group->backend_name,
                     tddp_op_name(kind));
}

static tddp_status check_device_type(const tddp_group *group, tddp_op_kind kind,
                                     const tddp_buffer *buffer)
{
    const tddp_device_type type = buffer->device_type;
    const tddp_inner *own = tddp_group_backend_on(group, type);
    if ((unsigned)type >= TDDP_DEVICE_TYPES || !(own->backend->device_types & (1u << type))) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s: backend %s takes no %s memory (device type %d)",
                         tddp_op_name(kind), group->backend_name, tddp_device_type_name(type),
                         (int)type);
    }
    if (!supports(own->backend, kind)) {
        return tddp_fail(TDDP_UNSUPPORTED, "backend %s, which serves %s memory here, has no %s",
                         own->backend->name, tddp_device_type_name(type), tddp_op_name(kind));
    }
    return group->backends[type].copies ? tddp_staging_check(own->context, kind, buffer) : TDDP_OK;
}

tddp_status tddp_group_check_buffer(const tddp_group *group, tddp_op_kind kind, const char *name,
                                    const tddp_buffer *buffer)
{
    const char *op = tddp_op_name(kind);
    size_t size = tddp_dtype_size(buffer->dtype);
    if (size == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s has dtype %d: expected 0 to %d", op, name,
                         (int)buffer->dtype, (int)TDDP_FLOAT8_E5M2);
    }
    if (!buffer->data && buffer->count > 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s is NULL, but has %zu elements", op, name,
                         buffer->count);
    }
    if (buffer->count > (size_t)PTRDIFF_MAX / size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: %s has %zu elements of %zu bytes: more than memory can hold", op,
                         name, buffer->count, size);
    }
    return check_device_type(group, kind, buffer);
}

tddp_status tddp_group_check_reduction(const tddp_group *group, tddp_reduce_op op,
                                       const tddp_buffer *buffer)
{
    bool narrow = buffer->dtype == TDDP_FLOAT8_E4M3FN || buffer->dtype == TDDP_FLOAT8_E5M2;
    if (!narrow) {
        return tddp_reduce_check(op, buffer->dtype);
    }
    /* A device may support their arithmetic: its backend checks. */
    if (tddp_group_reduces_on_device(group, buffer->device_type)) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_UNSUPPORTED,
                     "cannot reduce %s by %s on the CPU: expected memory of a GPU and nccl, or "
                     "another dtype",
                     tddp_dtype_name(buffer->dtype), tddp_reduce_op_name(op));
}

static bool same_type(const tddp_buffer *a, const tddp_buffer *b)
{
    return a->dtype == b->dtype && a->device_type == b->device_type &&
           a->device_index == b->device_index;
}

tddp_status tddp_group_check_same_type(tddp_op_kind kind, const char *name,
                                       const tddp_buffer *buffer, const char *other_name,
                                       const tddp_buffer *other)
{
    if (same_type(buffer, other)) {
        return TDDP_OK;
    }
    if (buffer->dtype != other->dtype) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s is %s, %s %s: expected the same",
                         tddp_op_name(kind), name, tddp_dtype_name(buffer->dtype), other_name,
                         tddp_dtype_name(other->dtype));
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s is on %s:%d, %s on %s:%d: expected the same",
                     tddp_op_name(kind), name, tddp_device_type_name(buffer->device_type),
                     (int)buffer->device_index, other_name,
                     tddp_device_type_name(other->device_type), (int)other->device_index);
}

tddp_status tddp_group_check_root(const tddp_group *group, tddp_op_kind kind, int root)
{
    if (root < 0 || root >= group->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: root %d: expected 0 to %d", tddp_op_name(kind),
                         root, group->world_size - 1);
    }
    return TDDP_OK;
}

/* "outputs[3]" */
static const char *name_of(char text[NAME_BYTES], const char *list, size_t index)
{
    (void)snprintf(text, NAME_BYTES, "%s[%zu]", list, index);
    return text;
}

/* Checks the buffer at `index` by itself, and that it has the first one's dtype and device. */
static tddp_status check_one(const tddp_group *group, tddp_op_kind kind, const char *name,
                             const tddp_buffer *list, size_t index)
{
    char indexed[NAME_BYTES];
    char first[NAME_BYTES];
    tddp_status status = tddp_group_check_buffer(group, kind, name, &list[index]);
    if (status == TDDP_OK && same_type(&list[index], list)) {
        return TDDP_OK;
    }
    /* Once more, for an error text with its index. */
    status = tddp_group_check_buffer(group, kind, name_of(indexed, name, index), &list[index]);
    if (status == TDDP_OK) {
        status =
            tddp_group_check_same_type(kind, indexed, &list[index], name_of(first, name, 0), list);
    }
    return status;
}

tddp_status tddp_group_check_list(const tddp_group *group, tddp_op_kind kind, const char *name,
                                  const tddp_buffer *list, size_t count)
{
    if (!list || count == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s %s: expected at least one buffer",
                         tddp_op_name(kind), name, list ? "are none" : "is NULL");
    }
    tddp_status status = check_one(group, kind, name, list, 0);
    if (status) {
        return status;
    }
    size_t most = (size_t)PTRDIFF_MAX / tddp_dtype_size(list[0].dtype);
    size_t total = list[0].count;
    for (size_t i = 1; i < count; i++) {
        status = check_one(group, kind, name, list, i);
        if (status) {
            return status;
        }
        if (list[i].count > most - total) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "%s: %s up to [%zu] have more elements than memory can hold "
                             "(%zu and %zu)",
                             tddp_op_name(kind), name, i, total, list[i].count);
        }
        total += list[i].count;
    }
    return TDDP_OK;
}

tddp_status tddp_group_check_parts(const tddp_group *group, tddp_op_kind kind, const char *name,
                                   const tddp_buffer *parts, size_t count)
{
    if (!parts || count != (size_t)group->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s are %zu%s: expected %d, one for each rank",
                         tddp_op_name(kind), name, count, parts ? "" : " (NULL)",
                         group->world_size);
    }
    return tddp_group_check_list(group, kind, name, parts, count);
}

static uintptr_t start_of(const tddp_buffer *buffer)
{
    return (uintptr_t)buffer->data;
}

static uintptr_t end_of(const tddp_buffer *buffer)
{
    return (uintptr_t)buffer->data + buffer->count * tddp_dtype_size(buffer->dtype);
}

bool tddp_group_overlap(const tddp_buffer *a, const tddp_buffer *b)
{
    return a->count > 0 && b->count > 0 && start_of(a) < end_of(b) && start_of(b) < end_of(a);
}

tddp_status tddp_group_check_piece(const tddp_group *group, tddp_op_kind kind,
                                   const char *piece_name, const tddp_buffer *piece,
                                   const char *parts_name, const tddp_buffer *parts, int local)
{
    char name[NAME_BYTES];
    if (!same_type(piece, &parts[local])) {
        return tddp_group_check_same_type(kind, piece_name, piece,
                                          name_of(name, parts_name, (size_t)local), &parts[local]);
    }
    if (piece->count != parts[local].count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: %s has %zu elements, %s[%d] has %zu: expected the same on rank %d",
                         tddp_op_name(kind), piece_name, piece->count, parts_name, local,
                         parts[local].count, group->rank);
    }
    for (size_t i = 0; i < (size_t)group->world_size; i++) {
        bool same = i == (size_t)local && piece->data == parts[i].data;
        if (!same && tddp_group_overlap(piece, &parts[i])) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "%s: %s and %s[%zu] overlap: only %s[%d] may be the same memory",
                             tddp_op_name(kind), piece_name, parts_name, i, parts_name, local);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_group_check_disjoint(tddp_op_kind kind, const char *name, const tddp_buffer *list,
                                      size_t count)
{
    /* Mostly their addresses ascend; only otherwise are all pairs compared. */
    uintptr_t end = 0;
    bool ascending = true;
    for (size_t i = 0; i < count && ascending; i++) {
        if (list[i].count > 0) {
            ascending = start_of(&list[i]) >= end;
            end = end_of(&list[i]);
        }
    }
    for (size_t i = 1; i < count && !ascending; i++) {
        for (size_t k = 0; k < i; k++) {
            if (tddp_group_overlap(&list[i], &list[k])) {
                return tddp_fail(TDDP_INVALID_ARGUMENT,
                                 "%s: %s[%zu] and %s[%zu] overlap: expected memory of their own",
                                 tddp_op_name(kind), name, k, name, i);
            }
        }
    }
    return TDDP_OK;
}

/* The range from the first byte to the last byte of these. */
static void extent_of(const tddp_buffer *list, size_t count, uintptr_t *start, uintptr_t *end)
{
    *start = UINTPTR_MAX;
    *end = 0;
    for (size_t i = 0; i < count; i++) {
        if (list[i].count > 0) {
            *start = start_of(&list[i]) < *start ? start_of(&list[i]) : *start;
            *end = end_of(&list[i]) > *end ? end_of(&list[i]) : *end;
        }
    }
}

tddp_status tddp_group_check_exchange(const tddp_group *group, tddp_op_kind kind,
                                      const tddp_buffer *inputs, const tddp_buffer *outputs)
{
    size_t world = (size_t)group->world_size;
    size_t local = (size_t)group->rank;
    tddp_status status =
        tddp_group_check_same_type(kind, "inputs[0]", inputs, "outputs[0]", outputs);
    if (status) {
        return status;
    }
    if (inputs[local].count != outputs[local].count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: inputs[%zu] has %zu elements, outputs[%zu] has %zu: expected the "
                         "same on rank %d",
                         tddp_op_name(kind), local, inputs[local].count, local,
                         outputs[local].count, group->rank);
    }
    uintptr_t start[2];
    uintptr_t end[2];
    extent_of(inputs, world, &start[0], &end[0]);
    extent_of(outputs, world, &start[1], &end[1]);
    bool disjoint = start[0] >= end[1] || start[1] >= end[0];
    for (size_t i = 0; i < world && !disjoint; i++) {
        for (size_t k = 0; k < world; k++) {
            bool same = i == local && k == local && inputs[i].data == outputs[k].data;
            if (!same && tddp_group_overlap(&inputs[i], &outputs[k])) {
                return tddp_fail(TDDP_INVALID_ARGUMENT,
                                 "%s: inputs[%zu] and outputs[%zu] overlap: only part %zu of both "
                                 "may be the same memory",
                                 tddp_op_name(kind), i, k, local);
            }
        }
    }
    return TDDP_OK;
}
