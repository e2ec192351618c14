/*
 * The backend table "nccl". Threads: as <tddp/backend.h> says.
 *
 * An operation has its communicator from its caller's thread on, so that all ranks count them
 * equally. It is connected, in whatever order ranks come, before the operation's turn on the device
 * is waited for; launches are in the order of turns.
 */
#include <stdio.h>
#include <stdlib.h>

#include "backend/nccl/batch.h"

/* A posted operation. */
typedef struct pending_op {
    tddp_nccl_request *request;
    tddp_nccl_batch *batch; /* NULL: it is launched by itself */
} pending_op;

/* --- launching ------------------------------------------------------------------------------- */

/* Once nothing called before it is left to be launched on the device. */
static tddp_status launch_in_turn(tddp_nccl_context *self, tddp_nccl_request *request)
{
    const tddp_op *op = request->op;
    const tddp_nccl_limits limits = {request->deadline_ns, NULL};
    tddp_status status = TDDP_OK;
    if (!tddp_op_is_p2p(op->kind) && tddp_nccl_checks_calls(op)) {
        status = tddp_nccl_check_calls(&self->call_checker, op, limits);
    }
    status = status ? status : tddp_nccl_connect(request->communicator, limits);
    if (status == TDDP_OK && op->turn) {
        status = tddp_nccl_turn_await(op->turn, &self->aborted, request->deadline_ns);
    }
    return status ? status : tddp_nccl_launch(request);
}

static tddp_status make_request(tddp_nccl_context *self, const tddp_op *op, tddp_nccl_request **out)
{
    int device;
    tddp_nccl_communicator *communicator;
    tddp_status status = tddp_nccl_device_of(self, op, &device);
    status = status ? status : tddp_nccl_communicator_for(self, op, device, &communicator);
    if (status) {
        return status;
    }
    return tddp_nccl_request_create(communicator, op, out);
}

/* A barrier's turn passes once it is launched. That of another operation, which is on copies, is
 * kept until it has ended: it may be one of several steps. */
static tddp_status run(void *data, const tddp_op *op)
{
    tddp_nccl_request *request = NULL;
    tddp_status status = make_request(data, op, &request);
    status = status ? status : launch_in_turn(data, request);
    if (status == TDDP_OK && op->turn && op->kind == TDDP_OP_BARRIER) {
        tddp_nccl_turn_pass(op->turn);
    }
    if (status == TDDP_OK) {
        status = tddp_nccl_request_wait(request);
    }
    tddp_nccl_request_free(request);
    return status;
}

/* --- slots of an operation ------------------------------------------------------------------- */

static tddp_status reserve(void *data, const tddp_op *op, void **turn)
{
    int device;
    tddp_nccl_turn *taken = NULL;
    tddp_status status = tddp_nccl_device_of(data, op, &device);
    status = status ? status : tddp_nccl_turn_take(device, &taken);
    *turn = taken;
    return status;
}

static void release(void *data, void *turn)
{
    (void)data;
    tddp_nccl_turn_end(turn);
}

static tddp_status post(void *data, const tddp_op *op, void **request)
{
    tddp_nccl_context *self = data;
    if (op->kind == TDDP_OP_RECV && op->peer == TDDP_ANY_SOURCE) {
        return tddp_fail(TDDP_UNSUPPORTED, "nccl cannot receive from any rank: name the sender, or "
                                           "use gloo");
    }
    pending_op *pending = calloc(1, sizeof *pending);
    if (!pending) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = make_request(self, op, &pending->request);
    if (status == TDDP_OK && op->batch > 0) {
        status = tddp_nccl_batch_add(self, pending->request, &pending->batch);
    }
    if (status) {
        tddp_nccl_request_free(pending->request);
        free(pending);
        return status;
    }
    *request = pending;
    return TDDP_OK;
}

static tddp_status launch(void *data, void *request)
{
    pending_op *pending = request;
    return pending->batch ? tddp_nccl_batch_launch(pending->batch, data)
                          : launch_in_turn(data, pending->request);
}

static int launches_at_once(void *data, void *request)
{
    const pending_op *pending = request;
    if (pending->batch) {
        return tddp_nccl_batch_launches_at_once(pending->batch, data);
    }
    const tddp_op *op = pending->request->op;
    return tddp_nccl_is_warm(pending->request->communicator, op->kind) &&
           (tddp_op_is_p2p(op->kind) || !tddp_nccl_checks_calls(op)) &&
           (!op->turn || tddp_nccl_turn_has_come(op->turn));
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
    pending_op *pending = request;
    const tddp_op *op = pending->request->op;
    if (op->device_ns) {
        *op->device_ns = tddp_nccl_request_ns(pending->request);
    }
    if (op->kind == TDDP_OP_RECV) {
        *source = op->peer;
    }
    if (pending->batch) {
        tddp_nccl_batch_leave(pending->batch, data);
    }
    tddp_nccl_request_free(pending->request);
    free(pending);
    return TDDP_OK;
}

