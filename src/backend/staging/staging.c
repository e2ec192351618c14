/*
 * The table, the context, and an operation on copies: memory for them, the copies in, the inner
 * backend's operation, the copies out. Copies go on the buffers' own streams, so that they follow
 * the work that the program enqueued there before. Threads: as <tddp/backend.h> says.
 *
 * Invariants: collectives run one at a time, so one interrupted collective at most is staged; it is
 * the next one that runs. What a rank doesn't send isn't copied in, and what it doesn't receive
 * isn't copied out. Memory with copies that are not known to have ended is not used again.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "backend/staging/staging.h"

enum {
    LINE = 64,         /* what is received begins at a cache line */
    QUICK_POLLS = 200, /* most copies complete within these */
    SLEEP_NS = 50 * 1000,
    MAX_SLEEP_NS = 1000 * 1000,
};

struct staged;

typedef struct staging {
    tddp_backend_v1 table;
    tddp_inner inner;
    const char *name; /* the requested backend's */
    int rank;
    int world_size;
    atomic_bool aborted;
    tddp_staging_pool *pool;
    struct staged *running; /* the collective that runs, or was interrupted; NULL: none */
} staging;

typedef enum stage {
    NEW,
    COPYING_IN,
    READY, /* for the inner backend, or with it */
    COPYING_OUT,
} stage;

/* An operation on copies; of a message, the request. Used by one thread at a time. */
typedef struct staged {
    staging *owner;
    const tddp_cuda *cuda;
    const tddp_op *requested;  /* on the caller's memory */
    tddp_staging_block *block; /* first what is sent; NULL: there is nothing to copy */
    size_t received;           /* where what is received begins in it */
    int device;
    int64_t deadline;
    stage stage;
    bool alerts;        /* the end of these copies will be an event */
    tddp_op op;         /* the inner backend's */
    void *request;      /* likewise, of what was posted */
    int source;         /* of a message whose copy out may be interrupted */
    tddp_buffer *parts; /* of `op` */
} staged;

/* --- what is copied -------------------------------------------------------------------------- */

static bool sends(const staging *owner, const tddp_op *op)
{
    bool at_root = op->root == owner->rank;
    bool only_root = op->kind == TDDP_OP_BROADCAST || op->kind == TDDP_OP_SCATTER;
    return op->kind != TDDP_OP_RECV && (!only_root || at_root);
}

static bool receives(const staging *owner, const tddp_op *op)
{
    bool at_root = op->root == owner->rank;
    bool only_root = op->kind == TDDP_OP_REDUCE || op->kind == TDDP_OP_GATHER;
    bool only_others = op->kind == TDDP_OP_BROADCAST;
    return op->kind != TDDP_OP_SEND && (!only_root || at_root) && (!only_others || !at_root);
}

/* Whether what is received replaces what is sent. */
static bool in_place(const tddp_op *op)
{
    return op->bundled > 0 || (op->input.data == op->output.data &&
                               op->input.count == op->output.count && !op->output_parts);
}

/* One side's buffers: contiguous parts as one. The device is current. */
static tddp_status copy_side(const staged *self, bool inwards)
{
    const tddp_op *op = self->requested;
    const tddp_buffer *whole = inwards ? &op->input : &op->output;
    const bool listed = op->bundled > 0 || !inwards;
    const tddp_buffer *parts = listed ? op->output_parts : op->input_parts;
    const size_t count = op->bundled > 0 ? op->bundled : (size_t)self->owner->world_size;
    char *host = self->block->data + (inwards ? 0 : self->received);
    if (whole->data || !parts) {
        return tddp_staging_copy(self->block, host, whole, inwards);
    }
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = tddp_staging_copy(self->block, host, &parts[i], inwards);
        host += tddp_buffer_bytes(&parts[i]);
    }
    return status;
}

static tddp_status start_copies(staged *self, bool inwards)
{
    const bool any =
        inwards ? sends(self->owner, self->requested) : receives(self->owner, self->requested);
    if (!self->block || !any) {
        return TDDP_OK;
    }
    self->alerts = false;
    return tddp_staging_copies_mark(self->block, copy_side(self, inwards));
}

