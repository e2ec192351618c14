/*
 * The backend's table, and what a group has: the communicator of all its ranks on each device it
 * uses, and those of messages, made when first needed.
 *
 * Threads: as <tddp/backend.h> says. `mutex` guards the lists of channels; a channel that is in a
 * list stays until the end. Messages of one direction between two ranks are launched in the order
 * of their tickets, which they get when they are posted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/nccl/compare.h"
#include "backend/nccl/operations.h"

enum { MOST_DEVICES = 64 };

/* One direction between this rank and another. */
typedef struct lane {
    pthread_mutex_t mutex;
    pthread_cond_t turned;
    uint64_t posted;
    uint64_t launched;
    tddp_nccl_channel *channel; /* NULL: not made yet */
} lane;

typedef struct context {
    const tddp_nccl_libraries *libraries;
    int rank;
    int size;
    int device; /* -1: as the buffers say */
    bool bound; /* no other one */
    tddp_store *store;
    int64_t timeout_ms;
    _Atomic bool aborted;
    tddp_nccl_comparer comparer;
    lane *lanes[2]; /* to each rank, and from each */
    pthread_mutex_t mutex;
    int made; /* communicators of all ranks so far: equal on all ranks, as operations are */
    tddp_nccl_id first_id; /* of the first of them, unless the group is bound */
    tddp_nccl_channel *channels[MOST_DEVICES];
} context;

/* One operation on its way. */
typedef struct posted {
    tddp_nccl_request *request;
    lane *lane; /* of a message; NULL: of all ranks */
    uint64_t ticket;
} posted;

/* --- channels -------------------------------------------------------------------------------- */

static tddp_nccl_plan plan_of(context *self, int device, const char *key, int64_t deadline_ns,
                              tddp_cancel *cancel)
{
    return (tddp_nccl_plan){.device = device,
                            .rank = self->rank,
                            .size = self->size,
                            .store = self->store,
                            .key = key,
                            .until = {deadline_ns, cancel, &self->aborted}};
}

static tddp_status open_channel(context *self, int device, int64_t deadline_ns, tddp_cancel *cancel,
                                tddp_nccl_channel *from, tddp_nccl_channel **out)
{
    char key[64];
    const bool first = self->made == 0 && !self->bound;
    (void)snprintf(key, sizeof key, "nccl/%d", self->made++);
    tddp_nccl_plan plan = plan_of(self, device, key, deadline_ns, cancel);
    plan.from = from;
    plan.id = first ? &self->first_id : NULL;
    tddp_nccl_channel *made;
    tddp_status status = tddp_nccl_channel_open(self->libraries, &plan, &made);
    if (status) {
        return status;
    }
    pthread_mutex_lock(&self->mutex);
    self->channels[device] = made;
    bool late = atomic_load(&self->aborted);
    pthread_mutex_unlock(&self->mutex);
    if (late) {
        tddp_nccl_channel_abort(made);
    }
    *out = made;
    return TDDP_OK;
}

/* The device of an operation: that of its memory, or the group's. */
static tddp_status device_of(const context *self, const tddp_op *op, int *device)
{
    const tddp_buffer *buffer = op->input.device_type == TDDP_CUDA ? &op->input : &op->output;
    int found = buffer->device_index;
    if (op->kind == TDDP_OP_BARRIER) {
        found = self->device < 0 ? 0 : self->device;
    }
    if (found < 0 || found >= MOST_DEVICES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected 0 to %d", found,
                         MOST_DEVICES - 1);
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

static tddp_status channel_on(context *self, int device, int64_t deadline_ns,
                              tddp_nccl_channel **out)
{
    *out = self->channels[device];
    return *out ? TDDP_OK : open_channel(self, device, deadline_ns, NULL, NULL, out);
}

/* --- operations of all ranks ----------------------------------------------------------------- */

static tddp_status launch_on(context *self, tddp_nccl_request *request)
{
    tddp_nccl_channel *channel;
    tddp_status status = TDDP_OK;
    if (tddp_nccl_compares(request->op)) {
        const tddp_nccl_until until = {request->deadline_ns, NULL, &self->aborted};
        status = tddp_nccl_compare(&self->comparer, request->op, until);
    }
    if (status == TDDP_OK) {
        status = channel_on(self, request->device, request->deadline_ns, &channel);
    }
    return status ? status : tddp_nccl_launch(request, channel);
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
        status = tddp_nccl_request_await(request);
    }
    tddp_nccl_request_free(request);
    return status;
}

