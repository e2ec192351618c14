/*
 * Messages of other hosts for receives from any source, for which a rank of this host may send one
 * as well. Runs on threads that post and finish messages.
 *
 * A receive that was posted to the communicator cannot be withdrawn when a message of this host has
 * come first. So for each tag with which a rank ever receives from any source, a listener receives
 * whatever comes from other hosts, and hands it to the matching of shared memory, to which all
 * receives of that tag are posted from then on: the thread that waits for one of those looks at the
 * listener too. It has one receive posted at a time: messages of a rank stay in their order.
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
    uint32_t tag;
    tddp_cancel at_once;
    tddp_hosts_arrival *posted; /* what it receives; NULL: nothing yet */
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

/* Posts a receive whose memory is not known yet. With the lock held. */
static tddp_status post_arrival(tddp_hosts *self, tddp_hosts_listener *listener)
{
    const tddp_inner *all = &self->global_comm.inner;
    tddp_hosts_arrival *arrival = tddp_alloc(sizeof *arrival);
    if (!arrival) {
        return TDDP_OUT_OF_MEMORY;
    }
    arrival->op = (tddp_op){.kind = TDDP_OP_RECV,
                            .peer = TDDP_ANY_SOURCE,
                            .tag = listener->tag,
                            .timeout_ms = INT64_MAX,
                            .cancel = &listener->at_once};
    tddp_status status = all->backend->post(all->context, &arrival->op, &arrival->request);
    if (status) {
        free(arrival);
        return status;
    }
    arrival->next = self->arrivals;
    self->arrivals = arrival;
    listener->posted = arrival;
    return TDDP_OK;
}

tddp_status tddp_hosts_receive_arrival(tddp_hosts *self, tddp_hosts_arrival *arrival,
                                       const tddp_op *op, int64_t deadline, int *source)
{
    const tddp_inner *all = &self->global_comm.inner;
    const int64_t left = tddp_deadline_poll_ms(deadline);
    arrival->op.output = op->output;
    arrival->op.timeout_ms = left > 0 ? left : 1;
    arrival->op.cancel = op->cancel;
    arrival->op.awaited = op->awaited;
    pthread_mutex_lock(&self->lock);
    unlink_arrival(self, arrival);
    pthread_mutex_unlock(&self->lock);
    tddp_status status = all->backend->finish(all->context, arrival->request, source);
    if (status == TDDP_CANCELED) {
        pthread_mutex_lock(&self->lock);
        arrival->next = self->arrivals;
        self->arrivals = arrival;
        pthread_mutex_unlock(&self->lock);
        return status;
    }
    free(arrival);
    return status;
}

/* --- listeners ------------------------------------------------------------------------------- */

/* With the lock held. */
static tddp_status hand_over(tddp_hosts *self, tddp_hosts_listener *listener)
{
    const tddp_inner *all = &self->global_comm.inner;
    int source;
    tddp_status status = listener->posted ? TDDP_OK : post_arrival(self, listener);
    if (status == TDDP_OK) {
        status = all->backend->probe(all->context, listener->posted->request, &source);
    }
    if (status == TDDP_OK) {
        status = tddp_shm_p2p_deliver(self->shm, self->local_size + source, listener->tag,
                                      listener->posted);
        listener->posted = NULL;
    }
    return status;
}

tddp_status tddp_hosts_listener_poll(tddp_hosts *self, tddp_hosts_listener *listener)
{
    tddp_status status = tddp_hosts_await_global(self, INT64_MAX, &listener->at_once);
    if (status == TDDP_OK) {
        pthread_mutex_lock(&self->lock);
        while (status == TDDP_OK) {
            status = hand_over(self, listener);
        }
        pthread_mutex_unlock(&self->lock);
    }
    return status == TDDP_CANCELED ? TDDP_OK : status;
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
    tddp_hosts_listener *listener = tddp_alloc(sizeof *listener);
    if (!listener) {
        return TDDP_OUT_OF_MEMORY;
    }
    listener->tag = tag;
    listener->at_once = (tddp_cancel)TDDP_CANCEL_AT_ONCE;
    listener->next = self->listeners;
    self->listeners = listener;
    *out = listener;
    return TDDP_OK;
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
        free(self->listeners);
        self->listeners = next;
    }
}