static tddp_status fail_timeout(const staged *self)
{
    return tddp_fail(TDDP_TIMEOUT, "the copy %s cuda:%d has not ended within %" PRId64 " ms: %s",
                     self->stage == COPYING_IN ? "to the host from" : "from the host to",
                     self->device, self->requested->timeout_ms,
                     "what its stream was given before lasts longer, or the device hangs");
}

/* Polls the copies until they end, the operation times out, the context is aborted, or the wait is
 * interrupted: then their end is an event. */
static tddp_status await_copies(staged *self)
{
    const tddp_cancel *cancel = self->requested->cancel;
    tddp_staging_block *block = self->block;
    long sleep_ns = SLEEP_NS;
    for (int polls = 0; block && block->copying; polls++) {
        tddp_cuda_error error = self->cuda->cudaEventQuery(block->event);
        if (error != TDDP_CUDA_NOT_READY) {
            block->copying = error != TDDP_CUDA_SUCCESS;
            return tddp_cuda_check(self->cuda, error, "cudaEventQuery");
        }
        (void)self->cuda->cudaGetLastError();
        if (atomic_load(&self->owner->aborted)) {
            return tddp_fail(TDDP_GROUP_FAILED, "aborted while memory of cuda:%d was copied",
                             self->device);
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            if (!self->alerts) {
                tddp_staging_pool_alert(self->owner->pool, block);
                self->alerts = true;
            }
            return tddp_fail(TDDP_CANCELED, "interrupted while memory of cuda:%d was copied",
                             self->device);
        }
        if (tddp_now_ns() >= self->deadline) {
            return fail_timeout(self);
        }
        if (polls < QUICK_POLLS) {
            (void)sched_yield();
        } else {
            (void)nanosleep(&(struct timespec){0, sleep_ns}, NULL);
            sleep_ns = 2 * sleep_ns < MAX_SLEEP_NS ? 2 * sleep_ns : MAX_SLEEP_NS;
        }
    }
    return TDDP_OK;
}

/* --- the inner backend's operation ----------------------------------------------------------- */

/* A buffer, or each of a list, as its copy; these lie end to end. */
static tddp_buffer moved(const staged *self, tddp_buffer buffer, size_t at)
{
    buffer.device_type = TDDP_CPU;
    buffer.device_index = 0;
    buffer.stream = NULL;
    buffer.data = buffer.count > 0 ? self->block->data + at : NULL;
    return buffer;
}

static const tddp_buffer *moved_parts(const staged *self, const tddp_buffer *from, size_t at,
                                      tddp_buffer *into)
{
    for (int rank = 0; from && rank < self->owner->world_size; rank++) {
        into[rank] = moved(self, from[rank], at);
        at += tddp_buffer_bytes(&from[rank]);
    }
    return from ? into : NULL;
}

/* A list of buffers that are reduced is a single one there. */
static tddp_status translate(staged *self)
{
    const tddp_op *from = self->requested;
    const size_t world = (size_t)self->owner->world_size;
    tddp_op *op = &self->op;
    *op = *from;
    op->prepared = NULL;
    op->bundled = 0;
    op->input = moved(self, from->input, 0);
    op->output = from->bundled > 0 ? op->input : moved(self, from->output, self->received);
    op->output_parts = NULL;
    if (from->bundled > 0 || (!from->input_parts && !from->output_parts)) {
        return TDDP_OK;
    }
    self->parts = tddp_alloc_array(2 * world, sizeof *self->parts);
    if (!self->parts) {
        return TDDP_OUT_OF_MEMORY;
    }
    op->input_parts = moved_parts(self, from->input_parts, 0, self->parts);
    op->output_parts = moved_parts(self, from->output_parts, self->received, self->parts + world);
    return TDDP_OK;
}

/* With the remaining time, and what the operation that was asked for has by now. */
static const tddp_op *inner_op(staged *self)
{
    int64_t left = (self->deadline - tddp_now_ns()) / TDDP_NS_PER_MS;
    self->op.sequence = self->requested->sequence;
    self->op.cancel = self->requested->cancel;
    self->op.awaited = self->requested->awaited;
    self->op.timeout_ms = left > 0 ? left : 1;
    return &self->op;
}

/* --- the steps ------------------------------------------------------------------------------- */

