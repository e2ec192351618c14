/*
 * A rank's worker, its connections, and their end. open() and connect() run on the thread that
 * creates the group, close() on any. Callbacks of UCX note what has to be done, and settle() does
 * it once UCX has returned.
 *
 * A connection that is closed while it has unread input is reset, and what the peer has not read
 * yet may be lost. So a rank that closes says goodbye as its last message, and ends its connections
 * once each peer has acknowledged that, which is after all before it, or has ended, or doesn't
 * answer.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"

/* Tags of goodbyes and of their acknowledgements, which have the second bit too. */
#define GOODBYE_TAG (UINT64_C(1) << TDDP_TRANSPORT_TAG_BITS)
#define ACKNOWLEDGED UINT64_C(1)

enum { OTHER_FILES = 48, CANCEL_MS = 1000 };

static void end(tddp_ucx_peer *peer, const char *reason)
{
    if (!atomic_load(&peer->ended)) {
        (void)snprintf(peer->reason, sizeof peer->reason, "%s", reason);
        atomic_store(&peer->ended, true);
        atomic_fetch_add(&peer->self->ended, 1);
        tddp_eventcount_notify(peer->self->events);
    }
}

/* UCX tells later that its transfers have failed. */
static void disconnect(tddp_ucx_peer *peer)
{
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request =
        peer->endpoint ? ucp_ep_close_nbx(peer->endpoint, &param) : (ucs_status_ptr_t)NULL;
    peer->endpoint = NULL;
    peer->must_disconnect = false;
    if (UCS_PTR_IS_PTR(request)) {
        ucp_request_free(request); /* once it is complete */
    }
}

static void on_error(void *data, ucp_ep_h endpoint, ucs_status_t status)
{
    tddp_ucx_peer *peer = data;
    (void)endpoint;
    peer->must_disconnect = true;
    peer->self->must_settle = true;
    end(peer, ucs_status_string(status));
}

void tddp_ucx_connect_to(tddp_ucx_peer *peer)
{
    tddp_ucx *self = peer->self;
    const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                    .address = peer->address,
                                    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                    .err_handler = {.cb = on_error, .arg = peer}};
    const ucs_status_t status = ucp_ep_create(self->worker, &params, &peer->endpoint);
    if (status != UCS_OK) {
        peer->endpoint = NULL;
        end(peer, ucs_status_string(status));
        return;
    }
    for (tddp_ucx_transfer **link = &self->queue; *link;) {
        tddp_ucx_transfer *transfer = *link;
        if (&self->peers[transfer->peer] == peer) {
            *link = transfer->next;
            tddp_ucx_post_send(transfer);
        } else {
            link = &transfer->next;
        }
    }
}

/* --- progress -------------------------------------------------------------------------------- */

/* Complete when UCX says so, which nobody waits for. */
static void send_control(tddp_ucx_peer *peer, uint64_t kind)
{
    static const ucp_request_param_t param = {0};
    const tddp_ucx *self = peer->self;
    const ucp_tag_t tag = (uint64_t)self->rank << TDDP_UCX_TAG_BITS | GOODBYE_TAG | kind;
    if (peer->endpoint && !peer->must_disconnect) {
        ucs_status_ptr_t request = ucp_tag_send_nbx(peer->endpoint, NULL, 0, tag, &param);
        if (UCS_PTR_IS_PTR(request)) {
            ucp_request_free(request); /* once it is complete */
        }
    }
}

void tddp_ucx_take_control(tddp_ucx *self, ucp_tag_t tag)
{
    tddp_ucx_peer *peer = &self->peers[tag >> TDDP_UCX_TAG_BITS];
    const bool acknowledged = (tag & ACKNOWLEDGED) != 0;
    peer->acknowledged = peer->acknowledged || acknowledged;
    peer->must_acknowledge = !acknowledged;
    self->must_settle = true;
}

void tddp_ucx_hear(tddp_ucx *self, int peer)
{
    if (!self->peers[peer].heard) {
        self->peers[peer].heard = true;
        self->must_settle = true;
        atomic_fetch_add(&self->heard, 1);
    }
}

