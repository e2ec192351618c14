/*
 * The backend table "nccl". Threads: as <tddp/backend.h> says.
 *
 * An operation has its communicator from its caller's thread on, so that all ranks count them
 * equally. Where that is not connected yet, the launch of its first operation connects it.
 */
#include <stdio.h>
#include <stdlib.h>

#include <tddp/meeting.h>

#include "backend/nccl/call_check.h"
#include "backend/nccl/context.h"
#include "backend/nccl/operations.h"

/* --- slots of an operation ------------------------------------------------------------------- */

static tddp_status post(void *data, const tddp_op *op, void **request)
{
    tddp_nccl_context *self = data;
    int device;
    tddp_nccl_communicator *communicator;
    tddp_nccl_request *made;
    if (op->kind == TDDP_OP_RECV && op->peer == TDDP_ANY_SOURCE) {
        return tddp_fail(TDDP_UNSUPPORTED, "nccl cannot receive from any rank: name the sender, or "
                                           "use gloo");
    }
    tddp_status status = tddp_nccl_device_of(self, op, &device);
    status = status ? status : tddp_nccl_communicator_for(self, op, device, &communicator);
    status = status ? status : tddp_nccl_request_create(communicator, op, &made);
    if (status == TDDP_OK) {
        *request = made;
    }
    return status;
}

/* Messages of a batch are on one communicator, or none is launched. */
static tddp_status check_batch(tddp_nccl_request *const *requests, size_t count)
{
    const tddp_nccl_communicator *first = requests[0]->communicator;
    for (size_t i = 1; i < count; i++) {
        if (requests[i]->communicator != first) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "message %zu of a batch is on cuda:%d: expected cuda:%d, that of the "
                             "first one",
                             i, requests[i]->communicator->opts.device, first->opts.device);
        }
    }
    return TDDP_OK;
}

static tddp_status launch(void *data, void *const *posted, size_t count)
{
    tddp_nccl_context *self = data;
    tddp_nccl_request *const *requests = (tddp_nccl_request *const *)posted;
    const tddp_op *op = requests[0]->op;
    const tddp_nccl_limits limits = {requests[0]->deadline_ns, op->cancel};
    tddp_status status = check_batch(requests, count);
    if (status == TDDP_OK && !tddp_op_is_p2p(op->kind) && tddp_nccl_checks_calls(op)) {
        status = tddp_nccl_check_calls(&self->call_checker, op, limits);
    }
    status = status ? status : tddp_nccl_connect(requests[0]->communicator, limits);
    return status ? status : tddp_nccl_launch(requests, count);
}

static tddp_status finish(void *data, void *request, int *source)
{
    tddp_nccl_request *finished = request;
    const tddp_op *op = finished->op;
    (void)data;
    if (op->device_ns) {
        *op->device_ns = tddp_nccl_request_ns(finished);
    }
    if (op->kind == TDDP_OP_RECV) {
        *source = op->peer;
    }
    tddp_nccl_request_free(finished);
    return TDDP_OK;
}

/* --- life cycle ------------------------------------------------------------------------------ */

static void abort_all(void *data)
{
    tddp_nccl_context *self = data;
    atomic_store(&self->aborted, true);
    tddp_nccl_abort(tddp_nccl_communicators(self));
}

static void destroy(void *data)
{
    tddp_nccl_context *self = data;
    tddp_nccl_close(self->list);
    free(self->of_two);
    tddp_meeting_close(self->call_checker.meeting);
    free(self->call_checker.calls);
    tddp_store_release(self->call_checker.own);
    tddp_store_release(self->store);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static tddp_status create_context(const tddp_backend_opts *opts,
                                  const tddp_nccl_libraries *libraries, tddp_nccl_context **out)
{
    tddp_nccl_context *self = calloc(1, sizeof *self);
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
    self->call_checker = (tddp_nccl_call_checker){
        .rank = self->rank, .size = self->size, .store = self->store, .aborted = &self->aborted};
    pthread_mutex_init(&self->mutex, NULL);
    self->of_two = calloc((size_t)self->size, sizeof *self->of_two);
    if (!self->of_two) {
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
    tddp_status status = tddp_nccl_communicator_create(self->libraries, &opts, &none);
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
    tddp_status status = tddp_nccl_communicator_create(self->libraries, &opts, &self->list);
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
    .launches = (1u << TDDP_OP_COUNT) - 1,
    .launch = launch,
    .order = tddp_nccl_request_order,
    .test = tddp_nccl_request_test,
    .decline = decline,
    .op_count = TDDP_OP_COUNT,
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
