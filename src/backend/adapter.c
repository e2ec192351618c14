/*
 * Serves a backend whose run() and finish() return only with the outcome by a table like that of
 * one with events(): each such call is made on a thread of its own (blocking.h), while run() and
 * finish() here wait for it as long as they may, and are called again.
 *
 * Invariant: a call is done only once its thread uses nothing of the context any more, since the
 * thread that finds it done may destroy that: the lock is held from `done` to the event.
 */
#include <stdlib.h>

#include <tddp/cuda.h>

#include "backend/blocking.h"
#include "backend/wrapper.h"
#include "base/base.h"

/* Between looks at a cancel token, which counts no event. */
#define TOKEN_CHECK_NS (20 * TDDP_NS_PER_MS)

/* A collective, or a message from its post to its end. */
typedef struct call {
    tddp_blocking_call thread;
    tddp_op op; /* without a token: what uses it can't be interrupted */
    const tddp_op *requested;
    void *request; /* a message's, of the backend beneath */
    int source;
    bool started;
    bool done; /* with the lock; what follows is then set */
    tddp_status status;
    char *text;
} call;

typedef struct adapter {
    tddp_inner inner;
    tddp_backend_v1 table;
    tddp_eventcount *events;
    tddp_eventcount own;
    pthread_mutex_t mutex;
    call collective; /* the one under way, if it is started */
} adapter;

static void execute(void *context, void *data)
{
    adapter *self = context;
    const tddp_inner *inner = &self->inner;
    call *it = data;
    it->status = tddp_op_is_p2p(it->op.kind)
                     ? inner->backend->finish(inner->context, it->request, &it->source)
                     : inner->backend->run[it->op.kind](inner->context, &it->op);
    it->text = it->status ? tddp_copy_string(tddp_error_message()) : NULL;
    pthread_mutex_lock(&self->mutex);
    it->done = true;
    tddp_eventcount_notify(self->events);
    pthread_mutex_unlock(&self->mutex);
}

static void execute_on_thread(void *context, void *data)
{
    tddp_cuda_keep_device();
    execute(context, data);
}

/* Without a thread to be had, a caller that may wait to the end makes the call itself; for others
 * that is tried again. */
static void start(adapter *self, call *it)
{
    const bool limited = tddp_cancel_deadline(it->requested->cancel) < INT64_MAX;
    if (it->requested->cancel && tddp_blocking_reserve() == TDDP_OK) {
        it->started = true;
        it->thread = (tddp_blocking_call){.run = execute_on_thread, .context = self, .data = it};
        tddp_blocking_start(&it->thread);
    } else if (!limited) {
        it->started = true;
        execute(self, it);
    }
}

static bool is_done(adapter *self, const call *it)
{
    pthread_mutex_lock(&self->mutex);
    const bool done = it->done;
    pthread_mutex_unlock(&self->mutex);
    return done;
}

/* False: the token of the operation was triggered first. */
static bool await(adapter *self, call *it)
{
    const tddp_cancel *cancel = it->requested->cancel;
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(self->events);
        if (!it->started) {
            start(self, it);
        }
        if (is_done(self, it)) {
            return true;
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            return false;
        }
        const int64_t left = tddp_cancel_deadline(cancel) - tddp_now_ns();
        tddp_eventcount_wait(self->events, seen, 0, left < TOKEN_CHECK_NS ? left : TOKEN_CHECK_NS);
    }
}

static tddp_status interrupted(const call *it)
{
    return tddp_fail(TDDP_CANCELED, "%s: interrupted", tddp_op_name(it->op.kind));
}

/* Of a call that is done. */
static tddp_status outcome(call *it)
{
    if (it->status) {
        (void)tddp_fail(it->status, "%s", it->text ? it->text : tddp_status_text(it->status));
    }
    free(it->text);
    return it->status;
}

/* --- the slots ------------------------------------------------------------------------------- */

static call made_of(const tddp_op *op)
{
    call made = {.op = *op, .requested = op, .source = TDDP_ANY_SOURCE};
    made.op.cancel = NULL;
    return made;
}

static tddp_status run(void *context, const tddp_op *op)
{
    adapter *self = context;
    call *it = &self->collective;
    if (!it->started) {
        *it = made_of(op);
    }
    it->requested = op;
    if (!await(self, it)) {
        return interrupted(it);
    }
    it->started = false;
    return outcome(it);
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    const tddp_inner *inner = &((const adapter *)context)->inner;
    call *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    *made = made_of(op);
    tddp_status status = inner->backend->post(inner->context, &made->op, &made->request);
    if (status) {
        free(made);
    } else {
        *request = made;
    }
    return status;
}

static tddp_status finish(void *context, void *request, int *source)
{
    call *it = request;
    if (!await(context, it)) {
        return interrupted(it);
    }
    const tddp_status status = outcome(it);
    *source = it->source;
    free(it);
    return status;
}

static void abort_inner(void *context)
{
    tddp_inner_abort(&((const adapter *)context)->inner);
}

static void destroy(void *context)
{
    adapter *self = context;
    tddp_inner_close(&self->inner);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static tddp_status allocate(void *context, size_t bytes, void **handle, void **data)
{
    const tddp_inner *inner = &((const adapter *)context)->inner;
    return inner->backend->allocate(inner->context, bytes, handle, data);
}

static void report_failure(void *context, tddp_status status, const char *text)
{
    tddp_inner_report_failure(&((const adapter *)context)->inner, status, text);
}

static tddp_status check_peer(void *context, int rank)
{
    const tddp_inner *inner = &((const adapter *)context)->inner;
    return inner->backend->check_peer(inner->context, rank);
}

static tddp_eventcount *events(void *context)
{
    return ((const adapter *)context)->events;
}

/* --- contexts -------------------------------------------------------------------------------- */

static void fill(tddp_backend_v1 *table, const tddp_backend_v1 *inner)
{
    *table = (tddp_backend_v1){
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof *table,
        .name = inner->name,
        .device_types = inner->device_types,
        .abort = abort_inner,
        .destroy = destroy,
        .post = inner->post ? post : NULL,
        .finish = inner->finish ? finish : NULL,
        .traits = inner->traits,
        .allocate = inner->allocate ? allocate : NULL,
        .deallocate = inner->deallocate,
        .report_failure = report_failure,
        .events = events,
        .check_peer = inner->check_peer ? check_peer : NULL,
        .op_count = TDDP_OP_COUNT,
    };
    for (uint32_t kind = 0; kind < inner->op_count && kind < TDDP_OP_COUNT; kind++) {
        table->run[kind] = inner->run[kind] ? run : NULL;
    }
}

tddp_status tddp_adapter_wrap(const tddp_backend_opts *opts, tddp_inner *inner)
{
    if (inner->backend->events || inner->backend->launches) {
        return TDDP_OK;
    }
    adapter *self = tddp_alloc(sizeof *self);
    if (!self) {
        tddp_inner_close(inner);
        return TDDP_OUT_OF_MEMORY;
    }
    self->inner = *inner;
    self->events = opts->events ? opts->events : &self->own;
    pthread_mutex_init(&self->mutex, NULL);
    fill(&self->table, inner->backend);
    inner->backend = &self->table;
    inner->context = self;
    return TDDP_OK;
}