/* --- messages -------------------------------------------------------------------------------- */

/* Messages of one direction are launched in the order of their tickets. */
static void take_ticket(context *self, posted *it)
{
    const tddp_op *op = it->request->op;
    it->lane = &self->lanes[op->kind == TDDP_OP_RECV][op->peer];
    pthread_mutex_lock(&it->lane->mutex);
    it->ticket = it->lane->posted++;
    pthread_mutex_unlock(&it->lane->mutex);
}

/* With the lane's lock held, which is free while ranks connect. */
static tddp_status connect_lane(context *self, const posted *it)
{
    const tddp_op *op = it->request->op;
    const bool sends = op->kind == TDDP_OP_SEND;
    char key[64];
    (void)snprintf(key, sizeof key, "nccl/%d to %d", sends ? self->rank : op->peer,
                   sends ? op->peer : self->rank);
    tddp_nccl_plan plan = plan_of(self, it->request->device, key, it->request->deadline_ns, NULL);
    plan.rank = sends ? 0 : 1;
    plan.size = 2;
    tddp_nccl_channel *made = NULL;
    pthread_mutex_unlock(&it->lane->mutex);
    tddp_status status = tddp_nccl_channel_open(self->libraries, &plan, &made);
    pthread_mutex_lock(&it->lane->mutex);
    it->lane->channel = made;
    if (made && atomic_load(&self->aborted)) {
        tddp_nccl_channel_abort(made);
    }
    return status;
}

/* Waits for the turn of its ticket; those before it are launched, or have failed, soon. */
static tddp_status launch_in_turn(context *self, posted *it)
{
    lane *way = it->lane;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&way->mutex);
    while (way->launched != it->ticket) {
        pthread_cond_wait(&way->turned, &way->mutex);
    }
    if (!way->channel) {
        status = connect_lane(self, it);
    }
    if (status == TDDP_OK) {
        status = tddp_nccl_launch_message(it->request, way->channel);
    }
    way->launched++;
    pthread_cond_broadcast(&way->turned);
    pthread_mutex_unlock(&way->mutex);
    return status;
}

/* --- an operation's way ---------------------------------------------------------------------- */

static tddp_status post(void *data, const tddp_op *op, void **request)
{
    context *self = data;
    int device;
    if (op->kind == TDDP_OP_RECV && op->peer == TDDP_ANY_SOURCE) {
        return tddp_fail(TDDP_UNSUPPORTED, "nccl cannot receive from any rank: name the sender, or "
                                           "use gloo");
    }
    posted *it = calloc(1, sizeof *it);
    if (!it) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = device_of(self, op, &device);
    if (status == TDDP_OK) {
        status = tddp_nccl_request_create(self->libraries, op, device, &it->request);
    }
    if (status) {
        free(it);
        return status;
    }
    if (tddp_op_is_p2p(op->kind)) {
        take_ticket(self, it);
    }
    *request = it;
    return TDDP_OK;
}

static tddp_status launch_posted(void *data, void *request)
{
    posted *it = request;
    return it->lane ? launch_in_turn(data, it) : launch_on(data, it->request);
}

static tddp_status order(void *data, void *request, void *stream)
{
    (void)data;
    return tddp_nccl_request_order(((posted *)request)->request, stream);
}

static tddp_status await(void *data, void *request)
{
    (void)data;
    return tddp_nccl_request_await(((posted *)request)->request);
}

static tddp_status finish(void *data, void *request, int *source)
{
    (void)data;
    posted *it = request;
    const tddp_op *op = it->request->op;
    if (op->device_ns && it->request->channel) {
        *op->device_ns = tddp_nccl_request_ns(it->request);
    }
    if (op->kind == TDDP_OP_RECV) {
        *source = op->peer;
    }
    tddp_nccl_request_free(it->request);
    free(it);
    return TDDP_OK;
}

/* --- a group's life -------------------------------------------------------------------------- */

