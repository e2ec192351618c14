/*
 * A group's contexts, one for each kind of device, behind one backend table. Threads: as
 * <tddp/backend.h> says.
 *
 * Invariant: every operation uses the part of its memory, a barrier the CPU's, the same on all
 * ranks. So each part gets its operations in one order, with increasing numbers. A serving table
 * describes the backends that serve the parts; there is one for each combination.
 */
#include <pthread.h>
#include <stdlib.h>

#include "backend/devices/devices.h"
#include "backend/open.h"
#include "base/base.h"

typedef struct context {
    const tddp_backend_v1 *parts[TDDP_DEVICE_TYPES]; /* the backends that serve */
    void *contexts[TDDP_DEVICE_TYPES];
    tddp_store *stores[TDDP_DEVICE_TYPES];
} context;

typedef struct request {
    tddp_device_type type;
    void *request; /* of the part */
} request;

/* Guards the lists of serving tables. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- operations ------------------------------------------------------------------------------ */

static tddp_device_type device_of(const tddp_op *op)
{
    return op->kind == TDDP_OP_BARRIER ? TDDP_CPU : op->input.device_type;
}

const tddp_backend_v1 *tddp_devices_part(void *data, const tddp_op *op, void **part_context)
{
    const context *self = data;
    tddp_device_type type = device_of(op);
    *part_context = self->contexts[type];
    return self->parts[type];
}

static tddp_status fail_unsupported(const tddp_backend_v1 *part, const tddp_op *op)
{
    return tddp_fail(TDDP_UNSUPPORTED, "backend %s, which serves %s memory here, has no %s",
                     part->name, tddp_device_type_name(device_of(op)), tddp_op_name(op->kind));
}

static tddp_status run(void *data, const tddp_op *op)
{
    void *part_context;
    const tddp_backend_v1 *part = tddp_devices_part(data, op, &part_context);
    if ((uint32_t)op->kind >= part->op_count || !part->run[op->kind]) {
        return fail_unsupported(part, op);
    }
    return part->run[op->kind](part_context, op);
}

static tddp_status post(void *data, const tddp_op *op, void **out)
{
    void *part_context;
    const tddp_backend_v1 *part = tddp_devices_part(data, op, &part_context);
    if (!part->post) {
        return fail_unsupported(part, op);
    }
    request *posted = tddp_alloc(sizeof *posted);
    if (!posted) {
        return TDDP_OUT_OF_MEMORY;
    }
    posted->type = device_of(op);
    tddp_status status = part->post(part_context, op, &posted->request);
    if (status) {
        free(posted);
        return status;
    }
    *out = posted;
    return TDDP_OK;
}

static tddp_status finish(void *data, void *pending, int *source)
{
    context *self = data;
    request posted = *(request *)pending;
    free(pending);
    return self->parts[posted.type]->finish(self->contexts[posted.type], posted.request, source);
}

/* For a part that queues operations on its device. */
static tddp_status launch(void *data, void *pending)
{
    context *self = data;
    const request *posted = pending;
    return self->parts[posted->type]->launch(self->contexts[posted->type], posted->request);
}

static tddp_status order(void *data, void *pending, void *stream)
{
    context *self = data;
    const request *posted = pending;
    return self->parts[posted->type]->order(self->contexts[posted->type], posted->request, stream);
}

static tddp_status await(void *data, void *pending)
{
    context *self = data;
    const request *posted = pending;
    return self->parts[posted->type]->await(self->contexts[posted->type], posted->request);
}

/* --- life cycle ------------------------------------------------------------------------------ */

static tddp_status decline(void *data, const tddp_wait *wait)
{
    context *self = data;
    tddp_status status = TDDP_OK;
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        if (self->parts[type]->decline) {
            status = self->parts[type]->decline(self->contexts[type], wait);
        }
    }
    return status;
}

static void abort_all(void *data)
{
    context *self = data;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        self->parts[type]->abort(self->contexts[type]);
    }
}

/* Some parts may not be open. */
static void destroy(void *data)
{
    context *self = data;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        if (self->parts[type]) {
            self->parts[type]->destroy(self->contexts[type]);
        }
        tddp_store_release(self->stores[type]);
    }
    free(self);
}

static tddp_status allocate(void *data, size_t bytes, void **handle, void **memory)
{
    context *self = data;
    return self->parts[TDDP_CPU]->allocate(self->contexts[TDDP_CPU], bytes, handle, memory);
}

static void report_failure(void *data, tddp_status status, const char *text)
{
    context *self = data;
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        if (self->parts[type]->report_failure) {
            self->parts[type]->report_failure(self->contexts[type], status, text);
        }
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
    const tddp_backend_v1 *for_cpu = self->parts[TDDP_CPU];
    const tddp_backend_v1 *for_cuda = self->parts[TDDP_CUDA];
    uint32_t queues = for_cuda ? for_cuda->traits & TDDP_BACKEND_QUEUES : 0;
    uint32_t run = TDDP_BACKEND_RESUMES;
    run &= for_cpu ? for_cpu->traits : run;
    run &= for_cuda && !(queues && for_cpu) ? for_cuda->traits : run;
    return queues | run;
}

