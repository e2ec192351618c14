/*
 * Sends and receives, and the transport's table. Any thread.
 *
 * Invariant: UCX uses the memory of a transfer only while that is MOVING. It gives a receive
 * without a message back when that is canceled; of others nothing but the end of their connections
 * is sure to stop it.
 */
#include <stdlib.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"

#define TAG_MASK ((UINT64_C(1) << TDDP_UCX_TAG_BITS) - 1)
#define PROBE_NS (1000 * TDDP_NS_PER_MS)

/* --- with the mutex held --------------------------------------------------------------------- */

static void complete(tddp_ucx_transfer *transfer, ucs_status_t status,
                     const ucp_tag_recv_info_t *info)
{
    tddp_ucx *self = transfer->self;
    transfer->status = status;
    if (info && status == UCS_OK) {
        transfer->peer = (int)(info->sender_tag >> TDDP_UCX_TAG_BITS);
        tddp_ucx_hear(self, transfer->peer);
    }
    atomic_store(&transfer->phase, TDDP_UCX_DONE);
    if (transfer == &self->control && status == UCS_OK && info) {
        tddp_ucx_take_control(self, info->sender_tag);
    }
    tddp_eventcount_notify(self->events);
}

static void on_sent(void *request, ucs_status_t status, void *transfer)
{
    complete(transfer, status, NULL);
    ucp_request_free(request);
}

static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                        void *transfer)
{
    complete(transfer, status, info);
    ucp_request_free(request);
}

void tddp_ucx_post_send(tddp_ucx_transfer *transfer)
{
    tddp_ucx *self = transfer->self;
    const ucp_request_param_t param = {.op_attr_mask =
                                           UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                       .cb.send = on_sent,
                                       .user_data = transfer};
    atomic_store(&transfer->phase, TDDP_UCX_MOVING);
    transfer->request = ucp_tag_send_nbx(self->peers[transfer->peer].endpoint, transfer->data,
                                         transfer->bytes, transfer->tag, &param);
    if (!UCS_PTR_IS_PTR(transfer->request)) {
        complete(transfer, UCS_PTR_RAW_STATUS(transfer->request), NULL);
    }
}

void tddp_ucx_post_recv(tddp_ucx_transfer *transfer)
{
    tddp_ucx *self = transfer->self;
    ucp_tag_recv_info_t info;
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA |
                                                       UCP_OP_ATTR_FIELD_RECV_INFO,
                                       .cb.recv = on_received,
                                       .user_data = transfer,
                                       .recv_info.tag_info = &info};
    atomic_store(&transfer->phase, TDDP_UCX_MOVING);
    transfer->request = ucp_tag_recv_nbx(self->worker, transfer->data, transfer->bytes,
                                         transfer->tag, transfer->mask, &param);
    if (!UCS_PTR_IS_PTR(transfer->request)) {
        complete(transfer, UCS_PTR_RAW_STATUS(transfer->request), &info);
    }
}

/* --- the table ------------------------------------------------------------------------------- */

/* Why a transfer with this peer can't end well. */
static tddp_status fail_ended(const tddp_ucx *self, int peer)
{
    if (atomic_load(&self->closed)) {
        return tddp_fail(TDDP_GROUP_FAILED, "this rank has closed its connections");
    }
    return tddp_fail(TDDP_PEER_LOST, "%s",
                     peer == TDDP_ANY_SOURCE ? "all have ended" : self->peers[peer].reason);
}

static bool has_ended(const tddp_ucx *self, int peer)
{
    return atomic_load(&self->closed) ||
           (peer == TDDP_ANY_SOURCE ? atomic_load(&self->ended) == self->size - 1
                                    : atomic_load(&self->peers[peer].ended));
}

static tddp_status start(tddp_ucx *self, const tddp_ucx_transfer *what, void **out)
{
    tddp_ucx_transfer *transfer = malloc(sizeof *transfer);
    if (!transfer) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    *transfer = *what;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&self->mutex);
    if (atomic_load(&self->closed) || (transfer->sends && has_ended(self, transfer->peer))) {
        status = fail_ended(self, transfer->peer);
    } else if (!transfer->sends) {
        tddp_ucx_post_recv(transfer);
    } else if (self->peers[transfer->peer].endpoint) {
        tddp_ucx_post_send(transfer);
    } else {
        tddp_ucx_transfer **end = &self->queue;
        while (*end) {
            end = &(*end)->next;
        }
        *end = transfer;
    }
    pthread_mutex_unlock(&self->mutex);
    if (status) {
        free(transfer);
        return status;
    }
    *out = transfer;
    return TDDP_OK;
}

