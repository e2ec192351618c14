/*
 * Messages: sends, receives, and which receive gets which message.
 *
 * A message goes to the receive that was posted first of those for its sender and tag, or for any
 * sender and its tag; one without a receive waits in its sender's list, in UCX's memory or, if it
 * is large, at its sender (rendezvous). UCX delivers the messages of a connection in the order in
 * which they were sent; their numbers show if it doesn't.
 *
 * Invariant: UCX uses the memory of a transfer only while that is MOVING, and then nothing but the
 * end of the worker is sure to stop it: release() of such a transfer ends the worker.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ucx/ucx.h"

/* --- transfers ------------------------------------------------------------------------------- */

static void link_to(tddp_ucx_transfer **list, tddp_ucx_transfer *transfer)
{
    while (*list) {
        list = &(*list)->next;
    }
    transfer->next = NULL;
    transfer->link = list;
    *list = transfer;
}

static void unlink_from(tddp_ucx_transfer *transfer)
{
    *transfer->link = transfer->next;
    if (transfer->next) {
        transfer->next->link = transfer->link;
    }
}

/* In front, since their order doesn't matter. */
static void set_moving(tddp_ucx_transfer *transfer)
{
    tddp_ucx *self = transfer->self;
    transfer->next = self->moving;
    transfer->link = &self->moving;
    if (self->moving) {
        self->moving->link = &transfer->next;
    }
    self->moving = transfer;
    atomic_store(&transfer->phase, TDDP_UCX_MOVING);
}

void tddp_ucx_complete(tddp_ucx_transfer *transfer, ucs_status_t status)
{
    if (atomic_load(&transfer->phase) == TDDP_UCX_MOVING) {
        unlink_from(transfer);
    }
    transfer->status = status;
    atomic_store(&transfer->phase, TDDP_UCX_DONE);
    tddp_eventcount_notify(transfer->self->events);
}

/* What UCX returns for an operation that has begun: NULL, an error, or a request, which its
 * callback frees. */
static void begun(tddp_ucx_transfer *transfer, ucs_status_ptr_t result)
{
    if (!UCS_PTR_IS_PTR(result)) {
        tddp_ucx_complete(transfer, UCS_PTR_RAW_STATUS(result));
    }
}

static void on_sent(void *request, ucs_status_t status, void *transfer)
{
    tddp_ucx_complete(transfer, status);
    ucp_request_free(request);
}

static void on_received(void *request, ucs_status_t status, size_t bytes, void *data)
{
    tddp_ucx_transfer *transfer = data;
    transfer->arrived = bytes;
    tddp_ucx_complete(transfer, status);
    ucp_request_free(request);
}

/* --- matching -------------------------------------------------------------------------------- */

static tddp_ucx_transfer *first_posted(tddp_ucx_transfer *list, uint64_t tag)
{
    while (list && list->header.tag != tag) {
        list = list->next;
    }
    return list;
}

/* Takes the receive for a message out of its list; NULL: there is none yet. */
static tddp_ucx_transfer *match_receive(tddp_ucx_peer *peer, uint64_t tag)
{
    tddp_ucx_transfer *one = first_posted(peer->posted, tag);
    tddp_ucx_transfer *any = first_posted(peer->self->posted_any, tag);
    tddp_ucx_transfer *found = !any || (one && one->order < any->order) ? one : any;
    if (found) {
        unlink_from(found);
        found->peer = peer->rank;
    }
    return found;
}

static tddp_ucx_message **first_message(tddp_ucx_peer *peer, uint64_t tag)
{
    tddp_ucx_message **link = &peer->unexpected;
    while (*link && (*link)->tag != tag) {
        link = &(*link)->next;
    }
    return link;
}

/* Takes the message for a receive out of its list, and sets the receive's peer. */
static tddp_ucx_message *match_message(tddp_ucx_transfer *transfer)
{
    tddp_ucx *self = transfer->self;
    const int wanted = transfer->peer;
    tddp_ucx_message **best = NULL;
    for (int rank = 0; rank < self->size; rank++) {
        if (wanted == TDDP_ANY_SOURCE || wanted == rank) {
            tddp_ucx_message **link = first_message(&self->peers[rank], transfer->header.tag);
            if (*link && (!best || (*link)->order < (*best)->order)) {
                best = link;
                transfer->peer = rank;
            }
        }
    }
    tddp_ucx_message *found = best ? *best : NULL;
    if (found) {
        *best = found->next;
    }
    return found;
}