void tddp_devices_fill(tddp_devices *self, const char *name)
{
    const tddp_backend_v1 *for_cpu = self->parts[TDDP_CPU];
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
        const tddp_backend_v1 *part = self->parts[type];
        if (!part) {
            continue;
        }
        table->device_types |= part->device_types;
        table->post = part->post ? post : table->post;
        table->finish = part->post ? finish : table->finish;
        table->decline = part->decline ? decline : table->decline;
        for (uint32_t kind = 0; kind < part->op_count && kind < TDDP_OP_COUNT; kind++) {
            table->run[kind] = part->run[kind] ? run : table->run[kind];
        }
    }
    if (table->traits & TDDP_BACKEND_QUEUES) {
        table->launch = launch;
        table->order = order;
        table->await = await;
    }
    if (for_cpu && for_cpu->allocate) {
        table->allocate = allocate;
        table->deallocate = for_cpu->deallocate;
    }
}

tddp_devices *tddp_devices_of(const tddp_backend_v1 *backend)
{
    return backend->create == create ? (tddp_devices *)backend : NULL;
}

static tddp_devices *find(tddp_devices *self, const context *of)
{
    tddp_devices *each = self->serving;
    while (each && (each->parts[TDDP_CPU] != of->parts[TDDP_CPU] ||
                    each->parts[TDDP_CUDA] != of->parts[TDDP_CUDA])) {
        each = each->next;
    }
    return each;
}

/* With the lock held. */
static tddp_status add(tddp_devices *self, const context *of, tddp_devices **out)
{
    tddp_devices *made = tddp_alloc(sizeof *made);
    char *name =
        made ? tddp_format("cpu:%s,cuda:%s", of->parts[TDDP_CPU]->name, of->parts[TDDP_CUDA]->name)
             : NULL;
    if (!name) {
        free(made);
        return TDDP_OUT_OF_MEMORY;
    }
    made->parts[TDDP_CPU] = of->parts[TDDP_CPU];
    made->parts[TDDP_CUDA] = of->parts[TDDP_CUDA];
    tddp_devices_fill(made, name);
    made->next = self->serving;
    self->serving = made;
    *out = made;
    return TDDP_OK;
}

/* The serving table for the backends that serve the parts. */
static tddp_status table_for(tddp_devices *self, const context *of, const tddp_backend_v1 **out)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock);
    tddp_devices *found = find(self, of);
    if (!found) {
        status = add(self, of, &found);
    }
    pthread_mutex_unlock(&lock);
    if (status == TDDP_OK) {
        *out = &found->table;
    }
    return status;
}

/* --- opening --------------------------------------------------------------------------------- */

/* Each part's ranks use their own prefix of the store. */
static tddp_status open_part(const tddp_devices *requested, tddp_device_type type,
                             const tddp_backend_opts *opts, const tddp_wait *wait, context *into)
{
    const char *device = tddp_device_type_name(type);
    tddp_backend_opts part_opts = *opts;
    tddp_status status = tddp_prefix_store_create(device, opts->store, &into->stores[type]);
    if (status) {
        return status;
    }
    part_opts.store = into->stores[type];
    const context *parent = opts->parent;
    part_opts.parent = parent ? parent->contexts[type] : NULL;
    status = tddp_backend_open(requested->parts[type], &part_opts, wait, &into->parts[type],
                               &into->contexts[type]);
    return status ? tddp_fail(status, "%s for %s: %s", requested->parts[type]->name, device,
                              tddp_error_message())
                  : TDDP_OK;
}

static tddp_status open_both(tddp_devices *self, const tddp_backend_opts *opts,
                             const tddp_wait *wait, const tddp_backend_v1 **serving, void **out)
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
        status = open_part(self, (tddp_device_type)type, &part_opts, &left, made);
    }
    if (status == TDDP_OK) {
        status = table_for(self, made, serving);
    }
    if (status) {
        char *text = tddp_copy_string(tddp_error_message());
        destroy(made);
        (void)tddp_fail(status, "%s", text ? text : tddp_status_text(status));
        free(text);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_devices_open(tddp_devices *self, const tddp_backend_opts *opts,
                              const tddp_wait *wait, const tddp_backend_v1 **serving,
                              void **context_out)
{
    const tddp_backend_v1 *for_cpu = self->parts[TDDP_CPU];
    const tddp_backend_v1 *for_cuda = self->parts[TDDP_CUDA];
    if (for_cpu && for_cuda) {
        return open_both(self, opts, wait, serving, context_out);
    }
    return tddp_backend_open(for_cpu ? for_cpu : for_cuda, opts, wait, serving, context_out);
}
