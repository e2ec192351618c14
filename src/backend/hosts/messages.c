/*
 * Sends and receives. Posted and finished on any thread. Those between ranks of this host go
 * through shared memory, all others through the global communicator. Until that is there, they are
 * kept: posting never waits. A receive from any source, and any later one with its tag, is posted
 * to shared memory, where a listener brings what comes from other hosts (listener.c). Where the
 * communicator's backend has no probe() for that, it has all messages.
 *
 * Invariant: messages are posted in the order in which they came, to the communicator with the lock
 * held; those that were kept by the thread that connects, before any operation finds it connected.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "backend/hosts/hosts.h"

/* While a receive waits for a message of another host: how long its source must have left, for its
 * last message may still be under way here. */
enum { LEFT_MS = 1000 };

/* How long a thread that has nothing else to do looks before it sleeps. */
#define SPIN_NS 50000

struct tddp_hosts_message {
    const tddp_op *op;
    int64_t deadline;
    bool is_local;                 /* `request` is shared memory's, with `local` */
    tddp_op local;                 /* as shared memory sees it */
    tddp_hosts_listener *listener; /* a message of another host may come too; NULL: none */
    int64_t left_since;            /* when its source had left; 0: it has not */
    bool matched;                  /* a message has come for that receive: */
    int from;                      /* its source in this host, or */
    void *arrival;                 /* another host's message */
    bool posted;                   /* to the communicator, with this outcome */
    tddp_status status;
    char *text;    /* of a failure; NULL: no memory for it */
    void *request; /* the communicator's */
    tddp_hosts_message *next;
};

/* Whether messages of this host go through shared memory. */
static bool shares(const tddp_hosts *self)
{
    return self->local_size > 1 && self->between->probe;
}

static bool is_here(const tddp_hosts *self, int peer)
{
    return shares(self) && peer >= 0 && self->host_of[peer] == self->host;
}

/* --- posting --------------------------------------------------------------------------------- */

/* With the lock held. */
static void post_now(tddp_hosts *self, tddp_hosts_message *message)
{
    const tddp_inner *all = &self->global_comm.inner;
    message->status = all->backend->post(all->context, message->op, &message->request);
    message->text = message->status ? tddp_copy_string(tddp_error_message()) : NULL;
    message->posted = true;
}

static void keep(tddp_hosts *self, tddp_hosts_message *message)
{
    tddp_hosts_message **link = &self->kept;
    while (*link) {
        link = &(*link)->next;
    }
    *link = message;
}

void tddp_hosts_post_kept(tddp_hosts *self)
{
    while (self->kept) {
        tddp_hosts_message *message = self->kept;
        self->kept = message->next;
        post_now(self, message);
    }
}

static void post_to_all(tddp_hosts *self, tddp_hosts_message *message)
{
    pthread_mutex_lock(&self->lock);
    const bool connected = self->global_comm.inner.backend != NULL;
    if (connected) {
        post_now(self, message);
    } else {
        keep(self, message);
    }
    pthread_mutex_unlock(&self->lock);
    if (!connected) {
        tddp_on_demand_request(self->on_demand);
    }
}

/* The listener that a receive needs, if any. */
static tddp_status find_listener(tddp_hosts *self, const tddp_op *op, tddp_hosts_listener **out)
{
    *out = NULL;
    if (op->kind == TDDP_OP_SEND || !shares(self)) {
        return TDDP_OK;
    }
    pthread_mutex_lock(&self->lock);
    tddp_status status = TDDP_OK;
    if (op->peer == TDDP_ANY_SOURCE) {
        status = tddp_hosts_listen(self, op->tag, out);
    } else if (!is_here(self, op->peer)) {
        *out = tddp_hosts_listener_for(self, op->tag);
    }
    pthread_mutex_unlock(&self->lock);
    return status;
}

static tddp_status post_local(tddp_hosts *self, tddp_hosts_message *message)
{
    const int peer = message->op->peer;
    message->is_local = true;
    message->local = *message->op;
    if (is_here(self, peer)) {
        message->local.peer = self->local_of[peer];
    } else if (peer != TDDP_ANY_SOURCE) {
        message->local.peer = self->local_size + peer;
        message->local.timeout_ms = INT64_MAX; /* this file has the text */
    }
    return tddp_shm_p2p_post(self->shm, &message->local, &message->request);
}

tddp_status tddp_hosts_post(void *context, const tddp_op *op, void **request)
{
    tddp_hosts *self = context;
    tddp_hosts_message *message = tddp_alloc(sizeof *message);
    tddp_status status = message ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK) {
        message->op = op;
        message->deadline = tddp_deadline_after_ms(op->timeout_ms);
        status = find_listener(self, op, &message->listener);
    }
    if (status == TDDP_OK && (is_here(self, op->peer) || message->listener)) {
        status = post_local(self, message);
    } else if (status == TDDP_OK) {
        post_to_all(self, message);
    }
    if (status) {
        free(message);
        return tddp_hosts_report_if_fatal(self, status);
    }
    *request = message;
    return TDDP_OK;
}

/* --- finishing ------------------------------------------------------------------------------- */