static bool is_returned(const void *data)
{
    return atomic_load(&((const tddp_ucx_transfer *)data)->phase) == TDDP_UCX_DONE;
}

static void settle(tddp_ucx *self)
{
    self->must_settle = false;
    while (is_returned(&self->control) && self->control.status == UCS_OK) {
        self->control.peer = TDDP_ANY_SOURCE;
        tddp_ucx_post_recv(&self->control);
    }
    for (int rank = 0; rank < self->size; rank++) {
        tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->heard && !peer->endpoint && !atomic_load(&peer->ended)) {
            tddp_ucx_connect_to(peer);
        }
        if (peer->must_acknowledge) {
            peer->must_acknowledge = false;
            send_control(peer, ACKNOWLEDGED);
        }
        if (peer->must_disconnect) {
            disconnect(peer);
        }
    }
    if (!self->has_sockets && atomic_load(&self->heard) == self->size - 1) {
        self->has_sockets = true;
        tddp_ucx_set_up_sockets(self);
    }
}

void tddp_ucx_progress(tddp_ucx *self)
{
    if (self->worker) {
        (void)ucp_worker_progress(self->worker);
    }
    if (self->must_settle && self->worker && !atomic_load(&self->closed)) {
        settle(self);
    }
}

/* Moves messages until it is so, for at most so many milliseconds. */
static bool progress_until(tddp_ucx *self, bool (*holds)(const void *), const void *data,
                           int64_t ms)
{
    enum { SLEEP_MS = 10 };
    const int64_t deadline = tddp_deadline_after_ms(ms);
    while (self->worker && !holds(data) && tddp_now_ns() < deadline) {
        tddp_ucx_progress(self);
        if (!holds(data) && ucp_worker_arm(self->worker) == UCS_OK) {
            struct pollfd one = {.fd = self->descriptor, .events = POLLIN};
            pthread_mutex_unlock(&self->mutex);
            (void)poll(&one, 1, SLEEP_MS);
            pthread_mutex_lock(&self->mutex);
        }
    }
    return holds(data);
}

/* --- the end --------------------------------------------------------------------------------- */

static bool all_acknowledged(const void *data)
{
    const tddp_ucx *self = data;
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->said_goodbye && !peer->acknowledged && !atomic_load(&peer->ended)) {
            return false;
        }
    }
    return true;
}

static void end_connections(tddp_ucx *self)
{
    atomic_store(&self->closed, true);
    for (int rank = 0; self->worker && rank < self->size; rank++) {
        disconnect(&self->peers[rank]);
    }
    tddp_eventcount_notify(self->events);
}

void tddp_ucx_close(void *context, int64_t ms)
{
    tddp_ucx *self = context;
    pthread_mutex_lock(&self->mutex);
    for (int rank = 0; rank < self->size && ms > 0 && !atomic_load(&self->closed); rank++) {
        tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->endpoint && !peer->said_goodbye && !atomic_load(&peer->ended)) {
            peer->said_goodbye = true;
            send_control(peer, 0);
        }
    }
    (void)progress_until(self, all_acknowledged, self, ms);
    end_connections(self);
    pthread_mutex_unlock(&self->mutex);
}

/* With what it still has of transfers. */
static void end_worker(tddp_ucx *self)
{
    tddp_ucx_engine_forget(self);
    if (self->worker) {
        if (self->address) {
            ucp_worker_release_address(self->worker, self->address);
        }
        ucp_worker_destroy(self->worker);
        self->worker = NULL;
    }
}

/* UCX gives canceled requests back, or has a fault: the connections, which alone write to the
 * memory, end in any case. */
void tddp_ucx_end_transfer(tddp_ucx_transfer *transfer)
{
    tddp_ucx *self = transfer->self;
    if (!is_returned(transfer)) {
        end_connections(self);
        if (!progress_until(self, is_returned, transfer, CANCEL_MS)) {
            tddp_log(TDDP_LOG_WARN, "ucx", "UCX has not returned a transfer that was canceled");
            end_worker(self);
        }
    }
}

