/*
 * What is known of the peers: who is connected, has left or is lost, and why. Callbacks of UCX note
 * what has to be done, and tddp_ucx_settle() does it once UCX has returned.
 *
 * Invariant: a peer leaves ACTIVE once, for one reason. All that a peer has sent before that has
 * arrived, since its notice, and the end of its connection, come after.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"

/* A peer may end as soon as it has done its part: what it sent to others may complete their
 * operations. */
#define GRACE_NS (300 * TDDP_NS_PER_MS)

static int name_of(const tddp_ucx *self, int rank)
{
    return self->names ? self->names[rank] : rank;
}

/* --- what happens to them -------------------------------------------------------------------- */

static void end(tddp_ucx_peer *peer, tddp_ucx_state state, const char *reason)
{
    tddp_ucx *self = peer->self;
    if (peer->state != TDDP_UCX_ACTIVE) {
        return;
    }
    peer->state = state;
    peer->since = tddp_now_ns();
    (void)snprintf(peer->reason, sizeof peer->reason, "%s", reason);
    atomic_fetch_add(&self->inactive, 1);
    tddp_eventcount_notify(self->events);
}

void tddp_ucx_lose(tddp_ucx_peer *peer, const char *reason)
{
    end(peer, TDDP_UCX_LOST, reason);
}

void tddp_ucx_on_error(void *data, ucp_ep_h endpoint, ucs_status_t status)
{
    tddp_ucx_peer *peer = data;
    (void)endpoint;
    peer->must_disconnect = true;
    peer->self->must_settle = true;
    end(peer, TDDP_UCX_LOST, ucs_status_string(status));
}

tddp_ucx_peer *tddp_ucx_sender(tddp_ucx *self, const void *header, size_t header_bytes,
                               tddp_ucx_header *out)
{
    if (header_bytes != sizeof *out) {
        return NULL;
    }
    memcpy(out, header, sizeof *out);
    const bool is_peer = out->rank < (uint32_t)self->size && out->rank != (uint32_t)self->rank;
    return is_peer ? &self->peers[out->rank] : NULL;
}

static void take_notice(tddp_ucx_peer *peer, const tddp_ucx_notice *notice)
{
    peer->must_note = true;
    if (peer->state == TDDP_UCX_ACTIVE) {
        peer->sequence = notice->sequence;
        peer->status = (tddp_status)notice->status;
        end(peer, peer->status == TDDP_OK ? TDDP_UCX_LEFT : TDDP_UCX_LOST, notice->reason);
    }
}

ucs_status_t tddp_ucx_on_control(void *context, const void *header, size_t header_bytes, void *data,
                                 size_t bytes, const ucp_am_recv_param_t *param)
{
    tddp_ucx *self = context;
    tddp_ucx_header it;
    tddp_ucx_notice notice;
    tddp_ucx_peer *peer = tddp_ucx_sender(self, header, header_bytes, &it);
    if (!peer || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        return UCS_OK;
    }
    self->must_settle = true;
    if (it.tag == TDDP_UCX_HELLO) {
        peer->heard = true;
    } else if (it.tag == TDDP_UCX_NOTED) {
        peer->noted = true;
    } else if (it.tag == TDDP_UCX_NOTICE && bytes == sizeof notice) {
        memcpy(&notice, data, sizeof notice);
        notice.reason[sizeof notice.reason - 1] = '\0';
        take_notice(peer, &notice);
    }
    return UCS_OK;
}

/* --- what is sent to them -------------------------------------------------------------------- */

void tddp_ucx_tell(tddp_ucx_peer *peer, unsigned control, const void *data, size_t bytes)
{
    static const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                              .flags = UCP_AM_SEND_FLAG_EAGER};
    tddp_ucx_header *header = &peer->self->controls[control]; /* UCX may read it later */
    *header = (tddp_ucx_header){.tag = control, .rank = (uint32_t)peer->self->rank};
    if (peer->endpoint && !peer->must_disconnect) {
        ucs_status_ptr_t request = ucp_am_send_nbx(peer->endpoint, TDDP_UCX_CONTROL, header,
                                                   sizeof *header, data, bytes, &param);
        if (UCS_PTR_IS_PTR(request)) {
            ucp_request_free(request); /* once it is complete */
        }
    }
}

void tddp_ucx_notify(tddp_ucx *self, tddp_status status, const char *text)
{
    if (self->notified || !self->worker) {
        return;
    }
    self->notified = true;
    self->notice.sequence = atomic_load(&self->sequence);
    self->notice.status = (uint32_t)status;
    (void)snprintf(self->notice.reason, sizeof self->notice.reason, "%s", text);
    for (int rank = 0; rank < self->size; rank++) {
        tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->endpoint && peer->state == TDDP_UCX_ACTIVE) {
            peer->notified = true;
            tddp_ucx_tell(peer, TDDP_UCX_NOTICE, &self->notice, sizeof self->notice);
        }
    }
}

