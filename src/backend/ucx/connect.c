/*
 * A rank's worker, the addresses of its peers, and its connections to them. Runs on the thread that
 * creates the group, before any other knows the rank.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"

/* While this rank waits for others' records: between two checks whether those live. */
enum { CHECK_MS = 300, REASON_MS = 200, SLEEP_MS = 20, PROBE_MS = 1000 };

/* --- the worker ------------------------------------------------------------------------------ */

static tddp_status set_handler(tddp_ucx *self, unsigned id, ucp_am_recv_callback_t callback)
{
    const ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = callback,
        .arg = self};
    const ucs_status_t status = ucp_worker_set_am_recv_handler(self->worker, &param);
    return status == UCS_OK ? TDDP_OK : tddp_ucx_fail(status, "UCX's active messages");
}

static tddp_status make_worker(tddp_ucx *self, ucp_context_h context)
{
    const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t made = ucp_worker_create(context, &params, &self->worker);
    if (made != UCS_OK) {
        self->worker = NULL;
        return tddp_ucx_fail(made, "a worker of UCX");
    }
    made = ucp_worker_get_efd(self->worker, &self->descriptor);
    tddp_status status = made == UCS_OK ? TDDP_OK : tddp_ucx_fail(made, "a worker's descriptor");
    status = status ? status : set_handler(self, TDDP_UCX_DATA, tddp_ucx_on_data);
    return status ? status : set_handler(self, TDDP_UCX_CONTROL, tddp_ucx_on_control);
}

/* UCX's own thread, which the first worker starts, inherits this one's signals. */
static tddp_status open_worker(tddp_ucx *self)
{
    ucp_context_h context;
    sigset_t all;
    sigset_t mask;
    sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &mask);
    tddp_status status = tddp_ucx_context(&context);
    status = status ? status : make_worker(self, context);
    (void)pthread_sigmask(SIG_SETMASK, &mask, NULL);
    return status;
}

/* --- addresses ------------------------------------------------------------------------------- */

static tddp_status give(tddp_ucx *self, tddp_meeting *meeting, const tddp_wait *wait)
{
    ucp_address_t *address;
    size_t bytes;
    const ucs_status_t got = ucp_worker_get_address(self->worker, &address, &bytes);
    if (got != UCS_OK) {
        return tddp_ucx_fail(got, "a worker's address");
    }
    const tddp_status status =
        tddp_meeting_give(meeting, (tddp_slice){(const char *)address, bytes}, wait);
    ucp_worker_release_address(self->worker, address);
    return status;
}

static size_t aligned(size_t bytes)
{
    return (bytes + 7) & ~(size_t)7;
}

static tddp_status take(tddp_ucx *self, tddp_meeting *meeting)
{
    const tddp_slice *records = tddp_meeting_records(meeting);
    size_t total = 0;
    for (int rank = 0; rank < self->size; rank++) {
        if (records[rank].size == 0) {
            return tddp_fail(TDDP_PROTOCOL, "the record of rank %d is empty: expected an address",
                             rank);
        }
        total += aligned(records[rank].size);
    }
    self->addresses = calloc(1, total);
    if (!self->addresses) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    char *next = self->addresses;
    for (int rank = 0; rank < self->size; rank++) {
        memcpy(next, records[rank].data, records[rank].size);
        self->peers[rank].address = (const ucp_address_t *)(const void *)next;
        next += aligned(records[rank].size);
    }
    return TDDP_OK;
}

/* --- connections ----------------------------------------------------------------------------- */

void tddp_ucx_connect(tddp_ucx_peer *peer)
{
    tddp_ucx *self = peer->self;
    const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                    .address = peer->address,
                                    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                    .err_handler = {.cb = tddp_ucx_on_error, .arg = peer}};
    const ucs_status_t status = ucp_ep_create(self->worker, &params, &peer->endpoint);
    if (status != UCS_OK) {
        peer->endpoint = NULL;
        tddp_ucx_lose(peer, ucs_status_string(status));
    }
    tddp_ucx_tell(peer, TDDP_UCX_HELLO, NULL, 0);
}

void tddp_ucx_disconnect(tddp_ucx_peer *peer)
{
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request = ucp_ep_close_nbx(peer->endpoint, &param);
    peer->endpoint = NULL;
    if (UCS_PTR_IS_PTR(request)) {
        ucp_request_free(request); /* once it is complete */
    }
}

/* The peers that have not said hello: "rank 1, rank 2". Returns their number. */
static int missing_peers(const tddp_ucx *self, char text[TDDP_MEETING_TEXT_BYTES])
{
    int count = 0;
    text[0] = '\0';
    for (int rank = 0; rank < self->size; rank++) {
        if (rank != self->rank && !self->peers[rank].heard) {
            tddp_ucx_add(text, TDDP_MEETING_TEXT_BYTES, "%srank %d", count++ ? ", " : "",
                         self->names ? self->names[rank] : rank);
        }
    }
    return count;
}

