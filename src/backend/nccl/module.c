/*
 * The backend table "nccl", and a group's context: a communicator of all ranks for each device that
 * it uses, and those for messages, created on first use.
 *
 * Threads: as <tddp/backend.h> says. `mutex` guards the communicators; one that is in the context
 * stays until the end. Messages of one direction between two ranks are launched in the order in
 * which they were posted, by tickets.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/nccl/call_check.h"
#include "backend/nccl/operations.h"

enum { MAX_DEVICES = 64 };

/* The messages in one direction between this rank and another. */
typedef struct p2p_pair {
    pthread_mutex_t mutex;
    pthread_cond_t launched_changed;
    uint64_t posted;
    uint64_t launched;
    tddp_nccl_communicator *communicator; /* NULL: not created yet */
} p2p_pair;

typedef struct context {
    const tddp_nccl_libraries *libraries;
    int rank;
    int size;
    int device; /* -1: the buffers' device */
    bool bound; /* only this device */
    tddp_store *store;
    int64_t timeout_ms;
    _Atomic bool aborted;
    tddp_nccl_call_checker call_checker;
    p2p_pair *pairs[2]; /* sends to each rank, and receives from each */
    pthread_mutex_t mutex;
    int created; /* communicators of all ranks so far: equal on all ranks, like the order of
                    operations */
    tddp_nccl_id first_id; /* of the first communicator, unless the group is bound */
    tddp_nccl_communicator *communicators[MAX_DEVICES];
} context;

/* A posted operation. */
typedef struct pending_op {
    tddp_nccl_request *request;
    p2p_pair *pair; /* of a message; NULL: a collective */
    uint64_t ticket;
} pending_op;

/* --- communicators --------------------------------------------------------------------------- */

static tddp_nccl_communicator_opts opts_for(context *self, int device, const char *key,
                                            int64_t deadline_ns, tddp_cancel *cancel)
{
    return (tddp_nccl_communicator_opts){.device = device,
                                         .rank = self->rank,
                                         .size = self->size,
                                         .store = self->store,
                                         .key = key,
                                         .limits = {deadline_ns, cancel, &self->aborted}};
}

static tddp_status create_communicator(context *self, int device, int64_t deadline_ns,
                                       tddp_cancel *cancel, tddp_nccl_communicator *parent,
                                       tddp_nccl_communicator **out)
{
    char key[64];
    const bool first = self->created == 0 && !self->bound;
    (void)snprintf(key, sizeof key, "nccl/%d", self->created++);
    tddp_nccl_communicator_opts opts = opts_for(self, device, key, deadline_ns, cancel);
    opts.parent = parent;
    opts.id = first ? &self->first_id : NULL;
    tddp_nccl_communicator *created;
    tddp_status status = tddp_nccl_communicator_create(self->libraries, &opts, &created);
    if (status) {
        return status;
    }
    pthread_mutex_lock(&self->mutex);
    self->communicators[device] = created;
    bool late = atomic_load(&self->aborted);
    pthread_mutex_unlock(&self->mutex);
    if (late) {
        tddp_nccl_communicator_abort(created);
    }
    *out = created;
    return TDDP_OK;
}

/* The device of an operation: its memory's, or the group's. */
static tddp_status device_of(const context *self, const tddp_op *op, int *device)
{
    const tddp_buffer *buffer = op->input.device_type == TDDP_CUDA ? &op->input : &op->output;
    int found = buffer->device_index;
    if (op->kind == TDDP_OP_BARRIER) {
        found = self->device < 0 ? 0 : self->device;
    }
    if (found < 0 || found >= MAX_DEVICES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected 0 to %d", found,
                         MAX_DEVICES - 1);
    }
    if (self->bound && found != self->device) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "memory on cuda:%d: expected cuda:%d, the device that this group was made "
                         "for",
                         found, self->device);
    }
    *device = found;
    return TDDP_OK;
}

static tddp_status communicator_on(context *self, int device, int64_t deadline_ns,
                                   tddp_nccl_communicator **out)
{
    *out = self->communicators[device];
    return *out ? TDDP_OK : create_communicator(self, device, deadline_ns, NULL, NULL, out);
}

/* --- collectives ----------------------------------------------------------------------------- */

static tddp_status launch_on(context *self, tddp_nccl_request *request)
{
    tddp_nccl_communicator *communicator;
    tddp_status status = TDDP_OK;
    if (tddp_nccl_checks_calls(request->op)) {
        const tddp_nccl_limits limits = {request->deadline_ns, NULL, &self->aborted};
        status = tddp_nccl_check_calls(&self->call_checker, request->op, limits);
    }
    if (status == TDDP_OK) {
        status = communicator_on(self, request->device, request->deadline_ns, &communicator);
    }
    return status ? status : tddp_nccl_launch(request, communicator);
}

static tddp_status run(void *data, const tddp_op *op)
{
    context *self = data;
    int device;
    tddp_nccl_request *request = NULL;
    tddp_status status = device_of(self, op, &device);
    if (status == TDDP_OK) {
        status = tddp_nccl_request_create(self->libraries, op, device, &request);
    }
    if (status == TDDP_OK) {
        status = launch_on(self, request);
    }
    if (status == TDDP_OK) {
        status = tddp_nccl_request_wait(request);
    }
    tddp_nccl_request_free(request);
    return status;
}