void tddp_ucx_report_failure(void *context, tddp_status status, const char *text)
{
    tddp_ucx *self = context;
    pthread_mutex_lock(&self->mutex);
    if (!self->first_failure[0]) {
        (void)snprintf(self->first_failure, sizeof self->first_failure, "%s", text);
    }
    tddp_ucx_notify(self, status, text);
    if (self->worker) {
        tddp_ucx_progress(self);
    }
    pthread_mutex_unlock(&self->mutex);
}

void tddp_ucx_settle(tddp_ucx *self)
{
    self->must_settle = false;
    for (int rank = 0; rank < self->size; rank++) {
        tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->heard && !peer->endpoint && peer->state == TDDP_UCX_ACTIVE) {
            tddp_ucx_connect(peer);
        }
        if (peer->must_note) {
            peer->must_note = false;
            tddp_ucx_tell(peer, TDDP_UCX_NOTED, NULL, 0);
        }
        if (peer->must_disconnect && peer->endpoint) {
            tddp_ucx_disconnect(peer);
        }
    }
}

/* --- what is told of them -------------------------------------------------------------------- */

/* The order in which lost peers are considered the root cause: processes that ended without a
 * report, then peers that reported a failure, then peers that reported another lost rank. */
static int priority_of(const tddp_ucx_peer *peer)
{
    return peer->status == TDDP_OK ? 0 : peer->status == TDDP_PEER_LOST ? 2 : 1;
}

static const tddp_ucx_peer *root_cause(const tddp_ucx *self)
{
    const tddp_ucx_peer *cause = NULL;
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_ucx_peer *one = &self->peers[rank];
        if (one->state == TDDP_UCX_LOST &&
            (!cause || priority_of(one) < priority_of(cause) ||
             (priority_of(one) == priority_of(cause) && one->since < cause->since))) {
            cause = one;
        }
    }
    return cause;
}

void tddp_ucx_add(char *text, size_t bytes, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text + used, bytes - used, format, list);
    va_end(list);
}

/* "lost rank 2 (why); also lost: rank 1; rank 3 has left the group" */
static tddp_status fail_lost(const tddp_ucx *self, int peer, uint64_t sequence)
{
    char text[2 * TDDP_UCX_REASON_BYTES] = "";
    const tddp_ucx_peer *cause = root_cause(self);
    if (cause) {
        const bool reported = cause->status != TDDP_OK;
        tddp_ucx_add(text, sizeof text,
                     reported ? "lost rank %d, which gave up: %s" : "lost rank %d (%s)",
                     name_of(self, cause->rank), cause->reason);
    }
    const char *before = "; also lost: ";
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_ucx_peer *one = &self->peers[rank];
        if (one->state == TDDP_UCX_LOST && one != cause) {
            tddp_ucx_add(text, sizeof text, "%srank %d", before, name_of(self, rank));
            before = ", ";
        }
    }
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_ucx_peer *one = &self->peers[rank];
        if (one->state == TDDP_UCX_LEFT &&
            (peer == TDDP_ANY_SOURCE || peer == rank || one->sequence < sequence)) {
            tddp_ucx_add(text, sizeof text, "%srank %d has left the group", *text ? "; " : "",
                         name_of(self, rank));
        }
    }
    return tddp_fail(TDDP_PEER_LOST, "%s", text);
}

tddp_status tddp_ucx_check(tddp_ucx *self, int peer, uint64_t sequence)
{
    if (atomic_load(&self->aborted)) {
        return tddp_fail(TDDP_GROUP_FAILED,
                         self->first_failure[0] ? "aborted, as another operation failed: %s"
                                                : "aborted%s",
                         self->first_failure);
    }
    const int64_t now = tddp_now_ns();
    const int inactive = atomic_load(&self->inactive);
    for (int rank = 0; inactive > 0 && rank < self->size; rank++) {
        const tddp_ucx_peer *one = &self->peers[rank];
        const bool late = one->state == TDDP_UCX_LEFT && one->sequence < sequence;
        const bool dead = one->state == TDDP_UCX_LOST && now - one->since >= GRACE_NS;
        if (one->state != TDDP_UCX_ACTIVE && (rank == peer || late || dead)) {
            return fail_lost(self, peer, sequence);
        }
    }
    if (peer == TDDP_ANY_SOURCE && inactive == self->size - 1) {
        return fail_lost(self, peer, sequence);
    }
    return TDDP_OK;
}

tddp_status tddp_ucx_check_peer(void *context, int peer, uint64_t sequence)
{
    tddp_ucx *self = context;
    pthread_mutex_lock(&self->mutex);
    const tddp_status status = tddp_ucx_check(self, peer, sequence);
    pthread_mutex_unlock(&self->mutex);
    return status;
}
