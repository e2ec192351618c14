/*
 * A group's contexts, one for each kind of device, behind one backend table. Threads: as
 * <tddp/backend.h> says.
 *
 * Invariant: every operation uses the part of its memory, a barrier the CPU's, the same on all
 * ranks. So each part gets its operations in one order, with increasing numbers. A serving table
 * describes the backends that serve the parts.
 */
#include <stdlib.h>

#include "backend/devices/devices.h"
#include "backend/open.h"
#include "base/base.h"

typedef struct context {
    tddp_inner parts[TDDP_DEVICE_TYPES];
} context;

/* --- operations ------------------------------------------------------------------------------ */

static tddp_device_type device_of(const tddp_op *op)
{
    return op->kind == TDDP_OP_BARRIER ? TDDP_CPU : op->input.device_type;
}

static tddp_status fail_unsupported(const tddp_inner *part, const tddp_op *op)
{
    return tddp_fail(TDDP_UNSUPPORTED, "backend %s, which serves %s memory here, has no %s",
                     part->backend->name, tddp_device_type_name(device_of(op)),
                     tddp_op_name(op->kind));
}

static tddp_status run(void *data, const tddp_op *op)
{
    const context *self = data;
    const tddp_inner *part = &self->parts[device_of(op)];
    if ((uint32_t)op->kind >= part->backend->op_count || !part->backend->run[op->kind]) {
        return fail_unsupported(part, op);
    }
    return part->backend->run[op->kind](part->context, op);
}

static tddp_status post(void *data, const tddp_op *op, void **request)
{
    const context *self = data;
    const tddp_inner *part = &self->parts[device_of(op)];
    return part->backend->post ? tddp_inner_post(part, op, NULL, request)
                               : fail_unsupported(part, op);
}

/* --- life cycle ------------------------------------------------------------------------------ */

static tddp_status decline(void *data, const tddp_wait *wait)
{
    const context *self = data;
    tddp_status status = TDDP_OK;
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        status = tddp_inner_decline(&self->parts[type], wait);
    }
    return status;
}

static void abort_all(void *data)
{
    const context *self = data;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        tddp_inner_abort(&self->parts[type]);
    }
}

static void destroy(void *data)
{
    context *self = data;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        tddp_inner_close(&self->parts[type]);
    }
    free(self);
}

static tddp_status allocate(void *data, size_t bytes, void **handle, void **memory)
{
    const context *self = data;
    const tddp_inner *part = &self->parts[TDDP_CPU];
    return part->backend->allocate(part->context, bytes, handle, memory);
}

static int resumes(void *data, const tddp_op *op)
{
    const context *self = data;
    const tddp_inner *part = &self->parts[device_of(op)];
    return !part->backend->resumes || part->backend->resumes(part->context, op);
}

/* What is on a device's queue needs none. */
static tddp_eventcount *events(void *data)
{
    const context *self = data;
    const tddp_inner *part = &self->parts[TDDP_CPU];
    return part->backend->events(part->context);
}

/* Only devices have turns: the part of the CPU never has. */
static tddp_status reserve(void *data, const tddp_op *op, void **turn)
{
    const tddp_inner *part = &((const context *)data)->parts[TDDP_CUDA];
    return device_of(op) == TDDP_CUDA ? part->backend->reserve(part->context, op, turn) : TDDP_OK;
}

static void release(void *data, void *turn)
{
    const tddp_inner *part = &((const context *)data)->parts[TDDP_CUDA];
    part->backend->release(part->context, turn);
}

static void report_failure(void *data, tddp_status status, const char *text)
{
    const context *self = data;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        tddp_inner_report_failure(&self->parts[type], status, text);
    }
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    (void)wait;
    (void)out;
    return tddp_fail(TDDP_UNSUPPORTED,
                     "group \"%s\": a backend of several is opened part by part, not as one",
                     opts->group ? opts->group : "");
}

/* --- tables ---------------------------------------------------------------------------------- */

/*
 * The traits of the composite. TDDP_BACKEND_QUEUES of the device's part holds, since it concerns
 * only that part's memory; queued operations are not run, so that part doesn't limit
 * TDDP_BACKEND_RESUMES. Otherwise all parts must have a trait. Shared memory replaces parts, not
 * the composite.
 */
static uint32_t traits_of(const tddp_devices *self)
{
    const tddp_backend_v1 *for_cpu = self->inner[TDDP_CPU];
    const tddp_backend_v1 *for_cuda = self->inner[TDDP_CUDA];
    uint32_t queues = for_cuda ? for_cuda->traits & TDDP_BACKEND_QUEUES : 0;
    uint32_t run = TDDP_BACKEND_RESUMES;
    run &= for_cpu ? for_cpu->traits : run;
    run &= for_cuda && !(queues && for_cpu) ? for_cuda->traits : run;
    return queues | run;
}

