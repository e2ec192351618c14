/*
 * The table and the context. Threads: as <tddp/backend.h> says.
 *
 * Invariant: collectives run one at a time, so one interrupted collective at most is staged; it is
 * the next one that runs. Copies end before the inner context is destroyed, or their memory is kept
 * until then.
 */
#include <stdlib.h>

#include "backend/staging/staging.h"

static const uint32_t BOTH = 1u << TDDP_CPU | 1u << TDDP_CUDA;

static const tddp_inner *inner_of(void *context)
{
    return &((const tddp_staging *)context)->inner;
}

/* Whether operations on copies are launched, since the copies are on a device. */
static bool launches(const tddp_staging *self)
{
    return self->inner.backend->launches != 0;
}

/* --- whether memory can be copied ------------------------------------------------------------ */

static tddp_status check_capture(const tddp_staging *self, const tddp_cuda *cuda, const char *name,
                                 const tddp_buffer *buffer)
{
    int capture = TDDP_CUDA_NO_CAPTURE;
    tddp_cuda_place before;
    if (tddp_cuda_enter(cuda, buffer->device_index, &before)) {
        return TDDP_OK; /* the operation fails with that, and its peers learn of it */
    }
    tddp_cuda_error error = cuda->cudaStreamIsCapturing(buffer->stream, &capture);
    tddp_cuda_leave(cuda, &before);
    if (error == TDDP_CUDA_SUCCESS && capture == TDDP_CUDA_NO_CAPTURE) {
        return TDDP_OK;
    }
    return tddp_fail(
        TDDP_UNSUPPORTED,
        "%s: a CUDA graph is being captured, and backend %s copies cuda memory through "
        "the host's, which a graph cannot do: use nccl, or call it outside of the "
        "graph",
        name, self->name);
}

/* A context without a device of its own copies to the one that is current for its first caller. */
static void choose_device(tddp_staging *self, const tddp_cuda *cuda)
{
    int none = -1;
    int device = 0;
    if (atomic_load(&self->device) < 0 && cuda->cudaGetDevice(&device) == 0) {
        (void)atomic_compare_exchange_strong(&self->device, &none, device);
    }
}

tddp_status tddp_staging_check(void *context, tddp_op_kind kind, const tddp_buffer *buffer)
{
    tddp_staging *self = context;
    const tddp_cuda *cuda;
    if (tddp_cuda_get(&cuda)) {
        return tddp_fail(TDDP_UNSUPPORTED,
                         "%s: backend %s takes no %s memory, and it cannot be copied: %s",
                         tddp_op_name(kind), self->name, tddp_device_type_name(buffer->device_type),
                         tddp_error_message());
    }
    if (buffer->device_type == TDDP_CPU) {
        choose_device(self, cuda);
        return TDDP_OK;
    }
    return check_capture(self, cuda, tddp_op_name(kind), buffer);
}

/* --- collectives ----------------------------------------------------------------------------- */

static tddp_status run_staged(tddp_staged *staged)
{
    tddp_status status = tddp_staged_copy_in(staged);
    if (status == TDDP_OK && staged->stage == TDDP_STAGING_READY) {
        const tddp_inner *inner = &staged->owner->inner;
        status = inner->backend->run[staged->op.kind](inner->context, tddp_staged_inner_op(staged));
    }
    return status ? status : tddp_staged_copy_out(staged);
}

static tddp_status run(void *context, const tddp_op *op)
{
    tddp_staging *self = context;
    tddp_status status = self->running ? TDDP_OK : tddp_staged_create(self, op, &self->running);
    if (status) {
        return status;
    }
    self->running->requested = op;
    self->running->cancel = op->cancel;
    status = run_staged(self->running);
    if (status != TDDP_CANCELED) {
        tddp_staged_end(self->running, status);
        self->running = NULL;
    }
    return status;
}

/* --- requests -------------------------------------------------------------------------------- */

static tddp_status prepare(void *context, const tddp_op *op, void **prepared)
{
    tddp_staging *self = context;
    tddp_staged *staged;
    tddp_status status = tddp_staged_create(self, op, &staged);
    if (status) {
        return status;
    }
    status = tddp_staged_copy_in(staged);
    if (status) {
        tddp_staged_end(staged, status);
        return status;
    }
    *prepared = staged;
    return TDDP_OK;
}

/* The request is the staged operation. */
static tddp_status post(void *context, const tddp_op *op, void **request)
{
    const tddp_inner *inner = inner_of(context);
    void *prepared = op->prepared;
    tddp_status status = launches(context) ? prepare(context, op, &prepared) : TDDP_OK;
    if (status) {
        return status;
    }
    tddp_staged *staged = prepared;
    status = inner->backend->post(inner->context, tddp_staged_inner_op(staged), &staged->request);
    if (status) {
        tddp_staged_end(staged, status);
        return status;
    }
    *request = staged;
    return TDDP_OK;
}

static tddp_status finish_launched(tddp_staged *staged, int *source)
{
    const tddp_inner *inner = &staged->owner->inner;
    tddp_status status = inner->backend->finish(inner->context, staged->request, source);
    tddp_staged_end(staged, staged->outcome);
    return status;
}

/* With events the thread that calls it serves other operations too: the copy out, which follows
 * all that the caller's stream was given before, is interrupted and resumed like the message. */
