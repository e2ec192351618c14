/*
 * Memory that a group gives out for buffers: the backend's, which its operations work on where it
 * lies, else plain memory. Any thread; also in a forked child, which has a copy of either, and
 * gives it back.
 *
 * Invariant: the backend's context is there while it is asked (hold.c); what was given out knows
 * all it needs and outlives the group.
 */
#include <stdlib.h>

#include <tddp/memory_stats.h>

#include "group/checks.h"

enum { ALIGNMENT = 64 };

struct tddp_group_memory {
    void (*deallocate)(void *handle); /* NULL: plain memory */
    void *handle;                     /* the backend's; of plain memory its start */
    void *data;
    size_t bytes; /* that were asked for */
};

static tddp_status allocate_shared(tddp_group *group, size_t bytes, tddp_group_memory *memory)
{
    const tddp_inner *own = tddp_group_backend_on(group, TDDP_CPU);
    const tddp_backend_v1 *backend = own->backend;
    if (!backend->allocate || !backend->deallocate || tddp_group_hold(group, "group memory")) {
        return TDDP_UNAVAILABLE;
    }
    tddp_status status = backend->allocate(own->context, bytes, &memory->handle, &memory->data);
    tddp_group_let_go(group);
    if (status == TDDP_OK) {
        memory->deallocate = backend->deallocate;
    } else if (status == TDDP_UNAVAILABLE) {
        tddp_log(TDDP_LOG_DEBUG, "group", "%zu bytes of plain memory for group \"%s\": %s", bytes,
                 group->name, tddp_error_message());
    }
    return status;
}

static tddp_status allocate_plain(size_t bytes, tddp_group_memory *memory)
{
    if (bytes > SIZE_MAX - ALIGNMENT) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "%zu bytes: more than memory can hold", bytes);
    }
    memory->handle = tddp_alloc(bytes + ALIGNMENT);
    if (!memory->handle) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t over = (uintptr_t)memory->handle % ALIGNMENT;
    memory->data = (char *)memory->handle + (over ? ALIGNMENT - over : 0);
    return TDDP_OK;
}

tddp_status tddp_group_memory_create(tddp_group *group, size_t bytes, tddp_group_memory **out)
{
    tddp_status status = tddp_group_check_usable(group, "group memory");
    if (status) {
        return status;
    }
    if (!out || bytes == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         out ? "memory of 0 bytes: expected at least 1" : "out is NULL");
    }
    tddp_group_memory *memory = tddp_alloc(sizeof *memory);
    if (!memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    status = allocate_shared(group, bytes, memory);
    if (status == TDDP_UNAVAILABLE) {
        status = allocate_plain(bytes, memory);
    }
    if (status) {
        free(memory);
        return status;
    }
    memory->bytes = bytes;
    tddp_memory_allocated(bytes);
    *out = memory;
    return TDDP_OK;
}

void *tddp_group_memory_data(const tddp_group_memory *memory)
{
    return memory->data;
}

int tddp_group_memory_shared(const tddp_group_memory *memory)
{
    return memory->deallocate != NULL;
}

void tddp_group_memory_release(tddp_group_memory *memory)
{
    if (!memory) {
        return;
    }
    tddp_memory_freed(memory->bytes);
    if (memory->deallocate) {
        memory->deallocate(memory->handle);
    } else {
        free(memory->handle);
    }
    free(memory);
}
