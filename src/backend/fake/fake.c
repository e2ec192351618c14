/*
 * See fake.h. A group with faults has a copy of the table beneath, in which those functions look
 * its faults up by its context that begin or end an operation.
 *
 * Invariant: a context is in the list from its opening to its destroy(); only its `fate` changes,
 * by the one thread that runs its operation.
 */
#include "backend/fake/fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/fake/faults.h"

typedef struct faulty {
    tddp_backend_v1 table;
    tddp_inner inner;
    tddp_fake_faults faults;
    tddp_cancel *aborted;
    uint64_t running; /* the collective, */
    tddp_fake_fate fate;
    struct faulty *next;
} faulty;

/* Of a message, or an operation on a device. */
typedef struct fake_request {
    void *posted; /* the request beneath; NULL: the backend there hasn't got the message */
    faulty *of;
    const tddp_op *op;
    tddp_fake_fate fate;
} fake_request;

/* Process-wide: a context is found by the one beneath. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static faulty *all;

static faulty *find(const void *context)
{
    pthread_mutex_lock(&lock);
    faulty *each = all;
    while (each && each->inner.context != context) {
        each = each->next;
    }
    pthread_mutex_unlock(&lock);
    return each;
}

static void remove_from_list(const faulty *self)
{
    pthread_mutex_lock(&lock);
    faulty **at = &all;
    while (*at != self) {
        at = &(*at)->next;
    }
    *at = self->next;
    pthread_mutex_unlock(&lock);
}

/* --- operations ------------------------------------------------------------------------------ */

static tddp_status run(void *context, const tddp_op *op)
{
    faulty *self = find(context);
    if (self->running != op->sequence) {
        self->fate = (tddp_fake_fate){0};
        self->running = op->sequence;
    }
    tddp_status status = tddp_fake_before(&self->faults, op, self->aborted, &self->fate);
    return status ? status : self->inner.backend->run[op->kind](context, op);
}

/* Whether it has its faults when it is launched. */
static bool is_launched(const faulty *self, const tddp_op *op)
{
    return (self->inner.backend->launches >> op->kind & 1u) != 0;
}

static tddp_status post(void *context, const tddp_op *op, void **out)
{
    faulty *self = find(context);
    const bool launched = is_launched(self, op);
    fake_request *made = tddp_alloc(sizeof *made);
    tddp_status status = made ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && !launched && (int64_t)op->sequence == self->faults.post_fail_at) {
        status = tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    }
    if (status == TDDP_OK && (launched || !tddp_fake_ends(&self->faults, op))) {
        status = self->inner.backend->post(context, op, &made->posted);
    }
    if (status) {
        free(made);
        return status;
    }
    made->of = self;
    made->op = op;
    *out = made;
    return TDDP_OK;
}

static tddp_status finish(void *context, void *request, int *source)
{
    fake_request *made = request;
    faulty *self = made->of;
    tddp_status status = is_launched(self, made->op) ? TDDP_OK
                                                     : tddp_fake_before(&self->faults, made->op,
                                                                        self->aborted, &made->fate);
    if (status == TDDP_CANCELED) {
        return status;
    }
    if (made->posted) { /* also if it was aborted: the request has to be freed */
        status = self->inner.backend->finish(context, made->posted, source);
        if (status == TDDP_CANCELED) {
            return status; /* it will be called again */
        }
    }
    free(made);
    return status;
}

static tddp_status launch(void *context, void *const *requests, size_t count)
{
    const tddp_backend_v1 *inner = ((const fake_request *)requests[0])->of->inner.backend;
    tddp_status status = TDDP_OK;
    void **posted = tddp_alloc_array(count, sizeof *posted);
    if (!posted) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        fake_request *made = requests[i];
        faulty *self = made->of;
        posted[i] = made->posted;
        status = tddp_fake_before(&self->faults, made->op, self->aborted, &made->fate);
    }
    status = status ? status : inner->launch(context, posted, count);
    free(posted);
    return status;
}