void tddp_ucx_destroy(void *context)
{
    tddp_ucx *self = context;
    pthread_mutex_lock(&self->mutex);
    end_connections(self);
    if (self->worker && !is_returned(&self->control)) {
        ucp_request_cancel(self->worker, self->control.request);
    }
    end_worker(self);
    pthread_mutex_unlock(&self->mutex);
    tddp_ucx_engine_remove(self);
    (void)pthread_mutex_destroy(&self->mutex);
    free(self->addresses);
    free(self->peers);
    free(self);
}

/* --- the beginning --------------------------------------------------------------------------- */

/* UCX's own thread, which the first worker starts, inherits this one's signals. */
static tddp_status open_worker(tddp_ucx *self)
{
    const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucp_context_h context;
    sigset_t all;
    sigset_t mask;
    sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &mask);
    const tddp_status status = tddp_ucx_context(self->peer_timeout, &context);
    ucs_status_t made = status ? UCS_OK : ucp_worker_create(context, &params, &self->worker);
    (void)pthread_sigmask(SIG_SETMASK, &mask, NULL);
    if (status == TDDP_OK && made == UCS_OK) {
        made = ucp_worker_get_efd(self->worker, &self->descriptor);
    }
    return status || made == UCS_OK ? status : tddp_ucx_fail(made, "a worker of UCX");
}

tddp_status tddp_ucx_open(const tddp_backend_opts *opts, void **context, tddp_slice *address)
{
    tddp_ucx *self = calloc(1, sizeof *self);
    tddp_ucx_peer *peers = calloc((size_t)opts->world_size, sizeof *peers);
    if (!self || !peers) {
        free(self);
        free(peers);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    *context = self;
    self->rank = opts->rank;
    self->size = opts->world_size;
    self->events = opts->events;
    self->peers = peers;
    self->epoll = -1;
    self->control = (tddp_ucx_transfer){.self = self,
                                        .peer = TDDP_ANY_SOURCE,
                                        .tag = GOODBYE_TAG,
                                        .mask = GOODBYE_TAG,
                                        .phase = TDDP_UCX_DONE};
    (void)pthread_mutex_init(&self->mutex, NULL);
    for (int rank = 0; rank < self->size; rank++) {
        peers[rank].self = self;
    }
    tddp_status status = tddp_transport_peer_timeout(&self->peer_timeout);
    status = status ? status : tddp_transport_check_descriptors(self->size, OTHER_FILES);
    tddp_ucx_note_sockets(self);
    status = status ? status : open_worker(self);
    if (status == TDDP_OK) {
        const ucs_status_t got =
            ucp_worker_get_address(self->worker, &self->address, &address->size);
        address->data = (const char *)self->address;
        status = got == UCS_OK ? TDDP_OK : tddp_ucx_fail(got, "a worker's address");
    }
    return status ? status : tddp_ucx_engine_add(self);
}

static size_t aligned(size_t bytes)
{
    return (bytes + 7) & ~(size_t)7;
}

/* With a copy of the addresses, as those of lower ranks are needed later. */
tddp_status tddp_ucx_connect(void *context, const tddp_slice *addresses, const tddp_wait *wait,
                             int *peer)
{
    tddp_ucx *self = context;
    size_t total = 0;
    (void)wait; /* what is sent meanwhile is queued */
    (void)peer;
    for (int rank = 0; rank < self->size; rank++) {
        total += aligned(addresses[rank].size);
    }
    char *next = self->addresses = calloc(1, total);
    if (!next) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    pthread_mutex_lock(&self->mutex);
    for (int rank = 0; rank < self->size; rank++) {
        memcpy(next, addresses[rank].data, addresses[rank].size);
        self->peers[rank].address = (const ucp_address_t *)(const void *)next;
        next += aligned(addresses[rank].size);
    }
    self->began = tddp_now_ns();
    for (int rank = self->rank + 1; rank < self->size; rank++) {
        tddp_ucx_connect_to(&self->peers[rank]);
    }
    settle(self);
    pthread_mutex_unlock(&self->mutex);
    tddp_ucx_arm(self);
    return TDDP_OK;
}
