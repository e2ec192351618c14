/*
 * Requests to the host language's threads, and the backend table whose slots make them.
 *
 * Invariant: one lock guards the list of requests, their state and the contexts'. A request has up
 * to two owners, the slot that waits for it and the host that completes it; the last one frees it.
 * The memory of an operation is used only with the lock held and while its slot waits.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <tddp/delegate.h>

#include "base/base.h"

enum { CANCEL_POLL_MS = 50, DESTROY_MS = 2000 };

typedef struct context {
    uint64_t id;
    const char *backend;
    int rank;
    int world_size;
    bool aborted;
} context;

typedef struct request {
    tddp_delegate_request seen; /* first member; its buffers are without memory */
    tddp_buffer *buffers;       /* the inputs' and outputs' memory, then what the host sees */
    struct request *next;
    int owners;
    bool completed;
    tddp_status status;
    char *text; /* NULL: none */
} request;

/* Process-wide, like the backends. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t completed;
static request *first;
static request **last = &first;
static uint64_t contexts;
static int ready_fd = -1;
static pid_t process; /* the one that takes requests; 0: none does */

/* --- requests, with the lock held ------------------------------------------------------------ */

static void disown(request *self)
{
    if (--self->owners > 0) {
        return;
    }
    tddp_store_release(self->seen.store);
    free(self->buffers);
    free(self->text);
    free(self);
}

static request *make(const context *of, tddp_delegate_kind kind)
{
    request *self = tddp_alloc(sizeof *self);
    if (self) {
        self->owners = 1;
        self->seen = (tddp_delegate_request){.kind = kind,
                                             .context = of->id,
                                             .backend = of->backend,
                                             .rank = of->rank,
                                             .world_size = of->world_size};
    }
    return self;
}

static void enqueue(request *self)
{
    const uint64_t one = 1;
    self->owners++;
    *last = self;
    last = &self->next;
    ssize_t ignored = write(ready_fd, &one, sizeof one);
    (void)ignored;
}

/* Passes the request to the host, and nobody waits for it. */
static void notify(const context *of, tddp_delegate_kind kind)
{
    request *self = process == tddp_process_id() ? make(of, kind) : NULL;
    if (self) {
        enqueue(self);
        disown(self);
    }
}

/* Why a request is not waited for any longer; TDDP_OK: it is. */
static tddp_status interrupted(const context *of, int64_t deadline, tddp_cancel *cancel)
{
    if (of->aborted) {
        return tddp_fail(TDDP_GROUP_FAILED, "backend %s: the group was aborted", of->backend);
    }
    if (cancel && tddp_cancel_triggered(cancel)) {
        return tddp_fail(TDDP_CANCELED, "backend %s: interrupted", of->backend);
    }
    if (tddp_now_ns() >= deadline) {
        return tddp_fail(TDDP_TIMEOUT, "backend %s has not completed it in time", of->backend);
    }
    return TDDP_OK;
}

static tddp_status wait_completed(const context *of, const request *self, int64_t deadline,
                                  tddp_cancel *cancel)
{
    tddp_status status = TDDP_OK;
    while (!self->completed && status == TDDP_OK) {
        int64_t until = cancel ? tddp_deadline_after_ms(CANCEL_POLL_MS) : deadline;
        (void)tddp_cond_wait_until(&completed, &lock, until < deadline ? until : deadline);
        status = self->completed ? TDDP_OK : interrupted(of, deadline, cancel);
    }
    return status;
}

/* Passes the request to the host and waits. */
static tddp_status submit(const context *of, request *self, int64_t deadline, tddp_cancel *cancel)
{
    if (process != tddp_process_id()) {
        disown(self);
        return tddp_fail(TDDP_GROUP_FAILED, "backend %s: nothing executes its operations here",
                         of->backend);
    }
    enqueue(self);
    tddp_status status = wait_completed(of, self, deadline, cancel);
    if (!self->completed) {
        notify(of, TDDP_DELEGATE_ABORT);
    } else if (self->status != TDDP_OK) {
        status = tddp_fail(self->status, "%s", self->text ? self->text : "out of memory");
    }
    disown(self);
    return status;
}