/* --- messages -------------------------------------------------------------------------------- */

/* Messages of one direction are launched in the order of their tickets. */
static void take_ticket(context *self, pending_op *pending)
{
    const tddp_op *op = pending->request->op;
    pending->pair = &self->pairs[op->kind == TDDP_OP_RECV][op->peer];
    pthread_mutex_lock(&pending->pair->mutex);
    pending->ticket = pending->pair->posted++;
    pthread_mutex_unlock(&pending->pair->mutex);
}

/* With the pair's lock held, except while the ranks connect. */
static tddp_status connect_pair(context *self, const pending_op *pending)
{
    const tddp_op *op = pending->request->op;
    const bool sends = op->kind == TDDP_OP_SEND;
    char key[64];
    (void)snprintf(key, sizeof key, "nccl/%d to %d", sends ? self->rank : op->peer,
                   sends ? op->peer : self->rank);
    tddp_nccl_communicator_opts opts =
        opts_for(self, pending->request->device, key, pending->request->deadline_ns, NULL);
    opts.rank = sends ? 0 : 1;
    opts.size = 2;
    tddp_nccl_communicator *created = NULL;
    pthread_mutex_unlock(&pending->pair->mutex);
    tddp_status status = tddp_nccl_communicator_create(self->libraries, &opts, &created);
    pthread_mutex_lock(&pending->pair->mutex);
    pending->pair->communicator = created;
    if (created && atomic_load(&self->aborted)) {
        tddp_nccl_communicator_abort(created);
    }
    return status;
}

/* Waits until all earlier tickets are launched or have failed. */
static tddp_status launch_in_order(context *self, pending_op *pending)
{
    p2p_pair *pair = pending->pair;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&pair->mutex);
    while (pair->launched != pending->ticket) {
        pthread_cond_wait(&pair->launched_changed, &pair->mutex);
    }
    if (!pair->communicator) {
        status = connect_pair(self, pending);
    }
    if (status == TDDP_OK) {
        status = tddp_nccl_launch_message(pending->request, pair->communicator);
    }
    pair->launched++;
    pthread_cond_broadcast(&pair->launched_changed);
    pthread_mutex_unlock(&pair->mutex);
    return status;
}

/* --- slots of an operation ------------------------------------------------------------------- */

static tddp_status post(void *data, const tddp_op *op, void **request)
{
    context *self = data;
    int device;
    if (op->kind == TDDP_OP_RECV && op->peer == TDDP_ANY_SOURCE) {
        return tddp_fail(TDDP_UNSUPPORTED, "nccl cannot receive from any rank: name the sender, or "
                                           "use gloo");
    }
    pending_op *pending = calloc(1, sizeof *pending);
    if (!pending) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = device_of(self, op, &device);
    if (status == TDDP_OK) {
        status = tddp_nccl_request_create(self->libraries, op, device, &pending->request);
    }
    if (status) {
        free(pending);
        return status;
    }
    if (tddp_op_is_p2p(op->kind)) {
        take_ticket(self, pending);
    }
    *request = pending;
    return TDDP_OK;
}

static tddp_status launch(void *data, void *request)
{
    pending_op *pending = request;
    return pending->pair ? launch_in_order(data, pending) : launch_on(data, pending->request);
}

static tddp_status order(void *data, void *request, void *stream)
{
    (void)data;
    return tddp_nccl_request_order(((pending_op *)request)->request, stream);
}

static tddp_status await(void *data, void *request)
{
    (void)data;
    return tddp_nccl_request_wait(((pending_op *)request)->request);
}

static tddp_status finish(void *data, void *request, int *source)
{
    (void)data;
    pending_op *pending = request;
    const tddp_op *op = pending->request->op;
    if (op->device_ns && pending->request->communicator) {
        *op->device_ns = tddp_nccl_request_ns(pending->request);
    }
    if (op->kind == TDDP_OP_RECV) {
        *source = op->peer;
    }
    tddp_nccl_request_free(pending->request);
    free(pending);
    return TDDP_OK;
}

/* --- life cycle ------------------------------------------------------------------------------ */

static void abort_all(void *data)
{
    context *self = data;
    atomic_store(&self->aborted, true);
    pthread_mutex_lock(&self->mutex);
    for (int i = 0; i < MAX_DEVICES; i++) {
        if (self->communicators[i]) {
            tddp_nccl_communicator_abort(self->communicators[i]);
        }
    }
    pthread_mutex_unlock(&self->mutex);
    for (int i = 0; i < 2 * self->size; i++) {
        p2p_pair *pair = &self->pairs[i % 2][i / 2];
        pthread_mutex_lock(&pair->mutex);
        if (pair->communicator) {
            tddp_nccl_communicator_abort(pair->communicator);
        }
        pthread_mutex_unlock(&pair->mutex);
    }
}