static uint64_t tag_of(int rank, uint64_t tag)
{
    return (uint64_t)rank << TDDP_UCX_TAG_BITS | tag;
}

static tddp_status start_send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                              void **out)
{
    tddp_ucx *self = context;
    const tddp_ucx_transfer it = {.self = self,
                                  .peer = peer,
                                  .sends = true,
                                  .data = (void *)(uintptr_t)data,
                                  .bytes = bytes,
                                  .tag = tag_of(self->rank, tag)};
    return start(self, &it, out);
}

static tddp_status start_recv(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                              void **out)
{
    const bool any = peer == TDDP_ANY_SOURCE;
    const tddp_ucx_transfer it = {.self = context,
                                  .peer = peer,
                                  .data = data,
                                  .bytes = bytes,
                                  .tag = any ? tag : tag_of(peer, tag),
                                  .mask = any ? TAG_MASK : UINT64_MAX};
    return start(context, &it, out);
}

/* A rank that should have connected by now is connected to, to learn whether it lives. */
static void probe(tddp_ucx *self, int peer)
{
    if (peer < 0 || peer > self->rank || atomic_load(&self->heard) == self->size - 1 ||
        tddp_now_ns() - self->began < PROBE_NS) {
        return;
    }
    pthread_mutex_lock(&self->mutex);
    if (!self->peers[peer].endpoint && !has_ended(self, peer)) {
        tddp_ucx_connect_to(&self->peers[peer]);
    }
    pthread_mutex_unlock(&self->mutex);
}

static tddp_status test(void *context, void *it, int *complete_now, int *source)
{
    tddp_ucx *self = context;
    const tddp_ucx_transfer *transfer = it;
    if (atomic_load(&transfer->phase) != TDDP_UCX_DONE) {
        /* A connection ends after its last completion: it is looked at first. */
        const bool ended = has_ended(self, transfer->peer);
        *complete_now = ended;
        if (atomic_load(&transfer->phase) != TDDP_UCX_DONE) {
            probe(self, transfer->peer);
            return ended ? fail_ended(self, transfer->peer) : TDDP_OK;
        }
    }
    *complete_now = 1;
    if (transfer->status == UCS_ERR_MESSAGE_TRUNCATED) {
        return tddp_fail(TDDP_PROTOCOL, "a message is longer than the %zu bytes expected",
                         transfer->bytes);
    }
    if (transfer->status != UCS_OK) {
        return has_ended(self, transfer->peer)
                   ? fail_ended(self, transfer->peer)
                   : tddp_fail(TDDP_PEER_LOST, "%s", ucs_status_string(transfer->status));
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
    for (tddp_ucx_transfer **link = &self->queue; *link; link = &(*link)->next) {
        if (*link == transfer) {
            *link = transfer->next;
            break;
        }
    }
    if (atomic_load(&transfer->phase) == TDDP_UCX_MOVING && self->worker) {
        if (!transfer->sends) {
            ucp_request_cancel(self->worker, transfer->request);
        }
        tddp_ucx_end_transfer(transfer);
    }
    pthread_mutex_unlock(&self->mutex);
    free(transfer);
}

const tddp_transport_ops tddp_ucx_transport = {
    .size = sizeof tddp_ucx_transport,
    .name = "ucx",
    .traits = TDDP_BACKEND_SHARES_HOSTS,
    .open = tddp_ucx_open,
    .connect = tddp_ucx_connect,
    .send = start_send,
    .recv = start_recv,
    .test = test,
    .release = release,
    .progress = tddp_ucx_poll,
    .arm = tddp_ucx_arm,
    .close = tddp_ucx_close,
    .destroy = tddp_ucx_destroy,
};

TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);
const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? tddp_transport_backend(&tddp_ucx_transport) : NULL;
}