/* --- the backend's slots --------------------------------------------------------------------- */

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    context *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store *store;
    tddp_status status = tddp_store_clone(opts->store, wait, &store);
    if (status) {
        free(self);
        return status;
    }
    pthread_mutex_lock(&lock);
    *self = (context){++contexts, opts->backend->name, opts->rank, opts->world_size, false};
    request *made = make(self, TDDP_DELEGATE_CREATE);
    if (made) {
        made->seen.store = store;
        made->seen.timeout_ms = opts->timeout_ms;
        status = submit(self, made, deadline, tddp_wait_cancel(wait));
        if (status) {
            notify(self, TDDP_DELEGATE_DESTROY);
        }
    } else {
        tddp_store_release(store);
        status = TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    if (status) {
        free(self);
    } else {
        *out = self;
    }
    return status;
}

static void abort_context(void *data)
{
    context *self = data;
    pthread_mutex_lock(&lock);
    self->aborted = true;
    pthread_cond_broadcast(&completed);
    pthread_mutex_unlock(&lock);
}

static void destroy(void *data)
{
    context *self = data;
    pthread_mutex_lock(&lock);
    self->aborted = false; /* what is waited for now is the end */
    request *made = process == tddp_process_id() ? make(self, TDDP_DELEGATE_DESTROY) : NULL;
    if (made && submit(self, made, tddp_deadline_after_ms(DESTROY_MS), NULL) != TDDP_OK) {
        tddp_log(TDDP_LOG_INFO, "delegate", "%s", tddp_error_message());
    }
    pthread_mutex_unlock(&lock);
    free(self);
}

/* Buffers of an operation; a kind has none of its own where other ranks' parts are meant. */
typedef struct parts {
    const tddp_buffer *list;
    size_t count;
} parts;

static parts inputs_of(const context *self, const tddp_op *op)
{
    if (op->bundled > 0) {
        return (parts){op->output_parts, op->bundled};
    }
    if (op->input_parts) {
        return (parts){op->input_parts, (size_t)self->world_size};
    }
    bool none = op->kind == TDDP_OP_BARRIER || op->kind == TDDP_OP_SCATTER;
    return (parts){&op->input, none ? 0 : 1};
}

static parts outputs_of(const context *self, const tddp_op *op)
{
    if (op->bundled > 0) {
        return (parts){op->output_parts, op->bundled};
    }
    if (op->output_parts) {
        return (parts){op->output_parts, (size_t)self->world_size};
    }
    bool elsewhere = op->kind == TDDP_OP_REDUCE && op->root != self->rank;
    bool none = op->kind == TDDP_OP_BARRIER || op->kind == TDDP_OP_GATHER || elsewhere;
    return (parts){&op->output, none ? 0 : 1};
}

static tddp_status describe(const context *self, const tddp_op *op, request *made)
{
    parts in = inputs_of(self, op);
    parts out = outputs_of(self, op);
    size_t count = in.count + out.count;
    tddp_buffer *buffers = tddp_alloc_array(2 * count + 1, sizeof *buffers);
    if (!buffers) {
        return TDDP_OUT_OF_MEMORY;
    }
    memcpy(buffers, in.list, in.count * sizeof *buffers);
    memcpy(buffers + in.count, out.list, out.count * sizeof *buffers);
    for (size_t i = 0; i < count; i++) {
        buffers[count + i] = buffers[i];
        buffers[count + i].data = NULL;
    }
    made->buffers = buffers;
    made->seen.timeout_ms = op->timeout_ms;
    made->seen.op = op->kind;
    made->seen.reduce = op->reduce;
    made->seen.premul = op->premul;
    made->seen.root = op->root;
    made->seen.inputs = buffers + count;
    made->seen.input_count = in.count;
    made->seen.outputs = buffers + count + in.count;
    made->seen.output_count = out.count;
    return TDDP_OK;
}