/* --- life cycle ------------------------------------------------------------------------------ */

static void abort_all(void *data)
{
    tddp_nccl_context *self = data;
    atomic_store(&self->aborted, true);
    tddp_nccl_turns_wake();
    tddp_nccl_abort(tddp_nccl_communicators(self));
}

static void destroy(void *data)
{
    tddp_nccl_context *self = data;
    tddp_nccl_overdue_stop(&self->overdue);
    tddp_nccl_close(self->list);
    free(self->of_two);
    free(self->batched);
    free(self->call_checker.calls);
    tddp_store_release(self->call_checker.own);
    tddp_store_release(self->store);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static bool look_for_overdue(void *data)
{
    return tddp_nccl_abort_overdue(tddp_nccl_communicators(data));
}

static tddp_status create_context(const tddp_backend_opts *opts,
                                  const tddp_nccl_libraries *libraries, tddp_nccl_context **out)
{
    tddp_nccl_context *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = tddp_nccl_overdue_init(&self->overdue, look_for_overdue, self);
    if (status) {
        free(self);
        return status;
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
    self->of_two = calloc((size_t)self->size, sizeof *self->of_two);
    self->batched = calloc((size_t)self->size, sizeof *self->batched);
    if (!self->of_two || !self->batched) {
        destroy(self);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    *out = self;
    return TDDP_OK;
}

/* The communicator from which those of subgroups are split: that of a bound group. */
static tddp_nccl_communicator *split_parent(const tddp_nccl_context *parent)
{
    return parent && parent->bound ? parent->of_all[parent->device] : NULL;
}

static tddp_nccl_limits limits_of(const tddp_wait *wait, int64_t timeout_ms)
{
    return (tddp_nccl_limits){tddp_wait_deadline(wait, timeout_ms), wait ? wait->cancel : NULL};
}

/* Connects, and gives a communicator that can't up. */
static tddp_status connect_now(tddp_nccl_communicator *communicator, tddp_nccl_limits limits)
{
    tddp_status status = tddp_nccl_connect(communicator, limits);
    if (status) {
        char text[TDDP_NCCL_TEXT_BYTES];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_nccl_abort(communicator);
        (void)tddp_fail(status, "%s", text);
    }
    return status;
}

static tddp_status decline(void *data, const tddp_wait *wait)
{
    tddp_nccl_context *self = data;
    tddp_nccl_communicator *none;
    const tddp_nccl_communicator_opts opts = {.device = self->device,
                                              .rank = self->rank,
                                              .size = self->size,
                                              .store = self->store,
                                              .key = "a group of others",
                                              .parent = split_parent(self),
                                              .declines = true};
    if (!opts.parent) {
        return TDDP_OK;
    }
    tddp_status status =
        tddp_nccl_communicator_create(self->libraries, &self->overdue, &opts, &none);
    if (status) {
        return status;
    }
    status = connect_now(none, limits_of(wait, self->timeout_ms));
    tddp_nccl_close(none);
    return status;
}

/* The communicator of all ranks of a bound group, made now. */
static tddp_status create_bound(tddp_nccl_context *self, tddp_nccl_communicator *parent,
                                tddp_nccl_limits limits)
{
    const tddp_nccl_communicator_opts opts = {.device = self->device,
                                              .rank = self->rank,
                                              .size = self->size,
                                              .store = self->store,
                                              .key = "nccl/0",
                                              .parent = parent};
    self->created = 1;
    tddp_status status =
        tddp_nccl_communicator_create(self->libraries, &self->overdue, &opts, &self->list);
    if (status == TDDP_OK) {
        self->of_all[self->device] = self->list;
        status = connect_now(self->list, limits);
    }
    return status;
}

/* In a group bound to a device all ranks connect here. Otherwise they connect with their first
 * operation, and get the unique id here, since the store may have ended by then. A group created
 * from a bound one is bound to the same device. */
static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    const tddp_nccl_libraries *libraries;
    tddp_nccl_context *self = NULL;
    tddp_status status = tddp_nccl_libraries_get(&libraries);
    if (status == TDDP_OK && opts->device_index >= TDDP_NCCL_MAX_DEVICES) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected 0 to %d", opts->device_index,
                           TDDP_NCCL_MAX_DEVICES - 1);
    }
    status = status ? status : create_context(opts, libraries, &self);
    if (status) {
        return status;
    }
    tddp_nccl_communicator *parent = split_parent(opts->parent);
    if (parent) {
        self->device = parent->opts.device;
        self->bound = true;
    }
    const tddp_nccl_limits limits = limits_of(wait, opts->timeout_ms);
    status = self->bound ? create_bound(self, parent, limits)
                         : tddp_nccl_share_id(libraries, self->store, "nccl/id", self->rank,
                                              self->size, limits, &self->first_id);
    if (status) {
        char text[TDDP_NCCL_TEXT_BYTES];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        destroy(self);
        return tddp_fail(status, "%s", text);
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
    .reserve = reserve,
    .release = release,
    .launches_at_once = launches_at_once,
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