void tddp_devices_fill(tddp_devices *self, const char *name)
{
    const tddp_backend_v1 *for_cpu = self->inner[TDDP_CPU];
    tddp_backend_v1 *table = &self->table;
    *table = (tddp_backend_v1){.abi = TDDP_BACKEND_ABI,
                               .size = sizeof *table,
                               .name = name,
                               .create = create,
                               .abort = abort_all,
                               .destroy = destroy,
                               .report_failure = report_failure,
                               .traits = traits_of(self),
                               .op_count = TDDP_OP_COUNT};
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        const tddp_backend_v1 *part = self->inner[type];
        if (!part) {
            continue;
        }
        table->device_types |= part->device_types;
        table->post = part->post ? post : table->post;
        table->finish = part->post ? tddp_inner_finish : table->finish;
        table->decline = part->decline ? decline : table->decline;
        table->resumes = part->resumes ? resumes : table->resumes;
        for (uint32_t kind = 0; kind < part->op_count && kind < TDDP_OP_COUNT; kind++) {
            table->run[kind] = part->run[kind] ? run : table->run[kind];
        }
    }
    if (table->traits & TDDP_BACKEND_QUEUES) {
        table->launch = tddp_inner_launch;
        table->order = tddp_inner_order;
        table->await = tddp_inner_await;
        table->launches_at_once = tddp_inner_launches_at_once;
    }
    const tddp_backend_v1 *for_cuda = self->inner[TDDP_CUDA];
    if (for_cuda && for_cuda->reserve) {
        table->reserve = reserve;
        table->release = release;
    }
    if (for_cpu && for_cpu->events && (!for_cuda || table->traits & TDDP_BACKEND_QUEUES)) {
        table->events = events;
    }
    if (for_cpu && for_cpu->allocate) {
        table->allocate = allocate;
        table->deallocate = for_cpu->deallocate;
    }
}

const tddp_devices *tddp_devices_of(const tddp_backend_v1 *backend)
{
    return backend->create == create ? (const tddp_devices *)backend : NULL;
}

static tddp_status fill_serving(tddp_wrapper *self)
{
    char *name =
        tddp_format("cpu:%s,cuda:%s", self->inner[TDDP_CPU]->name, self->inner[TDDP_CUDA]->name);
    if (!name) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_devices_fill(self, name);
    return TDDP_OK;
}

/* The serving table for the backends that serve the parts. */
static tddp_status table_for(const context *of, const tddp_backend_v1 **out)
{
    const tddp_backend_v1 *parts[TDDP_MAX_INNER] = {NULL};
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        parts[type] = of->parts[type].backend;
    }
    return tddp_wrapper_table(fill_serving, parts, out);
}

/* --- opening --------------------------------------------------------------------------------- */

/* Each part's ranks use their own prefix of the store. */
static tddp_status open_part(const tddp_devices *requested, tddp_device_type type,
                             const tddp_backend_opts *opts, const tddp_wait *wait, tddp_inner *into)
{
    const char *device = tddp_device_type_name(type);
    tddp_backend_opts part_opts = *opts;
    tddp_status status = tddp_prefix_store_create(device, opts->store, &into->store);
    if (status) {
        return status;
    }
    part_opts.store = into->store;
    const context *parent = opts->parent;
    part_opts.parent = parent ? parent->parts[type].context : NULL;
    status = tddp_backend_open_inner(requested->inner[type], &part_opts, wait, into);
    return status ? tddp_fail(status, "%s for %s: %s", requested->inner[type]->name, device,
                              tddp_error_message())
                  : TDDP_OK;
}

static tddp_status open_both(const tddp_devices *self, const tddp_backend_opts *opts,
                             const tddp_wait *wait, tddp_inner *out)
{
    context *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_status status = TDDP_OK;
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        tddp_backend_opts part_opts = *opts;
        part_opts.timeout_ms = tddp_deadline_poll_ms(deadline);
        tddp_wait left = {part_opts.timeout_ms, tddp_wait_cancel(wait)};
        status = open_part(self, (tddp_device_type)type, &part_opts, &left, &made->parts[type]);
    }
    const tddp_backend_v1 *serving = NULL;
    if (status == TDDP_OK) {
        status = table_for(made, &serving);
    }
    if (status) {
        destroy(made);
        return status;
    }
    out->backend = serving;
    out->context = made;
    return TDDP_OK;
}

tddp_status tddp_devices_open(const tddp_devices *self, const tddp_backend_opts *opts,
                              const tddp_wait *wait, tddp_inner *out)
{
    const tddp_backend_v1 *for_cpu = self->inner[TDDP_CPU];
    const tddp_backend_v1 *for_cuda = self->inner[TDDP_CUDA];
    if (for_cpu && for_cuda) {
        return open_both(self, opts, wait, out);
    }
    return tddp_backend_open_inner(for_cpu ? for_cpu : for_cuda, opts, wait, out);
}