/* A receive has its message. Does not take `data` over unless it is a rendezvous. */
static void deliver(tddp_ucx_transfer *transfer, void *data, size_t bytes, bool rendezvous)
{
    ucp_worker_h worker = transfer->self->worker;
    transfer->arrived = bytes;
    if (bytes > transfer->bytes) {
        if (rendezvous) {
            ucp_am_data_release(worker, data);
        }
        tddp_ucx_complete(transfer, UCS_ERR_MESSAGE_TRUNCATED);
    } else if (!rendezvous) {
        if (bytes > 0) {
            memcpy(transfer->data, data, bytes);
        }
        tddp_ucx_complete(transfer, UCS_OK);
    } else {
        const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                           UCP_OP_ATTR_FIELD_USER_DATA,
                                           .cb.recv_am = on_received,
                                           .user_data = transfer};
        set_moving(transfer);
        begun(transfer, ucp_am_recv_data_nbx(worker, data, transfer->data, bytes, &param));
    }
}

/* Stores a message until its receive is posted; false: there is no memory for it. */
static bool store(tddp_ucx_peer *peer, uint64_t tag, void *data, size_t bytes,
                  const ucp_am_recv_param_t *param, bool *keeps)
{
    const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    *keeps = rendezvous || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA);
    tddp_ucx_message *message = malloc(sizeof *message + (*keeps ? 0 : bytes));
    if (!message) {
        *keeps = false;
        return false;
    }
    *message = (tddp_ucx_message){.tag = tag,
                                  .order = peer->self->order++,
                                  .data = *keeps ? data : message->copy,
                                  .bytes = bytes,
                                  .rendezvous = rendezvous};
    if (!*keeps && bytes > 0) {
        memcpy(message->copy, data, bytes);
    }
    tddp_ucx_message **end = &peer->unexpected;
    while (*end) {
        end = &(*end)->next;
    }
    *end = message;
    return true;
}

static void free_message(tddp_ucx *self, tddp_ucx_message *message, bool is_taken)
{
    if (message->data != message->copy && !is_taken) {
        ucp_am_data_release(self->worker, message->data);
    }
    free(message);
}

void tddp_ucx_drop_messages(tddp_ucx *self)
{
    for (int rank = 0; rank < self->size; rank++) {
        while (self->peers[rank].unexpected) {
            tddp_ucx_message *message = self->peers[rank].unexpected;
            self->peers[rank].unexpected = message->next;
            free_message(self, message, false);
        }
    }
}

/* A message has arrived. UCS_INPROGRESS: `data` is released later. */
ucs_status_t tddp_ucx_on_data(void *context, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param)
{
    tddp_ucx *self = context;
    tddp_ucx_header it;
    tddp_ucx_peer *peer = tddp_ucx_sender(self, header, header_bytes, &it);
    if (!peer) {
        return UCS_OK;
    }
    if (it.number != ++peer->received) {
        tddp_ucx_lose(peer, "a message of it is missing");
        return UCS_OK;
    }
    tddp_ucx_transfer *transfer = match_receive(peer, it.tag);
    const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    if (transfer && !(rendezvous && bytes > transfer->bytes)) {
        deliver(transfer, data, bytes, rendezvous);
        return rendezvous ? UCS_INPROGRESS : UCS_OK;
    }
    if (transfer) { /* too large: UCX drops it */
        transfer->arrived = bytes;
        tddp_ucx_complete(transfer, UCS_ERR_MESSAGE_TRUNCATED);
        return UCS_OK;
    }
    bool keeps;
    if (!store(peer, it.tag, data, bytes, param, &keeps)) {
        tddp_ucx_lose(peer, "there is no memory for its message");
    }
    return keeps ? UCS_INPROGRESS : UCS_OK;
}

/* --- the slots of transport.h ---------------------------------------------------------------- */

static tddp_status new_transfer(tddp_ucx *self, int peer, uint64_t tag, size_t bytes,
                                tddp_ucx_transfer **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    (*out)->self = self;
    (*out)->peer = peer;
    (*out)->bytes = bytes;
    (*out)->header = (tddp_ucx_header){.tag = tag, .rank = (uint32_t)self->rank};
    return TDDP_OK;
}

static void post_send(tddp_ucx_transfer *transfer, tddp_ucx_peer *peer, const void *data)
{
    const ucp_request_param_t param = {.op_attr_mask =
                                           UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                       .cb.send = on_sent,
                                       .user_data = transfer};
    transfer->sends = true;
    transfer->header.number = ++peer->sent;
    set_moving(transfer);
    begun(transfer, ucp_am_send_nbx(peer->endpoint, TDDP_UCX_DATA, &transfer->header,
                                    sizeof transfer->header, data, transfer->bytes, &param));
}

