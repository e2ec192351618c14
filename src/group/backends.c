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

/* Opens one of several, with its own prefix of the store. */
static tddp_status open_part(const tddp_backend_v1 *requested, tddp_device_type type,
                             const tddp_backend_opts *opts, const tddp_wait *wait, tddp_inner *into)
{
    const char *device = tddp_device_type_name(type);
    tddp_backend_opts part_opts = *opts;
    tddp_status status = tddp_prefix_store_create(device, opts->store, &into->store);
    if (status == TDDP_OK) {
        part_opts.store = into->store;
        status = tddp_backend_open_inner(requested, &part_opts, wait, into);
        status = status ? tddp_fail(status, "%s for %s: %s", requested->name, device,
                                    tddp_error_message())
                        : TDDP_OK;
    }
    if (status) {
        tddp_inner_close(into);
    }
    return status;
}

/* A module's table may be an older, shorter one. */
static void copy_table(tddp_device_backend *opened)
{
    const tddp_backend_v1 *table = opened->inner.backend;
    memcpy(&opened->table, table, table->size < sizeof *table ? table->size : sizeof *table);
    if (opened->table.op_count > TDDP_OP_COUNT) {
        opened->table.op_count = TDDP_OP_COUNT;
    }
    opened->inner.backend = &opened->table;
}

static tddp_status set_attributes(tddp_group *group)
{
    const tddp_backend_v1 *cpu = tddp_group_backend_on(group, TDDP_CPU)->backend;
    const tddp_backend_v1 *cuda = tddp_group_backend_on(group, TDDP_CUDA)->backend;
    group->launches = (cpu->launches | cuda->launches) != 0;
    group->resumes = (cpu->traits & TDDP_BACKEND_RESUMES) != 0;
    if (cpu == cuda) {
        group->carrier = tddp_copy_string(cpu->name);
    } else {
        /* What is launched on a device isn't run. */
        group->resumes = group->resumes && (cuda->launches || cuda->traits & TDDP_BACKEND_RESUMES);
        group->carrier = tddp_format("cpu:%s,cuda:%s", cpu->name, cuda->name);
    }
    return group->carrier ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_group_backends_open(tddp_group *group, const tddp_group *parent,
                                     const tddp_backend_opts *opts, const tddp_wait *wait)
{
    const bool alone = !group->requested[TDDP_CPU] || !group->requested[TDDP_CUDA];
    const int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_status status = TDDP_OK;
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        const tddp_backend_v1 *requested = group->requested[type];
        tddp_device_backend *into = &group->backends[type];
        tddp_backend_opts own = *opts;
        own.timeout_ms = tddp_deadline_poll_ms(deadline);
        own.parent = parent ? parent->backends[type].inner.context : NULL;
        const tddp_wait left = {own.timeout_ms, tddp_wait_cancel(wait)};
        if (requested) {
            status = alone
                         ? tddp_backend_open(requested, &own, &left, &into->inner)
                         : open_part(requested, (tddp_device_type)type, &own, &left, &into->inner);
        }
        if (requested && status == TDDP_OK) {
            copy_table(into);
        }
    }
    status = status ? status : set_attributes(group);
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
        tddp_inner_close(&closing);
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
