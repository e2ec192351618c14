/*
 * A group's backends, one for each kind of memory that its name says, or a single one. Opened and
 * closed by the threads that create and shut down the group; used by any thread in between
 * (hold.c).
 *
 * Invariant: an operation uses the backend of its memory, a barrier the CPU's, the same on all
 * ranks. So each backend gets its operations in one order, with increasing numbers.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/open.h"
#include "backend/staging/staging.h"
#include "group/group.h"

tddp_status tddp_group_backends_find(tddp_group *group, const char *name)
{
    tddp_status status = tddp_backends_find(name, group->requested);
    if (status == TDDP_OK) {
        group->backend_name = tddp_copy_string(name);
        status = group->backend_name ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    return status;
}

/* --- opening --------------------------------------------------------------------------------- */

/* A module's table may be an older, shorter one. */
static void set(tddp_device_backend *into, const tddp_inner *opened)
{
    const tddp_backend_v1 *table = opened->backend;
    memcpy(&into->table, table, table->size < sizeof *table ? table->size : sizeof *table);
    if (into->table.op_count > TDDP_OP_COUNT) {
        into->table.op_count = TDDP_OP_COUNT;
    }
    into->inner = *opened;
    into->inner.backend = &into->table;
}

/* The only one: memory of the kind that it doesn't support is copied. */
static tddp_status open_alone(tddp_group *group, const tddp_backend_v1 *requested,
                              const tddp_backend_opts *opts, const tddp_wait *wait)
{
    tddp_inner opened = {0};
    tddp_inner copies;
    tddp_status status = tddp_backend_open(requested, opts, wait, &opened);
    if (status) {
        return status;
    }
    const bool for_cpu = (opened.backend->device_types >> TDDP_CPU & 1u) != 0;
    tddp_device_backend *own = &group->backends[for_cpu ? TDDP_CPU : TDDP_CUDA];
    tddp_device_backend *other = &group->backends[for_cpu ? TDDP_CUDA : TDDP_CPU];
    set(own, &opened);
    if (tddp_staging_is_needed(&own->table)) {
        status = tddp_staging_open(&own->inner, requested->name, opts, &copies);
        if (status == TDDP_OK) {
            set(other, &copies);
            other->copies = true;
        }
    }
    return status;
}

/* One of several, with its own prefix of the store. */
static tddp_status open_part(tddp_group *group, tddp_device_type type,
                             const tddp_backend_opts *opts, const tddp_wait *wait)
{
    const tddp_backend_v1 *requested = group->requested[type];
    const char *device = tddp_device_type_name(type);
    tddp_inner opened = {0};
    tddp_backend_opts part_opts = *opts;
    tddp_status status = tddp_prefix_store_create(device, opts->store, &opened.store);
    if (status) {
        return status;
    }
    part_opts.store = opened.store;
    status = tddp_backend_open(requested, &part_opts, wait, &opened);
    if (status) {
        status = tddp_fail(status, "%s for %s: %s", requested->name, device, tddp_error_message());
        tddp_inner_close(&opened);
    } else {
        set(&group->backends[type], &opened);
    }
    return status;
}

static tddp_status set_attributes(tddp_group *group, bool alone)
{
    const tddp_backend_v1 *cpu = tddp_group_backend_on(group, TDDP_CPU)->backend;
    const tddp_backend_v1 *cuda = tddp_group_backend_on(group, TDDP_CUDA)->backend;
    group->launches = (cpu->launches | cuda->launches) != 0;
    /* What is launched on a device isn't run. */
    group->resumes = (cpu->traits & TDDP_BACKEND_RESUMES) != 0 &&
                     (cuda->launches || (cuda->traits & TDDP_BACKEND_RESUMES) != 0);
    if (alone && strcmp(cpu->name, "shm+gloo") == 0) {
        group->carrier = tddp_format("shm+%s", group->requested[TDDP_CPU]->name);
        return group->carrier ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    group->carrier =
        alone ? tddp_copy_string(cpu->name) : tddp_format("cpu:%s,cuda:%s", cpu->name, cuda->name);
    return group->carrier ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* Of the backend itself, not of what copies for it. */
static void *context_of(const tddp_group *parent, int type)
{
    const tddp_device_backend *own = &parent->backends[type];
    return own->copies ? parent->backends[TDDP_DEVICE_TYPES - 1 - type].inner.context
                       : own->inner.context;
}

tddp_status tddp_group_backends_open(tddp_group *group, const tddp_group *parent,
                                     const tddp_backend_opts *opts, const tddp_wait *wait)
{
    const bool alone = !group->requested[TDDP_CPU] || !group->requested[TDDP_CUDA];
    const int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_status status = TDDP_OK;
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        const tddp_backend_v1 *requested = group->requested[type];
        tddp_backend_opts own = *opts;
        own.timeout_ms = tddp_deadline_poll_ms(deadline);
        own.parent = parent ? context_of(parent, type) : NULL;
        const tddp_wait left = {own.timeout_ms, tddp_wait_cancel(wait)};
        if (requested) {
            status = alone ? open_alone(group, requested, &own, &left)
                           : open_part(group, (tddp_device_type)type, &own, &left);
        }
    }
    status = status ? status : set_attributes(group, alone);
    if (status) {
        tddp_group_backends_close(group);
    }
    return status;
}

/* --- all of them ----------------------------------------------------------------------------- */

void tddp_group_backends_close(tddp_group *group)
{
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        tddp_inner *each = &group->backends[type].inner;
        tddp_inner closing = *each;
        if (!group->backends[TDDP_DEVICE_TYPES - 1 - type].copies) {
            tddp_inner_close(&closing);
        }
        each->context = NULL; /* its table stays: what it supports can still be asked */
        each->store = NULL;
    }
}

void tddp_group_backends_abort(const tddp_group *group)
{
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        tddp_inner_abort(&group->backends[type].inner);
    }
}

bool tddp_group_splits(const tddp_group *group)
{
    bool any = false;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        any = any || group->backends[type].table.decline;
    }
    return any;
}

tddp_status tddp_group_backends_decline(const tddp_group *group, const tddp_wait *wait)
{
    tddp_status status = TDDP_OK;
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        status = tddp_inner_decline(&group->backends[type].inner, wait);
    }
    return status;
}

tddp_eventcount *tddp_group_events(const tddp_group *group)
{
    const tddp_inner *own = tddp_group_backend_on(group, TDDP_CPU);
    return own->backend->events ? own->backend->events(own->context) : NULL;
}