/* Why no further hello is waited for. */
static tddp_status check_connecting(tddp_ucx *self, const tddp_backend_opts *opts,
                                    const tddp_cancel *cancel, int64_t began, int64_t deadline,
                                    tddp_meeting *meeting)
{
    const int64_t now = tddp_now_ns();
    char missing[TDDP_MEETING_TEXT_BYTES];
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->state == TDDP_UCX_LOST) {
            const char *why = tddp_meeting_await_failure(meeting, rank, REASON_MS);
            return tddp_fail(TDDP_PEER_LOST, "cannot connect to rank %d (%s): %s",
                             self->names ? self->names[rank] : rank, peer->reason,
                             why ? why : "has it ended, or does a firewall stand between?");
        }
    }
    for (int rank = 0; now - began >= PROBE_MS * TDDP_NS_PER_MS && rank < self->rank; rank++) {
        if (!self->peers[rank].endpoint && self->peers[rank].state == TDDP_UCX_ACTIVE) {
            tddp_ucx_connect(&self->peers[rank]); /* does it live? */
        }
    }
    if (cancel && tddp_cancel_triggered(cancel)) {
        return tddp_fail(TDDP_CANCELED, "interrupted while all ranks connect");
    }
    if (now >= deadline) {
        (void)missing_peers(self, missing);
        return tddp_fail(TDDP_TIMEOUT,
                         "these have not connected to this rank in the time given: %s", missing);
    }
    return opts->check ? opts->check(opts->check_data) : TDDP_OK;
}

/* Of two ranks the lower one connects, since UCX 1.13 ends the process where two connect to each
 * other at once and one of them ends at that moment (its pull request 8175). For the same reason
 * all connect now, not when they have something to send. */
static tddp_status connect_all(tddp_ucx *self, const tddp_backend_opts *opts,
                               const tddp_cancel *cancel, int64_t deadline, tddp_meeting *meeting)
{
    char missing[TDDP_MEETING_TEXT_BYTES];
    const int64_t began = tddp_now_ns();
    int64_t checked_at = began;
    tddp_status status = TDDP_OK;
    for (int rank = self->rank + 1; rank < self->size; rank++) {
        tddp_ucx_connect(&self->peers[rank]);
    }
    while (status == TDDP_OK && missing_peers(self, missing) > 0) {
        tddp_ucx_progress(self);
        if (ucp_worker_arm(self->worker) == UCS_OK) {
            struct pollfd one = {.fd = self->descriptor, .events = POLLIN};
            (void)poll(&one, 1, SLEEP_MS);
        }
        if (tddp_now_ns() - checked_at >= SLEEP_MS * TDDP_NS_PER_MS) {
            status = check_connecting(self, opts, cancel, began, deadline, meeting);
            checked_at = tddp_now_ns();
        }
    }
    return status;
}

/* Exchanges addresses, and connects to all. */
static tddp_status meet(tddp_ucx *self, const tddp_backend_opts *opts, const tddp_wait *wait)
{
    tddp_meeting *meeting;
    const tddp_meeting_opts meeting_opts = {.store = opts->store,
                                            .name = "ucx",
                                            .rank = opts->rank,
                                            .world_size = opts->world_size,
                                            .sender = TDDP_MEETING_ALL,
                                            .names = opts->names,
                                            .check = opts->check,
                                            .data = opts->check_data,
                                            .check_ms = CHECK_MS};
    const int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_status status = tddp_meeting_open(&meeting_opts, &meeting);
    if (status) {
        return status;
    }
    const tddp_wait first = {tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
    tddp_ucx_descriptors before = {0};
    status = tddp_ucx_list_descriptors(&before);
    status = status ? status : tddp_ucx_check_descriptors(&before, self->size);
    status = status ? status : open_worker(self);
    status = status ? status : give(self, meeting, &first);
    const tddp_wait rest = {tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
    status = status ? status : tddp_meeting_await(meeting, &rest);
    status = status ? status : take(self, meeting);
    status = status ? status : connect_all(self, opts, tddp_wait_cancel(wait), deadline, meeting);
    if (status == TDDP_OK) {
        tddp_ucx_set_up_sockets(&before, self->peer_timeout);
    }
    free(before.is_open);
    tddp_meeting_close(meeting);
    if (status) { /* the others wait for this rank */
        char text[TDDP_UCX_REASON_BYTES];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_meeting_fail(&meeting_opts, text);
        tddp_ucx_notify(self, status, text);
        return tddp_fail(status, "%s", text);
    }
    return TDDP_OK;
}

/* --- the rank -------------------------------------------------------------------------------- */

static tddp_status make(const tddp_backend_opts *opts, tddp_ucx **out)
{
    const size_t size = (size_t)opts->world_size;
    tddp_ucx *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    *out = self;
    self->rank = opts->rank;
    self->size = opts->world_size;
    self->owner = getpid();
    self->epoll = -1;
    (void)pthread_mutex_init(&self->closing, NULL);
    (void)pthread_mutex_init(&self->mutex, NULL);
    self->peers = calloc(size, sizeof *self->peers);
    self->names = opts->names ? calloc(size, sizeof *self->names) : NULL;
    if (!self->peers || (opts->names && !self->names)) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    if (opts->names) {
        memcpy(self->names, opts->names, size * sizeof *self->names);
    }
    for (int rank = 0; rank < self->size; rank++) {
        self->peers[rank].self = self;
        self->peers[rank].rank = rank;
    }
    tddp_status status = tddp_ucx_peer_timeout(&self->peer_timeout);
    return status ? status : tddp_eventcount_create(&self->events);
}

tddp_status tddp_ucx_open(const tddp_backend_opts *opts, const tddp_wait *wait, tddp_ucx **out)
{
    tddp_ucx *self = NULL;
    tddp_status status = make(opts, &self);
    if (opts->world_size > 1) {
        status = status ? status : meet(self, opts, wait);
        status = status ? status : tddp_ucx_engine_add(self);
    }
    if (status) {
        tddp_ucx_free(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

void tddp_ucx_free(tddp_ucx *self)
{
    if (!self) {
        return;
    }
    tddp_ucx_close(self, "this rank has left the group");
    tddp_eventcount_free(self->events);
    (void)pthread_mutex_destroy(&self->closing);
    (void)pthread_mutex_destroy(&self->mutex);
    free(self->addresses);
    free(self->names);
    free(self->peers);
    free(self);
}