/* The ranks are not connected: it is kept no longer. */
static void drop(tddp_hosts *self, const tddp_hosts_message *message)
{
    pthread_mutex_lock(&self->lock);
    for (tddp_hosts_message **link = &self->kept; *link; link = &(*link)->next) {
        if (*link == message) {
            *link = message->next;
            break;
        }
    }
    pthread_mutex_unlock(&self->lock);
}

static tddp_status finish_in_all(tddp_hosts *self, tddp_hosts_message *message, int *source)
{
    tddp_status status = tddp_hosts_await_global(self, message->deadline, message->op->cancel);
    if (status == TDDP_CANCELED) {
        return status;
    }
    if (status) {
        drop(self, message);
        if (!message->posted) {
            return status;
        }
        /* Connected at the last moment: what was posted has to be finished. */
    }
    if (message->status) {
        return tddp_fail(message->status, "%s",
                         message->text ? message->text : tddp_status_text(message->status));
    }
    const tddp_inner *all = &self->global_comm.inner;
    return all->backend->finish(all->context, message->request, source);
}

/* Whether waiting for a message of another host may succeed. */
static tddp_status check_elsewhere(tddp_hosts *self, tddp_hosts_message *message)
{
    const tddp_op *op = message->op;
    tddp_status status = tddp_hosts_listener_poll(self, message->listener);
    if (status || op->peer == TDDP_ANY_SOURCE) {
        return status;
    }
    const int64_t now = tddp_now_ns();
    if (now >= message->deadline) {
        const int name = self->names ? self->names[op->peer] : op->peer;
        return tddp_fail(TDDP_TIMEOUT,
                         "not done after %" PRId64 " ms; rank %d has not sent it with tag %" PRIu32,
                         op->timeout_ms, name, op->tag);
    }
    pthread_mutex_lock(&self->lock);
    const tddp_inner all = self->global_comm.inner; /* it may be about to be there */
    pthread_mutex_unlock(&self->lock);
    if (all.backend && all.backend->check_peer) {
        status = all.backend->check_peer(all.context, op->peer);
    }
    if (status == TDDP_OK || message->left_since == 0) {
        message->left_since = status ? now : 0;
        return TDDP_OK;
    }
    return now - message->left_since < LEFT_MS * TDDP_NS_PER_MS ? TDDP_OK : status;
}

/* Waits for a message of this host or of another. One of this host's shared memory that has come is
 * received even if no other host is left to send one. */
static tddp_status await_any(tddp_hosts *self, tddp_hosts_message *message, int *from)
{
    tddp_eventcount *events = tddp_shm_events(self->shm, self->local_rank);
    const bool spins = message->op->awaited && tddp_shm_ranks_per_core(self->shm) <= 1;
    const tddp_cancel *cancel = message->op->cancel;
    tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(events);
        tddp_status failure = check_elsewhere(self, message);
        message->local.cancel = &at_once;
        tddp_status status =
            tddp_shm_p2p_await_message(self->shm, message->request, &message->arrival, from);
        message->local.cancel = NULL;
        if (status != TDDP_CANCELED) {
            return status;
        }
        failure = failure ? check_elsewhere(self, message) : TDDP_OK; /* once more, for its text */
        if (failure) {
            tddp_shm_p2p_drop(self->shm, message->request);
            return failure;
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            return TDDP_CANCELED;
        }
        tddp_eventcount_wait(events, seen, spins ? SPIN_NS : 0, TDDP_SHM_CHECK_INTERVAL_NS);
    }
}

static tddp_status finish_from_any(tddp_hosts *self, tddp_hosts_message *message, int *source)
{
    tddp_status status = TDDP_OK;
    if (!message->matched) {
        status = await_any(self, message, &message->from);
        message->matched = status == TDDP_OK;
    }
    if (status) {
        return status;
    }
    if (message->arrival) {
        return tddp_hosts_receive_arrival(self, message->arrival, message->op, message->deadline,
                                          source);
    }
    message->local.cancel = message->op->cancel;
    status = tddp_shm_p2p_finish(self->shm, message->request, source);
    if (status == TDDP_OK) {
        *source = tddp_hosts_member(self, self->host, *source);
    }
    return status;
}

static tddp_status finish_here(tddp_hosts *self, tddp_hosts_message *message, int *source)
{
    message->local.cancel = message->op->cancel;
    message->local.awaited = message->op->awaited;
    tddp_status status = tddp_shm_p2p_finish(self->shm, message->request, source);
    if (status == TDDP_OK && message->op->kind == TDDP_OP_RECV) {
        *source = message->op->peer;
    }
    return status;
}

tddp_status tddp_hosts_finish(void *context, void *request, int *source)
{
    tddp_hosts *self = context;
    tddp_hosts_message *message = request;
    tddp_status status;
    if (message->listener) {
        status = finish_from_any(self, message, source);
    } else if (message->is_local) {
        status = finish_here(self, message, source);
    } else {
        status = finish_in_all(self, message, source);
    }
    if (status == TDDP_CANCELED) {
        return status;
    }
    free(message->text);
    free(message);
    return tddp_hosts_report_if_fatal(self, status);
}