static tddp_status finish_message(tddp_staged *staged, int *source)
{
    const tddp_inner *inner = &staged->owner->inner;
    const bool resumes = inner->backend->events != NULL;
    tddp_status status = TDDP_OK;
    if (staged->stage < TDDP_STAGING_COPYING_OUT) {
        status = inner->backend->finish(inner->context, staged->request, &staged->source);
    }
    if (status == TDDP_OK) {
        staged->cancel = resumes ? staged->requested->cancel : NULL;
        status = tddp_staged_copy_out(staged);
    }
    if (status == TDDP_CANCELED && resumes) {
        return status; /* it will be called again */
    }
    *source = staged->source;
    tddp_staged_end(staged, status);
    return status;
}

static tddp_status finish(void *context, void *request, int *source)
{
    tddp_staged *staged = request;
    (void)tddp_staged_inner_op(staged); /* with the token of this call */
    return launches(context) ? finish_launched(staged, source) : finish_message(staged, source);
}

static tddp_status launch(void *context, void *const *requests, size_t count)
{
    const tddp_inner *inner = inner_of(context);
    void **theirs = tddp_alloc_array(count, sizeof *theirs);
    if (!theirs) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        tddp_staged *staged = requests[i];
        (void)tddp_staged_inner_op(staged);  /* with its number, and the token of this call */
        staged->outcome = TDDP_GROUP_FAILED; /* until test() finds it complete */
        theirs[i] = staged->request;
    }
    tddp_status status = inner->backend->launch(inner->context, theirs, count);
    free(theirs);
    for (size_t i = 0; i < count && status; i++) {
        ((tddp_staged *)requests[i])->outcome = status;
    }
    return status;
}

static tddp_status order(void *context, void *request, void *stream)
{
    const tddp_inner *inner = inner_of(context);
    return inner->backend->order(inner->context, ((const tddp_staged *)request)->request, stream);
}

/* The result is copied once the device has it. */
static tddp_status test(void *context, void *request, int *complete)
{
    static const tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    const tddp_inner *inner = inner_of(context);
    tddp_staged *staged = request;
    int ended = staged->stage == TDDP_STAGING_COPYING_OUT;
    tddp_status status =
        ended ? TDDP_OK : inner->backend->test(inner->context, staged->request, &ended);
    if (status == TDDP_OK && ended) {
        staged->cancel = &at_once;
        status = tddp_staged_copy_out(staged);
        ended = status == TDDP_OK;
        staged->outcome = status;
        status = status == TDDP_CANCELED ? TDDP_OK : status;
    }
    *complete = ended;
    return status;
}

/* --- life cycle ------------------------------------------------------------------------------ */

/* The inner context is aborted by itself. */
static void abort_copies(void *context)
{
    tddp_staging *self = context;
    atomic_store(&self->aborted, true);
}

static void destroy(void *context)
{
    tddp_staging *self = context;
    if (self->running) {
        tddp_staged_end(self->running, TDDP_GROUP_CLOSED);
    }
    tddp_staging_alarm_end(self->alarm);
    tddp_inner_close(&self->inner);
    tddp_staging_block_pool_free(&self->block_pool);
    free(self);
}

static tddp_eventcount *events(void *context)
{
    const tddp_inner *inner = inner_of(context);
    return inner->backend->events(inner->context);
}

/* --- the table ------------------------------------------------------------------------------- */

static void fill(tddp_staging *self)
{
    const tddp_backend_v1 *inner = self->inner.backend;
    tddp_backend_v1 *table = &self->table;
    *table = (tddp_backend_v1){
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof *table,
        .name = inner->name,
        .device_types = BOTH & ~inner->device_types,
        .abort = abort_copies,
        .destroy = destroy,
        .post = inner->post ? post : NULL,
        .finish = inner->post ? finish : NULL,
        .traits = inner->traits,
        .launches = inner->launches,
        .launch = inner->launches ? launch : NULL,
        .order = inner->launches ? order : NULL,
        .test = inner->launches ? test : NULL,
        .prepare = inner->launches ? NULL : prepare,
        .events = inner->events ? events : NULL,
        .op_count = TDDP_OP_COUNT,
    };
    for (uint32_t kind = 0; kind < inner->op_count && kind < TDDP_OP_COUNT; kind++) {
        table->run[kind] = inner->run[kind] ? run : NULL;
    }
}

bool tddp_staging_is_needed(const tddp_backend_v1 *backend)
{
    uint32_t supported = backend->device_types & BOTH;
    return supported != 0 && supported != BOTH;
}

tddp_status tddp_staging_open(const tddp_inner *inner, const char *name,
                              const tddp_backend_opts *opts, tddp_inner *out)
{
    tddp_staging *self = tddp_alloc(sizeof *self);
    tddp_status status = self ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && inner->backend->events) {
        status = tddp_staging_alarm_create(inner->backend->events(inner->context), &self->alarm);
    }
    if (status) {
        free(self);
        return status;
    }
    self->inner = *inner;
    self->name = name;
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    atomic_init(&self->device, opts->device_index);
    pthread_mutex_init(&self->block_pool.mutex, NULL);
    fill(self);
    *out = (tddp_inner){.backend = &self->table, .context = self};
    return TDDP_OK;
}