static void destroy(void *data)
{
    context *self = data;
    for (int i = 0; i < MAX_DEVICES; i++) {
        tddp_nccl_communicator_destroy(self->communicators[i]);
    }
    for (int i = 0; i < 2 * self->size && self->pairs[0] && self->pairs[1]; i++) {
        p2p_pair *pair = &self->pairs[i % 2][i / 2];
        tddp_nccl_communicator_destroy(pair->communicator);
        pthread_cond_destroy(&pair->launched_changed);
        pthread_mutex_destroy(&pair->mutex);
    }
    free(self->pairs[0]);
    free(self->pairs[1]);
    free(self->call_checker.calls);
    tddp_store_release(self->store);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static tddp_status create_context(const tddp_backend_opts *opts,
                                  const tddp_nccl_libraries *libraries, context **out)
{
    context *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    self->libraries = libraries;
    self->rank = opts->rank;
    self->size = opts->world_size;
    self->device = opts->device_index;
    self->bound = opts->device_bound;
    self->timeout_ms = opts->timeout_ms;
    self->store = tddp_store_retain(opts->store);
    self->call_checker =
        (tddp_nccl_call_checker){.rank = self->rank, .size = self->size, .store = self->store};
    pthread_mutex_init(&self->mutex, NULL);
    for (int side = 0; side < 2; side++) {
        self->pairs[side] = calloc((size_t)self->size, sizeof(p2p_pair));
    }
    if (!self->pairs[0] || !self->pairs[1]) {
        destroy(self);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    for (int i = 0; i < 2 * self->size; i++) {
        pthread_mutex_init(&self->pairs[i % 2][i / 2].mutex, NULL);
        pthread_cond_init(&self->pairs[i % 2][i / 2].launched_changed, NULL);
    }
    *out = self;
    return TDDP_OK;
}

/* The communicator from which those of subgroups are split: that of a bound group. */
static tddp_nccl_communicator *split_parent(const context *parent)
{
    return parent && parent->bound ? parent->communicators[parent->device] : NULL;
}

static tddp_status decline(void *data, const tddp_wait *wait)
{
    context *self = data;
    tddp_nccl_communicator *parent = split_parent(self);
    if (!parent) {
        return TDDP_OK;
    }
    bool timed = wait && wait->timeout_ms >= 0;
    int64_t deadline = tddp_nccl_deadline(timed ? wait->timeout_ms : self->timeout_ms);
    tddp_nccl_communicator_opts opts =
        opts_for(self, self->device, "a group of others", deadline, wait ? wait->cancel : NULL);
    return tddp_nccl_communicator_decline(parent, &opts);
}

/* In a group bound to a device all ranks connect here. Otherwise they connect with their first
 * operation, and get the unique id here, since the store may have ended by then. A group created
 * from a bound one is bound to the same device. */
static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    const tddp_nccl_libraries *libraries;
    context *self = NULL;
    tddp_status status = tddp_nccl_libraries_get(&libraries);
    if (status == TDDP_OK && opts->device_index >= MAX_DEVICES) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected 0 to %d", opts->device_index,
                           MAX_DEVICES - 1);
    }
    if (status == TDDP_OK) {
        status = create_context(opts, libraries, &self);
    }
    if (status) {
        return status;
    }
    tddp_nccl_communicator *parent = split_parent(opts->parent);
    if (parent) {
        self->device = parent->device;
        self->bound = true;
    }
    bool timed = wait && wait->timeout_ms >= 0;
    int64_t deadline = tddp_nccl_deadline(timed ? wait->timeout_ms : opts->timeout_ms);
    tddp_cancel *cancel = wait ? wait->cancel : NULL;
    if (self->bound) {
        tddp_nccl_communicator *communicator;
        status = create_communicator(self, self->device, deadline, cancel, parent, &communicator);
    } else {
        const tddp_nccl_communicator_opts id_opts = opts_for(self, -1, "nccl/id", deadline, cancel);
        status = tddp_nccl_share_id(libraries, &id_opts, &self->first_id);
    }
    if (status) {
        destroy(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

static const tddp_backend_v1 backend = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof(tddp_backend_v1),
    .name = "nccl",
    .device_types = 1u << TDDP_CUDA,
    .create = create,
    .abort = abort_all,
    .destroy = destroy,
    .post = post,
    .finish = finish,
    .traits = TDDP_BACKEND_QUEUES,
    .launch = launch,
    .order = order,
    .await = await,
    .decline = decline,
    .op_count = TDDP_OP_COUNT,
    .run = {[TDDP_OP_ALL_REDUCE] = run,
            [TDDP_OP_BROADCAST] = run,
            [TDDP_OP_BARRIER] = run,
            [TDDP_OP_ALL_GATHER] = run,
            [TDDP_OP_REDUCE_SCATTER] = run,
            [TDDP_OP_REDUCE] = run,
            [TDDP_OP_GATHER] = run,
            [TDDP_OP_SCATTER] = run,
            [TDDP_OP_ALL_TO_ALL] = run},
};

TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);

/* NULL if the libraries are missing. */
const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    const tddp_nccl_libraries *libraries;
    if (core_abi != TDDP_BACKEND_ABI || tddp_nccl_libraries_get(&libraries)) {
        return NULL;
    }
    return &backend;
}
