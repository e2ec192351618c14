/*
 * The memory of flat buffers: an allocation per device, with one reference count for all. On the
 * CPU it is memory of the group, so that ranks of one host reduce it in place; on a device it comes
 * from the owner's table. Any thread. The allocations live as long as a reference to them (a tensor
 * in them, a pending work), and may outlive the layout and the group.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "flat/flat.h"

typedef struct allocation {
    tddp_device_type type;
    int32_t index;
    size_t bytes;
    char *data;
    tddp_group_memory *block; /* on the CPU */
    void *handle;             /* on a device: from the table */
} allocation;

struct tddp_flat_memory {
    atomic_long references;
    tddp_device_memory_ops ops; /* all zero: no device */
    size_t count;
    allocation allocations[];
};

/* --- allocation ------------------------------------------------------------------------------ */

static allocation *find(tddp_flat_memory *memory, tddp_device_type type, int32_t index)
{
    for (size_t k = 0; k < memory->count; k++) {
        allocation *at = &memory->allocations[k];
        if (at->type == type && at->index == index) {
            return at;
        }
    }
    return NULL;
}

/* Each buffer's `count` is its bytes until assign_addresses(). */
static void add_sizes(tddp_flat_memory *memory, const tddp_flat_buffer *buffers, size_t count)
{
    for (size_t b = 0; b < count; b++) {
        const tddp_buffer *buffer = &buffers[b].buffer;
        allocation *at = find(memory, buffer->device_type, buffer->device_index);
        if (!at) {
            at = &memory->allocations[memory->count++];
            *at = (allocation){.type = buffer->device_type, .index = buffer->device_index};
        }
        at->bytes += buffer->count;
    }
}

static tddp_status allocate(tddp_group *group, const tddp_device_memory_ops *ops, allocation *at)
{
    /* At least some bytes, also if no parameter has an element. */
    size_t bytes = at->bytes > 0 ? at->bytes : TDDP_FLAT_ALIGNMENT;
    void *data = NULL;
    if (at->type != TDDP_CPU) {
        tddp_status status = ops->allocate(ops->user, at->index, bytes, &at->handle, &data);
        at->data = data;
        return status;
    }
    tddp_status status = tddp_group_memory_create(group, bytes, &at->block);
    at->data = status == TDDP_OK ? tddp_group_memory_data(at->block) : NULL;
    return status;
}

static void assign_addresses(tddp_flat_memory *memory, tddp_flat_buffer *buffers, size_t count)
{
    for (size_t b = 0; b < count; b++) {
        tddp_buffer *buffer = &buffers[b].buffer;
        allocation *at = find(memory, buffer->device_type, buffer->device_index);
        buffer->data = at->data;
        at->data += buffer->count;
        buffer->count /= tddp_dtype_size(buffer->dtype);
    }
}

tddp_status tddp_flat_memory_make(tddp_group *group, const tddp_device_memory_ops *ops,
                                  tddp_flat_buffer *buffers, size_t count, tddp_flat_memory **out)
{
    tddp_flat_memory *memory = tddp_alloc(sizeof *memory + count * sizeof *memory->allocations);
    if (!memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&memory->references, 1);
    memory->ops = *ops;
    add_sizes(memory, buffers, count);
    tddp_status status = TDDP_OK;
    for (size_t k = 0; k < memory->count && status == TDDP_OK; k++) {
        status = allocate(group, ops, &memory->allocations[k]);
    }
    if (status != TDDP_OK) {
        tddp_flat_memory_release(memory);
        return status;
    }
    assign_addresses(memory, buffers, count);
    *out = memory;
    return TDDP_OK;
}

/* --- references ------------------------------------------------------------------------------ */

tddp_flat_memory *tddp_flat_memory_retain(tddp_flat_memory *memory)
{
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
    return memory;
}

void tddp_flat_memory_release(tddp_flat_memory *memory)
{
    if (!memory || atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    for (size_t k = 0; k < memory->count; k++) {
        tddp_group_memory_release(memory->allocations[k].block);
        if (memory->allocations[k].handle) {
            memory->ops.release(memory->ops.user, memory->allocations[k].handle);
        }
    }
    free(memory);
}

/* --- contents -------------------------------------------------------------------------------- */

tddp_status tddp_flat_memory_zero(const tddp_flat_memory *memory, const tddp_buffer *buffer)
{
    const size_t bytes = buffer->count * tddp_dtype_size(buffer->dtype);
    if (bytes == 0) {
        return TDDP_OK;
    }
    if (buffer->device_type != TDDP_CPU) {
        return memory->ops.zero(memory->ops.user, buffer->device_index, buffer->data, bytes);
    }
    memset(buffer->data, 0, bytes);
    return TDDP_OK;
}

tddp_status tddp_flat_memory_copy(const tddp_flat_memory *memory, const tddp_param *param,
                                  void *into, const void *from)
{
    const size_t bytes = tddp_param_bytes(param);
    if (bytes == 0) {
        return TDDP_OK;
    }
    if (param->device_type != TDDP_CPU) {
        return memory->ops.copy(memory->ops.user, param->device_index, into, from, bytes);
    }
    memcpy(into, from, bytes);
    return TDDP_OK;
}
