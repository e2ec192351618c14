/*
 * The end of a worker: the peers are told, and then all transfers are ended with it. Any thread,
 * once; calls beside the first wait for it.
 *
 * A connection that is closed while it has unread input is reset, and what the peer has not read
 * yet is lost. So a rank that leaves says so as its last message, and closes once each peer has
 * acknowledged that, which is after all before it, or has gone, or doesn't answer.
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"

enum { LEAVE_MS = 2000, FAIL_MS = 500, CANCEL_MS = 1000 };

static bool all_noted(const tddp_ucx *self)
{
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_ucx_peer *peer = &self->peers[rank];
        if (peer->notified && !peer->noted && peer->endpoint && peer->state == TDDP_UCX_ACTIVE) {
            return false;
        }
    }
    return true;
}

static bool none_moves(const tddp_ucx *self)
{
    return !self->moving;
}

/* Moves messages until it is so, for at most so many milliseconds. The engine doesn't, any more. */
static bool progress_until(tddp_ucx *self, bool (*holds)(const tddp_ucx *), int ms)
{
    enum { SLEEP_MS = 10 };
    const int64_t deadline = tddp_deadline_after_ms(ms);
    while (!holds(self)) {
        if (tddp_now_ns() >= deadline) {
            return false;
        }
        tddp_ucx_progress(self);
        if (!holds(self) && ucp_worker_arm(self->worker) == UCS_OK) {
            struct pollfd one = {.fd = self->descriptor, .events = POLLIN};
            pthread_mutex_unlock(&self->mutex);
            (void)poll(&one, 1, SLEEP_MS);
            pthread_mutex_lock(&self->mutex);
        }
    }
    return true;
}

/* UCX gives canceled requests back, or has a fault: the memory is safe in any case, as the worker's
 * connections, which alone write to it, end next. */
static void end_transfers(tddp_ucx *self)
{
    for (int rank = 0; rank < self->size; rank++) {
        if (self->peers[rank].endpoint) {
            tddp_ucx_disconnect(&self->peers[rank]);
        }
    }
    if (!progress_until(self, none_moves, CANCEL_MS)) {
        tddp_log(TDDP_LOG_WARN, "ucx", "UCX has not returned all transfers that were canceled");
    }
    tddp_ucx_drop_messages(self);
}

static void end_worker(tddp_ucx *self, const char *text)
{
    const bool failed = self->notified || atomic_load(&self->aborted);
    if (!atomic_load(&self->aborted)) {
        tddp_ucx_notify(self, TDDP_OK, text);
    }
    if (self->notified) {
        (void)progress_until(self, all_noted, failed ? FAIL_MS : LEAVE_MS);
    }
    if (!self->first_failure[0]) {
        (void)snprintf(self->first_failure, sizeof self->first_failure, "%s", text);
    }
    atomic_store(&self->aborted, true);
    end_transfers(self);
    ucp_worker_destroy(self->worker);
    self->worker = NULL;
    while (self->moving) {
        tddp_ucx_complete(self->moving, UCS_ERR_CANCELED);
    }
    tddp_eventcount_notify(self->events);
}

void tddp_ucx_close(tddp_ucx *self, const char *text)
{
    pthread_mutex_lock(&self->closing);
    tddp_ucx_engine_remove(self);
    pthread_mutex_lock(&self->mutex);
    if (self->worker) {
        end_worker(self, text);
    }
    pthread_mutex_unlock(&self->mutex);
    pthread_mutex_unlock(&self->closing);
}

/* The peers see that the connections have ended. */
void tddp_ucx_abort(tddp_ucx *self)
{
    atomic_store(&self->aborted, true);
    tddp_eventcount_notify(self->events);
    tddp_ucx_close(self, "");
}