static void abort_all(void *data)
{
    context *self = data;
    atomic_store(&self->aborted, true);
    pthread_mutex_lock(&self->mutex);
    for (int i = 0; i < MOST_DEVICES; i++) {
        if (self->channels[i]) {
            tddp_nccl_channel_abort(self->channels[i]);
        }
    }
    pthread_mutex_unlock(&self->mutex);
    for (int i = 0; i < 2 * self->size; i++) {
        lane *way = &self->lanes[i % 2][i / 2];
        pthread_mutex_lock(&way->mutex);
        if (way->channel) {
            tddp_nccl_channel_abort(way->channel);
        }
        pthread_mutex_unlock(&way->mutex);
    }
}

static void destroy(void *data)
{
    context *self = data;
    for (int i = 0; i < MOST_DEVICES; i++) {
        tddp_nccl_channel_close(self->channels[i]);
    }
    for (int i = 0; i < 2 * self->size && self->lanes[0] && self->lanes[1]; i++) {
        lane *way = &self->lanes[i % 2][i / 2];
        tddp_nccl_channel_close(way->channel);
        pthread_cond_destroy(&way->turned);
        pthread_mutex_destroy(&way->mutex);
    }
    free(self->lanes[0]);
    free(self->lanes[1]);
    free(self->comparer.calls);
    tddp_store_release(self->store);
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

static tddp_status make(const tddp_backend_opts *opts, const tddp_nccl_libraries *libraries,
                        context **out)
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
    self->comparer =
        (tddp_nccl_comparer){.rank = self->rank, .size = self->size, .store = self->store};
    pthread_mutex_init(&self->mutex, NULL);
    for (int side = 0; side < 2; side++) {
        self->lanes[side] = calloc((size_t)self->size, sizeof(lane));
    }
    if (!self->lanes[0] || !self->lanes[1]) {
        destroy(self);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    for (int i = 0; i < 2 * self->size; i++) {
        pthread_mutex_init(&self->lanes[i % 2][i / 2].mutex, NULL);
        pthread_cond_init(&self->lanes[i % 2][i / 2].turned, NULL);
    }
    *out = self;
    return TDDP_OK;
}

/* The communicator that those of groups made from a bound one are split off from. */
static tddp_nccl_channel *trunk(const context *parent)
{
    return parent && parent->bound ? parent->channels[parent->device] : NULL;
}

static tddp_status decline(void *data, const tddp_wait *wait)
{
    context *self = data;
    tddp_nccl_channel *from = trunk(self);
    if (!from) {
        return TDDP_OK;
    }
    bool timed = wait && wait->timeout_ms >= 0;
    int64_t deadline = tddp_nccl_deadline(timed ? wait->timeout_ms : self->timeout_ms);
    tddp_nccl_plan plan =
        plan_of(self, self->device, "a group of others", deadline, wait ? wait->cancel : NULL);
    return tddp_nccl_channel_decline(from, &plan);
}

/* Bound to a device all ranks connect at once, else with their first operation there, for which all
 * get what they need here: the store may have ended by then. What is made from a bound group is
 * bound as that is. */
static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    const tddp_nccl_libraries *libraries;
    context *self = NULL;
    tddp_status status = tddp_nccl_libraries_get(&libraries);
    if (status == TDDP_OK && opts->device_index >= MOST_DEVICES) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected 0 to %d", opts->device_index,
                           MOST_DEVICES - 1);
    }
    if (status == TDDP_OK) {
        status = make(opts, libraries, &self);
    }
    if (status) {
        return status;
    }
    tddp_nccl_channel *from = trunk(opts->parent);
    if (from) {
        self->device = from->device;
        self->bound = true;
    }
    bool timed = wait && wait->timeout_ms >= 0;
    int64_t deadline = tddp_nccl_deadline(timed ? wait->timeout_ms : opts->timeout_ms);
    tddp_cancel *cancel = wait ? wait->cancel : NULL;
    if (self->bound) {
        tddp_nccl_channel *channel;
        status = open_channel(self, self->device, deadline, cancel, from, &channel);
    } else {
        const tddp_nccl_plan plan = plan_of(self, -1, "nccl/id", deadline, cancel);
        status = tddp_nccl_share_id(libraries, &plan, &self->first_id);
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
    .launch = launch_posted,
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

/* Without the libraries the backend is not there. */
const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    const tddp_nccl_libraries *libraries;
    if (core_abi != TDDP_BACKEND_ABI || tddp_nccl_libraries_get(&libraries)) {
        return NULL;
    }
    return &backend;
}