static tddp_status create_staged(staging *owner, const tddp_op *op, staged **out)
{
    const tddp_cuda *cuda;
    tddp_status status = tddp_cuda_get(&cuda);
    if (status) {
        return status;
    }
    staged *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->owner = owner;
    self->cuda = cuda;
    self->requested = op;
    self->device = op->input.device_index;
    self->deadline = tddp_deadline_after_ms(op->timeout_ms);
    *out = self;
    return TDDP_OK;
}

/* Allocates everything and starts the copies. The device is current. */
static tddp_status begin(staged *self)
{
    const tddp_op *op = self->requested;
    const size_t sent = tddp_buffer_bytes(&op->input);
    size_t bytes = sent;
    if (!in_place(op)) {
        self->received = (sent + LINE - 1) / LINE * LINE;
        bytes = self->received + tddp_buffer_bytes(&op->output);
    }
    tddp_status status = bytes > 0 ? tddp_staging_pool_take(self->owner->pool, self->cuda,
                                                            self->device, bytes, &self->block)
                                   : TDDP_OK;
    status = status ? status : translate(self);
    return status ? status : start_copies(self, true);
}

/* Goes to this stage from the one before it, and waits for the copies; continues after
 * TDDP_CANCELED. */
static tddp_status copy(staged *self, stage copying)
{
    tddp_cuda_place before;
    tddp_status status = tddp_cuda_enter(self->cuda, self->device, &before);
    if (status) {
        return status;
    }
    if (self->stage < copying) {
        self->stage = copying;
        status = copying == COPYING_IN ? begin(self) : start_copies(self, false);
    }
    status = status ? status : await_copies(self);
    tddp_cuda_leave(self->cuda, &before);
    return status;
}

static tddp_status copy_in(staged *self)
{
    tddp_status status = self->stage < READY ? copy(self, COPYING_IN) : TDDP_OK;
    if (status == TDDP_OK && self->stage < READY) {
        self->stage = READY;
    }
    return status;
}

static tddp_status copy_out(staged *self)
{
    return self->block ? copy(self, COPYING_OUT) : TDDP_OK;
}

/* The operation has ended with this status. One that was refused doesn't use the copies; one that
 * failed may, on a peer or a device, until the inner context is destroyed. */
static void end_staged(staged *self, tddp_status status)
{
    const bool refused = status == TDDP_INVALID_ARGUMENT || status == TDDP_UNSUPPORTED;
    if (self->block) {
        tddp_staging_pool_return(self->owner->pool, self->block,
                                 (status == TDDP_OK || refused) && !self->block->copying);
    }
    free(self->parts);
    free(self);
}

/* --- the slots ------------------------------------------------------------------------------- */

static tddp_status check(void *context, tddp_op_kind kind, const tddp_buffer *buffer)
{
    const staging *self = context;
    const tddp_cuda *cuda;
    int capture = TDDP_CUDA_NO_CAPTURE;
    tddp_cuda_place before;
    if (tddp_cuda_get(&cuda)) {
        return tddp_fail(TDDP_UNSUPPORTED,
                         "%s: backend %s takes no %s memory, and it cannot be copied: %s",
                         tddp_op_name(kind), self->name, tddp_device_type_name(buffer->device_type),
                         tddp_error_message());
    }
    if (tddp_cuda_enter(cuda, buffer->device_index, &before)) {
        return TDDP_OK; /* the operation fails with that, and its peers learn of it */
    }
    tddp_cuda_error error = cuda->cudaStreamIsCapturing(buffer->stream, &capture);
    tddp_cuda_leave(cuda, &before);
    if (error == TDDP_CUDA_SUCCESS && capture == TDDP_CUDA_NO_CAPTURE) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_UNSUPPORTED,
                     "%s: a CUDA graph is being captured, and backend %s copies cuda memory "
                     "through the host's, which a graph cannot do: use nccl, or call it outside "
                     "of the graph",
                     tddp_op_name(kind), self->name);
}

static tddp_status run_staged(staged *self)
{
    const tddp_inner *inner = &self->owner->inner;
    tddp_status status = copy_in(self);
    if (status == TDDP_OK && self->stage == READY) {
        status = inner->backend->run[self->op.kind](inner->context, inner_op(self));
    }
    return status ? status : copy_out(self);
}