static tddp_status start_send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                              void **out)
{
    tddp_ucx *self = context;
    tddp_ucx_transfer *transfer;
    tddp_status status = new_transfer(self, peer, tag, bytes, &transfer);
    if (status) {
        return status;
    }
    tddp_ucx_peer *to = &self->peers[peer];
    pthread_mutex_lock(&self->mutex);
    status = tddp_ucx_check(self, peer, 0);
    if (status == TDDP_OK) {
        post_send(transfer, to, data);
    }
    pthread_mutex_unlock(&self->mutex);
    if (status) {
        free(transfer);
        return status;
    }
    *out = transfer;
    return TDDP_OK;
}

static tddp_status start_recv(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                              void **out)
{
    tddp_ucx *self = context;
    tddp_ucx_transfer *transfer;
    tddp_status status = new_transfer(self, peer, tag, bytes, &transfer);
    if (status) {
        return status;
    }
    transfer->data = data;
    pthread_mutex_lock(&self->mutex);
    transfer->order = self->order++;
    tddp_ucx_message *message = match_message(transfer);
    if (message) {
        deliver(transfer, message->data, message->bytes, message->rendezvous);
        free_message(self, message, message->rendezvous);
    } else if (atomic_load(&self->aborted)) {
        status = tddp_ucx_check(self, peer, 0);
    } else {
        link_to(peer == TDDP_ANY_SOURCE ? &self->posted_any : &self->peers[peer].posted, transfer);
    }
    pthread_mutex_unlock(&self->mutex);
    if (status) {
        free(transfer);
        return status;
    }
    *out = transfer;
    return TDDP_OK;
}

/* The text for one that UCX, or this rank, has failed. */
static tddp_status fail_transfer(tddp_ucx_transfer *transfer)
{
    tddp_ucx *self = transfer->self;
    if (transfer->status == UCS_ERR_MESSAGE_TRUNCATED) {
        return tddp_fail(TDDP_PROTOCOL, "a message of %zu bytes from rank %d: expected at most %zu",
                         transfer->arrived,
                         self->names ? self->names[transfer->peer] : transfer->peer,
                         transfer->bytes);
    }
    pthread_mutex_lock(&self->mutex);
    if (!atomic_load(&self->aborted)) { /* UCX may tell the transfer before the endpoint */
        tddp_ucx_lose(&self->peers[transfer->peer], ucs_status_string(transfer->status));
    }
    tddp_status status = tddp_ucx_check(self, transfer->peer, 0);
    pthread_mutex_unlock(&self->mutex);
    return status;
}

static tddp_status test(void *context, void *it, int *complete, int *source)
{
    tddp_ucx *self = context;
    tddp_ucx_transfer *transfer = it;
    *complete = 0;
    if (atomic_load(&transfer->phase) != TDDP_UCX_DONE) {
        if (!atomic_load(&self->aborted) && atomic_load(&self->inactive) == 0) {
            return TDDP_OK;
        }
        pthread_mutex_lock(&self->mutex);
        tddp_status status = atomic_load(&transfer->phase) == TDDP_UCX_DONE
                                 ? TDDP_OK
                                 : tddp_ucx_check(self, transfer->peer, 0);
        pthread_mutex_unlock(&self->mutex);
        *complete = status != TDDP_OK;
        if (status || atomic_load(&transfer->phase) != TDDP_UCX_DONE) {
            return status;
        }
    }
    *complete = 1;
    if (transfer->status != UCS_OK) {
        return fail_transfer(transfer);
    }
    if (source && !transfer->sends) {
        *source = transfer->peer;
    }
    return TDDP_OK;
}

static void release(void *context, void *it)
{
    tddp_ucx *self = context;
    tddp_ucx_transfer *transfer = it;
    pthread_mutex_lock(&self->mutex);
    const tddp_ucx_phase phase = atomic_load(&transfer->phase);
    if (phase == TDDP_UCX_POSTED) {
        unlink_from(transfer);
    }
    pthread_mutex_unlock(&self->mutex);
    if (phase == TDDP_UCX_MOVING) {
        tddp_ucx_close(self, "a transfer was canceled while its data moved");
    }
    free(transfer);
}

static struct tddp_eventcount *events(void *context)
{
    return ((tddp_ucx *)context)->events;
}

const tddp_transport_ops tddp_ucx_transport = {
    .size = sizeof(tddp_transport_ops),
    .send = start_send,
    .recv = start_recv,
    .test = test,
    .release = release,
    .events = events,
    .check_peer = tddp_ucx_check_peer,
    .report_failure = tddp_ucx_report_failure,
    .progress = tddp_ucx_poll,
    .arm = tddp_ucx_arm,
};

void tddp_ucx_progress(tddp_ucx *self)
{
    if (self->worker) {
        (void)ucp_worker_progress(self->worker);
    }
    if (self->must_settle && self->worker) {
        tddp_ucx_settle(self);
    }
}
