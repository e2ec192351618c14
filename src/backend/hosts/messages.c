/*
 * Sends and receives. Posted and finished on any thread, always in the global communicator, since a
 * wildcard receive can only use one. Until that is there, messages are kept: posting never waits.
 *
 * Invariant: messages are posted to the communicator in the order in which they came, with the lock
 * held; those that were kept by the thread that connects, before any operation finds it connected.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/hosts.h"

struct tddp_hosts_message {
    const tddp_op *op;
    int64_t deadline;
    bool posted; /* to the communicator, with this outcome */
    tddp_status status;
    char *text;    /* of a failure; NULL: no memory for it */
    void *request; /* the communicator's */
    tddp_hosts_message *next;
};

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

tddp_status tddp_hosts_post(void *context, const tddp_op *op, void **request)
{
    tddp_hosts *self = context;
    tddp_hosts_message *message = tddp_alloc(sizeof *message);
    if (!message) {
        return tddp_hosts_report_if_fatal(self, TDDP_OUT_OF_MEMORY);
    }
    message->op = op;
    message->deadline = tddp_deadline_after_ms(op->timeout_ms);
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
    *request = message;
    return TDDP_OK;
}

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

static tddp_status finish(tddp_hosts *self, tddp_hosts_message *message, int *source)
{
    tddp_status status = tddp_hosts_await_global(self, message->deadline);
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

tddp_status tddp_hosts_finish(void *context, void *request, int *source)
{
    tddp_hosts *self = context;
    tddp_hosts_message *message = request;
    tddp_status status = finish(self, message, source);
    free(message->text);
    free(message);
    return tddp_hosts_report_if_fatal(self, status);
}
