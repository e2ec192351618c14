/*
 * Messages of other hosts for receives from any source, for which a rank of this host may send one
 * as well. Listeners have a thread each; the rest runs on threads that post and finish messages.
 *
 * A receive that was posted to the communicator cannot be withdrawn when a message of this host has
 * come first. So for each tag with which a rank ever receives from any source, a listener receives
 * whatever comes from other hosts, and hands it to the matching of shared memory, to which all
 * receives of that tag are posted from then on. It has one receive posted at a time: messages of a
 * rank stay in their order.
 *
 * Invariant: an arrival is in the list from when it is posted until it is received.
 */
#include <stdlib.h>

#include "backend/hosts/hosts.h"

struct tddp_hosts_arrival {
    tddp_op op;
    void *request; /* the communicator's */
    tddp_hosts_arrival *next;
};

struct tddp_hosts_listener {
    tddp_hosts *self;
    uint32_t tag;
    pthread_t thread;
    tddp_status status; /* why it has ended; guarded by the lock, like its text */
    char *text;
    tddp_hosts_listener *next;
};

/* --- arrivals -------------------------------------------------------------------------------- */

/* With the lock held. */
static void unlink_arrival(tddp_hosts *self, const tddp_hosts_arrival *arrival)
{
    tddp_hosts_arrival **link = &self->arrivals;
    while (*link != arrival) {
        link = &(*link)->next;
    }
    *link = arrival->next;
}

/* Posts a receive whose memory is not known yet. */
static tddp_status post_arrival(tddp_hosts *self, uint32_t tag, tddp_hosts_arrival **out)
{
    const tddp_inner *all = &self->global_comm.inner;
    tddp_hosts_arrival *arrival = tddp_alloc(sizeof *arrival);
    if (!arrival) {
        return TDDP_OUT_OF_MEMORY;
    }
    arrival->op = (tddp_op){.kind = TDDP_OP_RECV,
                            .peer = TDDP_ANY_SOURCE,
                            .tag = tag,
                            .timeout_ms = INT64_MAX,
                            .cancel = self->stop_listening};
    pthread_mutex_lock(&self->lock);
    tddp_status status = all->backend->post(all->context, &arrival->op, &arrival->request);
    if (status == TDDP_OK) {
        arrival->next = self->arrivals;
        self->arrivals = arrival;
    }
    pthread_mutex_unlock(&self->lock);
    if (status) {
        free(arrival);
        return status;
    }
    *out = arrival;
    return TDDP_OK;
}

tddp_status tddp_hosts_receive_arrival(tddp_hosts *self, tddp_hosts_arrival *arrival,
                                       const tddp_op *op, int64_t deadline, int *source)
{
    const tddp_inner *all = &self->global_comm.inner;
    const int64_t left = tddp_deadline_poll_ms(deadline);
    pthread_mutex_lock(&self->lock);
    unlink_arrival(self, arrival);
    pthread_mutex_unlock(&self->lock);
    arrival->op.output = op->output;
    arrival->op.timeout_ms = left > 0 ? left : 1;
    arrival->op.cancel = NULL;
    tddp_status status = all->backend->finish(all->context, arrival->request, source);
    free(arrival);
    return status;
}

/* --- listeners ------------------------------------------------------------------------------- */

/* Waits for one message, and hands it over. */
static tddp_status listen_once(tddp_hosts_listener *listener)
{
    tddp_hosts *self = listener->self;
    const tddp_inner *all = &self->global_comm.inner;
    tddp_hosts_arrival *arrival;
    int source;
    tddp_status status = post_arrival(self, listener->tag, &arrival);
    if (status == TDDP_OK) {
        status = all->backend->probe(all->context, arrival->request, &source);
    }
    if (status == TDDP_OK) {
        status = tddp_shm_p2p_deliver(self->shm, self->local_size + source, listener->tag, arrival);
    }
    return status;
}

static void *listen_body(void *data)
{
    tddp_hosts_listener *listener = data;
    tddp_hosts *self = listener->self;
    tddp_status status = tddp_hosts_await_global(self, INT64_MAX);
    while (status == TDDP_OK) {
        status = listen_once(listener);
    }
    pthread_mutex_lock(&self->lock);
    listener->text = tddp_copy_string(tddp_error_message());
    listener->status = status;
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

tddp_hosts_listener *tddp_hosts_listener_for(const tddp_hosts *self, uint32_t tag)
{
    tddp_hosts_listener *each = self->listeners;
    while (each && each->tag != tag) {
        each = each->next;
    }
    return each;
}

tddp_status tddp_hosts_listen(tddp_hosts *self, uint32_t tag, tddp_hosts_listener **out)
{
    *out = tddp_hosts_listener_for(self, tag);
    if (*out) {
        return TDDP_OK;
    }
    tddp_status status = self->stop_listening ? TDDP_OK : tddp_cancel_create(&self->stop_listening);
    tddp_hosts_listener *listener = status ? NULL : tddp_alloc(sizeof *listener);
    if (!listener) {
        return status ? status : TDDP_OUT_OF_MEMORY;
    }
    listener->self = self;
    listener->tag = tag;
    status = tddp_thread_start(&listener->thread, "tddp-listener", listen_body, listener);
    if (status) {
        free(listener);
        return status;
    }
    listener->next = self->listeners;
    self->listeners = listener;
    *out = listener;
    return TDDP_OK;
}

tddp_status tddp_hosts_listener_check(tddp_hosts *self, const tddp_hosts_listener *listener)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&self->lock);
    if (listener->status) {
        status = tddp_fail(listener->status, "%s",
                           listener->text ? listener->text : tddp_status_text(listener->status));
    }
    pthread_mutex_unlock(&self->lock);
    return status;
}

void tddp_hosts_stop_listening(tddp_hosts *self)
{
    if (self->stop_listening) {
        tddp_cancel_trigger(self->stop_listening);
    }
    for (tddp_hosts_listener *each = self->listeners; each; each = each->next) {
        pthread_join(each->thread, NULL);
    }
}

void tddp_hosts_free_listeners(tddp_hosts *self)
{
    while (self->arrivals) {
        tddp_hosts_arrival *next = self->arrivals->next;
        self->between->drop(self->arrivals->request);
        free(self->arrivals);
        self->arrivals = next;
    }
    while (self->listeners) {
        tddp_hosts_listener *next = self->listeners->next;
        free(self->listeners->text);
        free(self->listeners);
        self->listeners = next;
    }
    tddp_cancel_free(self->stop_listening);
}