static tddp_status run(void *data, const tddp_op *op)
{
    const context *self = data;
    pthread_mutex_lock(&lock);
    request *made = make(self, TDDP_DELEGATE_RUN);
    tddp_status status = made ? describe(self, op, made) : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK) {
        status = submit(self, made, tddp_deadline_after_ms(op->timeout_ms), NULL);
    } else if (made) {
        disown(made);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

tddp_status tddp_delegate_register(const char *name)
{
    char *kept = name ? tddp_copy_string(name) : NULL;
    tddp_backend_v1 *table = tddp_alloc(sizeof *table);
    if ((name && !kept) || !table) {
        free(kept);
        free(table);
        return TDDP_OUT_OF_MEMORY;
    }
    *table = (tddp_backend_v1){.abi = TDDP_BACKEND_ABI,
                               .size = sizeof *table,
                               .name = kept,
                               .device_types = 1u << TDDP_CPU,
                               .create = create,
                               .abort = abort_context,
                               .destroy = destroy,
                               .op_count = TDDP_OP_COUNT};
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        table->run[kind] = tddp_op_is_p2p((tddp_op_kind)kind) ? NULL : run;
    }
    tddp_status status = tddp_backend_register(table);
    if (status) {
        free(kept);
        free(table);
    }
    return status;
}

/* --- the host's side ------------------------------------------------------------------------- */

tddp_status tddp_delegate_start(int *fd)
{
    tddp_status status = TDDP_OK;
    if (process != tddp_process_id()) {
        /* What a fork has left is the parent's: its lock may be held, and its descriptor is shared.
         */
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        first = NULL;
        last = &first;
        ready_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        status = ready_fd < 0 ? tddp_fail_errno("eventfd") : tddp_cond_init(&completed);
        process = status == TDDP_OK ? tddp_process_id() : 0;
    }
    *fd = ready_fd;
    return status;
}

tddp_delegate_request *tddp_delegate_next(void)
{
    uint64_t count;
    pthread_mutex_lock(&lock);
    request *self = first;
    if (self) {
        first = self->next;
        last = first ? last : &first;
        self->next = NULL;
    } else {
        ssize_t ignored = read(ready_fd, &count, sizeof count);
        (void)ignored;
    }
    pthread_mutex_unlock(&lock);
    return self ? &self->seen : NULL;
}

/* The host is the only owner of a request that nobody waits for. */
static bool is_abandoned(const request *self)
{
    return self->owners == 1;
}

tddp_status tddp_delegate_read(const tddp_delegate_request *seen, size_t index, void *to)
{
    const request *self = (const request *)seen;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock);
    if (is_abandoned(self)) {
        status = tddp_fail(TDDP_CANCELED, "the operation has ended");
    } else if (self->buffers[index].count > 0) {
        memcpy(to, self->buffers[index].data, tddp_buffer_bytes(&self->buffers[index]));
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void tddp_delegate_complete(tddp_delegate_request *seen, tddp_status status, const char *text,
                            const void *const *outputs)
{
    request *self = (request *)seen;
    pthread_mutex_lock(&lock);
    self->completed = true;
    self->status = status;
    self->text = status && text ? tddp_copy_string(text) : NULL;
    for (size_t i = 0; status == TDDP_OK && !is_abandoned(self) && i < seen->output_count; i++) {
        const tddp_buffer *to = &self->buffers[seen->input_count + i];
        if (to->count > 0) {
            memcpy(to->data, outputs[i], tddp_buffer_bytes(to));
        }
    }
    pthread_cond_broadcast(&completed);
    disown(self);
    pthread_mutex_unlock(&lock);
}