static tddp_status order(void *context, void *request, void *stream)
{
    const fake_request *made = request;
    return made->of->inner.backend->order(context, made->posted, stream);
}

static tddp_status test(void *context, void *request, int *complete)
{
    const fake_request *made = request;
    return made->of->inner.backend->test(context, made->posted, complete);
}

/* --- contexts -------------------------------------------------------------------------------- */

static void abort_all(void *context)
{
    const faulty *self = find(context);
    tddp_cancel_trigger(self->aborted);
    self->inner.backend->abort(context);
}

static void destroy(void *context)
{
    faulty *self = find(context);
    remove_from_list(self);
    self->inner.backend->destroy(context);
    tddp_cancel_free(self->aborted);
    free(self);
}

static void fill(faulty *self)
{
    const tddp_backend_v1 *inner = self->inner.backend;
    memcpy(&self->table, inner, inner->size < sizeof *inner ? inner->size : sizeof *inner);
    self->table.abort = abort_all;
    self->table.destroy = destroy;
    self->table.post = inner->post ? post : NULL;
    self->table.finish = inner->post ? finish : NULL;
    self->table.launch = inner->launch ? launch : NULL;
    self->table.order = inner->order ? order : NULL;
    self->table.test = inner->test ? test : NULL;
    self->table.probe = NULL; /* of communicators between hosts: none has faults */
    self->table.discard = NULL;
    self->table.size = sizeof self->table;
    self->table.op_count = inner->op_count < TDDP_OP_COUNT ? inner->op_count : TDDP_OP_COUNT;
    for (uint32_t kind = 0; kind < self->table.op_count; kind++) {
        self->table.run[kind] = inner->run[kind] ? run : NULL;
    }
}

/* Looks a group's faults up by its context from now on, and serves it by a table that does. */
static tddp_status add_faults(const tddp_fake_faults *faults, tddp_inner *inner)
{
    faulty *made = tddp_alloc(sizeof *made);
    tddp_status status = made ? tddp_cancel_create(&made->aborted) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(made);
        return status;
    }
    made->inner = *inner;
    made->faults = *faults;
    fill(made);
    pthread_mutex_lock(&lock);
    made->next = all;
    all = made;
    pthread_mutex_unlock(&lock);
    inner->backend = &made->table;
    return TDDP_OK;
}

tddp_status tddp_fake_wrap(int rank, tddp_inner *inner)
{
    tddp_fake_faults faults;
    tddp_status status = tddp_fake_read_faults(rank, &faults);
    if (status == TDDP_OK && faults.create_fail) {
        status = tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    }
    if (status == TDDP_OK && faults.any) {
        status = add_faults(&faults, inner);
    }
    if (status) {
        tddp_inner_close(inner);
    }
    return status;
}

tddp_status tddp_fake_over(int rank, char name[TDDP_FAKE_NAME_BYTES])
{
    tddp_fake_faults faults = {.over = "shm"};
    /* A rank that refuses the rest does so once it is connected: the others wait for it. */
    (void)!tddp_fake_read_faults(rank, &faults);
    if (strcmp(faults.over, "fake") == 0 || strchr(faults.over, ':')) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "TDDP_FAKE: over=%s: expected one backend, and another one", faults.over);
    }
    (void)snprintf(name, TDDP_FAKE_NAME_BYTES, "%s", faults.over);
    return TDDP_OK;
}

/* --- the name -------------------------------------------------------------------------------- */

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    (void)opts;
    (void)wait;
    (void)context;
    return tddp_fail(TDDP_UNSUPPORTED, "fake: only groups can have faults");
}

static void ignore(void *context)
{
    (void)context;
}

const tddp_backend_v1 *tddp_fake_backend(void)
{
    static const tddp_backend_v1 backend = {
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof(tddp_backend_v1),
        .name = "fake",
        .device_types = 1u << TDDP_CPU,
        .create = create,
        .abort = ignore,
        .destroy = ignore,
    };
    return &backend;
}