static tddp_status run(void *context, const tddp_op *op)
{
    staging *self = context;
    tddp_status status = self->running ? TDDP_OK : create_staged(self, op, &self->running);
    if (status) {
        return status;
    }
    self->running->requested = op;
    status = run_staged(self->running);
    if (status != TDDP_CANCELED) {
        end_staged(self->running, status);
        self->running = NULL;
    }
    return status;
}

static tddp_status prepare(void *context, const tddp_op *op, void **prepared)
{
    staged *made;
    tddp_status status = create_staged(context, op, &made);
    if (status) {
        return status;
    }
    status = copy_in(made);
    if (status) {
        end_staged(made, status);
        return status;
    }
    *prepared = made;
    return TDDP_OK;
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    const tddp_inner *inner = &((const staging *)context)->inner;
    staged *made = op->prepared;
    tddp_status status = inner->backend->post(inner->context, inner_op(made), &made->request);
    if (status) {
        end_staged(made, status);
        return status;
    }
    *request = made;
    return TDDP_OK;
}

/* The copy out, which follows all that the caller's stream was given before, is interrupted and
 * resumed like the message: the thread that calls it may serve other operations too. */
static tddp_status finish(void *context, void *request, int *source)
{
    const tddp_inner *inner = &((const staging *)context)->inner;
    staged *self = request;
    (void)inner_op(self); /* with the token of this call */
    tddp_status status = self->stage < COPYING_OUT
                             ? inner->backend->finish(inner->context, self->request, &self->source)
                             : TDDP_OK;
    status = status ? status : copy_out(self);
    if (status != TDDP_CANCELED) {
        *source = self->source;
        end_staged(self, status);
    }
    return status;
}

/* The inner context is aborted by itself. */
static void abort_copies(void *context)
{
    atomic_store(&((staging *)context)->aborted, true);
}

static void destroy(void *context)
{
    staging *self = context;
    if (self->running) {
        end_staged(self->running, TDDP_GROUP_CLOSED);
    }
    tddp_staging_pool_stop(self->pool);
    tddp_inner_close(&self->inner);
    tddp_staging_pool_free(self->pool);
    free(self);
}

static tddp_eventcount *events(void *context)
{
    const tddp_inner *inner = &((const staging *)context)->inner;
    return inner->backend->events(inner->context);
}

static int resumes(void *context, const tddp_op *op)
{
    const tddp_inner *inner = &((const staging *)context)->inner;
    return inner->backend->resumes(inner->context, op);
}

/* --- the table ------------------------------------------------------------------------------- */

static void fill(staging *self)
{
    const tddp_backend_v1 *inner = self->inner.backend;
    tddp_backend_v1 *table = &self->table;
    *table = (tddp_backend_v1){
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof *table,
        .name = inner->name,
        .device_types = 1u << TDDP_CUDA,
        .abort = abort_copies,
        .destroy = destroy,
        .post = inner->post ? post : NULL,
        .finish = inner->post ? finish : NULL,
        .traits = inner->traits,
        .check = check,
        .prepare = prepare,
        .events = inner->events ? events : NULL,
        .resumes = inner->resumes ? resumes : NULL,
        .op_count = TDDP_OP_COUNT,
    };
    for (uint32_t kind = 0; kind < inner->op_count && kind < TDDP_OP_COUNT; kind++) {
        table->run[kind] = inner->run[kind] ? run : NULL;
    }
}

bool tddp_staging_is_needed(const tddp_backend_v1 *backend)
{
    const uint32_t types = backend->device_types;
    return (types >> TDDP_CPU & 1u) != 0 && (types >> TDDP_CUDA & 1u) == 0;
}

tddp_status tddp_staging_open(const tddp_inner *inner, const char *name,
                              const tddp_backend_opts *opts, tddp_inner *out)
{
    const tddp_backend_v1 *backend = inner->backend;
    tddp_eventcount *counted = backend->events ? backend->events(inner->context) : NULL;
    staging *self = tddp_alloc(sizeof *self);
    tddp_status status = self ? tddp_staging_pool_create(counted, &self->pool) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(self);
        return status;
    }
    self->inner = *inner;
    self->name = name;
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    fill(self);
    *out = (tddp_inner){.backend = &self->table, .context = self};
    return TDDP_OK;
}
