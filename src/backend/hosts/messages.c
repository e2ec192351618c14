/*
 * Sends and receives. Posted by any thread, one at a time; finished by any, several at a time, none
 * of which waits for another. Those between ranks of this host go through shared memory, all others
 * through the global communicator. Until that is there, they are queued: posting never waits.
 *
 * A receive from any source gets a message of either, but one that was posted to the communicator
 * cannot be withdrawn when a message of this host has come first. So for each tag with which this
 * rank ever receives from any source, a receive of this file is posted there, one at a time, so
 * that messages of a rank stay in their order. Receives with that tag are posted to shared memory
 * from then on; the thread that waits for one polls the receive of this file, and delivers there
 * what has arrived from other hosts.
 *
 * Invariants: messages are posted to the communicator in the order in which they came, with the
 * lock held; those that were queued by the thread that connects, before any operation finds it
 * connected. An arrival is in the list from when it is posted until a receive has taken it.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "backend/hosts/hosts.h"

/* Between two checks of a rank of another host. */
#define CHECK_INTERVAL_NS (20 * TDDP_NS_PER_MS)

/* A receive that is posted to the communicator for a message whose memory is not known yet. */
typedef struct tddp_hosts_arrival {
    tddp_op op;
    void *request;
    tddp_hosts_arrival *next;
} arrival;

/* A tag with which this rank has received from any source. Guarded by the lock. */
typedef struct tddp_hosts_tag {
    uint32_t tag;
    arrival *expected;  /* not arrived yet; NULL: not posted */
    tddp_status status; /* why no more will arrive */
    char *text;         /* NULL: no memory for it */
    tddp_hosts_tag *next;
} any_tag;

typedef struct tddp_hosts_message {
    const tddp_op *op;
    int64_t deadline;
    void *request;    /* of shared memory or, once it is posted there, of the communicator */
    tddp_op local;    /* as shared memory sees it, or the communicator */
    any_tag *any;     /* it may come from this host or another; NULL: where it goes is known */
    bool matched;     /* with `any`: it has arrived */
    arrival *arrival; /* from another host; NULL: from this one */
    int64_t checked_at;
    bool posted; /* to the communicator, with this outcome */
    tddp_status status;
    char *text; /* of a failure; NULL: no memory for it */
    tddp_hosts_message *next;
} message;

/* Whether messages of this host go through shared memory. */
static bool is_here(const tddp_hosts *self, int peer)
{
    return self->local_size > 1 && peer >= 0 && self->host_of[peer] == self->host;
}

static tddp_status fail_with(tddp_status status, const char *text)
{
    return status ? tddp_fail(status, "%s", text ? text : tddp_status_text(status)) : TDDP_OK;
}

/* --- posting --------------------------------------------------------------------------------- */

/* With the lock held. */
static void post_now(tddp_hosts *self, message *it)
{
    const tddp_inner *all = &self->comms[TDDP_HOSTS_GLOBAL].inner;
    const int left = tddp_deadline_poll_ms(it->deadline);
    it->local.timeout_ms = left > 0 ? left : 1;
    it->local.part_of = it->op; /* texts have its timeout */
    it->status = all->backend->post(all->context, &it->local, &it->request);
    it->text = it->status ? tddp_copy_string(tddp_error_message()) : NULL;
    it->posted = true;
}

void tddp_hosts_post_queued(tddp_hosts *self)
{
    while (self->queued) {
        message *it = self->queued;
        self->queued = it->next;
        post_now(self, it);
    }
}

static void post_to_all(tddp_hosts *self, message *it)
{
    pthread_mutex_lock(&self->lock);
    if (self->comms[TDDP_HOSTS_GLOBAL].inner.backend) {
        post_now(self, it);
    } else {
        message **end = &self->queued;
        while (*end) {
            end = &(*end)->next;
        }
        *end = it;
    }
    pthread_mutex_unlock(&self->lock);
}

/* The tag, if receives with it are posted to shared memory; with `adds` they are from now on.
 * NULL: they are not, or there is no memory for it. */
static any_tag *find_tag(tddp_hosts *self, uint32_t tag, bool adds)
{
    pthread_mutex_lock(&self->lock);
    any_tag *it = self->tags;
    while (it && it->tag != tag) {
        it = it->next;
    }
    if (!it && adds && (it = tddp_alloc(sizeof *it))) {
        it->tag = tag;
        it->next = self->tags;
        self->tags = it;
    }
    pthread_mutex_unlock(&self->lock);
    return it;
}

static tddp_status post(tddp_hosts *self, message *it)
{
    const int peer = it->op->peer;
    it->local = *it->op;
    if (is_here(self, peer)) {
        it->local.peer = self->local_of[peer];
        return tddp_shm_p2p_post(self->shm, &it->local, &it->request);
    }
    if (it->op->kind == TDDP_OP_RECV && self->local_size > 1) {
        it->any = find_tag(self, it->op->tag, peer == TDDP_ANY_SOURCE);
        if (!it->any && peer == TDDP_ANY_SOURCE) {
            return TDDP_OUT_OF_MEMORY;
        }
    }
    (void)!tddp_hosts_check_global(self, INT64_MAX); /* requests it */
    if (!it->any) {
        post_to_all(self, it);
        return TDDP_OK;
    }
    if (peer != TDDP_ANY_SOURCE) {
        it->local.peer = self->local_size + peer;
        it->local.timeout_ms = INT64_MAX; /* this file has the text */
    }
    return tddp_shm_p2p_post(self->shm, &it->local, &it->request);
}

tddp_status tddp_hosts_post(void *context, const tddp_op *op, void **request)
{
    tddp_hosts *self = context;
    message *it = tddp_alloc(sizeof *it);
    tddp_status status = TDDP_OUT_OF_MEMORY;
    if (it) {
        it->op = op;
        it->deadline = tddp_deadline_after_ms(op->timeout_ms);
        status = post(self, it);
    }
    if (status) {
        free(it);
    }
    *request = status ? NULL : it;
    return tddp_hosts_report_if_fatal(self, status);
}

/* --- messages of other hosts for receives from any source ------------------------------------ */

/* With the lock held. */
static tddp_status post_arrival(tddp_hosts *self, any_tag *any)
{
    const tddp_inner *all = &self->comms[TDDP_HOSTS_GLOBAL].inner;
    arrival *it = tddp_alloc(sizeof *it);
    if (!it) {
        return TDDP_OUT_OF_MEMORY;
    }
    it->op = (tddp_op){
        .kind = TDDP_OP_RECV, .peer = TDDP_ANY_SOURCE, .tag = any->tag, .timeout_ms = INT64_MAX};
    tddp_status status = all->backend->post(all->context, &it->op, &it->request);
    if (status) {
        free(it);
        return status;
    }
    it->next = self->arrivals;
    self->arrivals = it;
    any->expected = it;
    return TDDP_OK;
}

/* Delivers the next one to shared memory. TDDP_CANCELED: none has arrived. With the lock held. */
static tddp_status deliver(tddp_hosts *self, any_tag *any)
{
    const tddp_inner *all = &self->comms[TDDP_HOSTS_GLOBAL].inner;
    tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    int source;
    tddp_status status = any->expected ? TDDP_OK : post_arrival(self, any);
    if (status) {
        return status;
    }
    any->expected->op.cancel = &at_once;
    status = all->backend->probe(all->context, any->expected->request, &source);
    any->expected->op.cancel = NULL;
    if (status == TDDP_OK) {
        status =
            tddp_shm_p2p_deliver(self->shm, self->local_size + source, any->tag, any->expected);
        any->expected = NULL;
    }
    return status;
}

/* Delivers all that have arrived. An error: no more will. */
static tddp_status deliver_all(tddp_hosts *self, any_tag *any)
{
    const tddp_status connected = tddp_hosts_check_global(self, INT64_MAX);
    pthread_mutex_lock(&self->lock);
    tddp_status status = any->status ? any->status : connected;
    while (status == TDDP_OK) {
        status = deliver(self, any);
    }
    if (status != TDDP_CANCELED && !any->status) {
        any->text = tddp_copy_string(tddp_error_message());
        any->status = status;
    }
    status = status == TDDP_CANCELED ? TDDP_OK : fail_with(any->status, any->text);
    pthread_mutex_unlock(&self->lock);
    return status;
}

/* The receive of this message gets this arrival. */
static void take(tddp_hosts *self, message *it, arrival *taken)
{
    const int64_t left = tddp_deadline_poll_ms(it->deadline);
    pthread_mutex_lock(&self->lock);
    arrival **link = &self->arrivals;
    while (*link != taken) {
        link = &(*link)->next;
    }
    *link = taken->next;
    pthread_mutex_unlock(&self->lock);
    taken->op.output = it->op->output;
    taken->op.timeout_ms = left > 0 ? left : 1;
    taken->op.part_of = it->op; /* texts have its timeout */
    it->arrival = taken;
}

void tddp_hosts_free_arrivals(tddp_hosts *self)
{
    while (self->arrivals) {
        arrival *next = self->arrivals->next;
        self->between->discard(self->arrivals->request);
        free(self->arrivals);
        self->arrivals = next;
    }
    while (self->tags) {
        any_tag *next = self->tags->next;
        free(self->tags->text);
        free(self->tags);
        self->tags = next;
    }
}

/* --- finishing ------------------------------------------------------------------------------- */

/* Whether waiting for the source, if it is a rank of another host, may succeed. */
static tddp_status check_source(tddp_hosts *self, message *it)
{
    const tddp_op *op = it->op;
    const int64_t now = tddp_now_ns();
    if (op->peer == TDDP_ANY_SOURCE) {
        return TDDP_OK;
    }
    if (now >= it->deadline) {
        const int name = self->names ? self->names[op->peer] : op->peer;
        return tddp_fail(TDDP_TIMEOUT,
                         "not done after %" PRId64 " ms; rank %d has not sent it with tag %" PRIu32,
                         op->timeout_ms, name, op->tag);
    }
    if (now - it->checked_at < CHECK_INTERVAL_NS) {
        return TDDP_OK;
    }
    pthread_mutex_lock(&self->lock);
    const tddp_inner all = self->comms[TDDP_HOSTS_GLOBAL].inner; /* it may be about to be there */
    pthread_mutex_unlock(&self->lock);
    tddp_status status = all.backend && all.backend->check_peer
                             ? all.backend->check_peer(all.context, op->peer)
                             : TDDP_OK;
    it->checked_at = status ? it->checked_at : now;
    return status;
}

/* Whether the message of a receive has arrived that this host or another may send. TDDP_CANCELED:
 * not yet. After an error the request has ended. */
static tddp_status poll_any(tddp_hosts *self, void *data)
{
    message *it = data;
    tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    void *arrived;
    int from;
    /* What a rank sent before it went is found after this. */
    const bool gone = check_source(self, it) != TDDP_OK;
    const bool ended = deliver_all(self, it->any) != TDDP_OK;
    it->local.cancel = &at_once;
    tddp_status status = tddp_shm_p2p_await_message(self->shm, it->request, &arrived, &from);
    if (status == TDDP_OK) {
        it->matched = true;
        if (arrived) {
            take(self, it, arrived);
        }
    } else if (status == TDDP_CANCELED) {
        const tddp_status failure = ended  ? deliver_all(self, it->any)
                                    : gone ? check_source(self, it)
                                           : TDDP_OK;
        if (failure) {
            tddp_shm_p2p_drop(self->shm, it->request);
            status = failure;
        }
    }
    return status;
}

static tddp_status finish_here(tddp_hosts *self, message *it, int *source)
{
    it->local.cancel = it->op->cancel;
    it->local.awaited = it->op->awaited;
    tddp_status status = tddp_shm_p2p_finish(self->shm, it->request, source);
    if (status == TDDP_OK && it->op->kind == TDDP_OP_RECV) {
        *source = tddp_hosts_member(self, self->host, *source);
    }
    return status;
}

static tddp_status finish_any(tddp_hosts *self, message *it, int *source)
{
    const tddp_inner *all = &self->comms[TDDP_HOSTS_GLOBAL].inner;
    tddp_status status = it->matched ? TDDP_OK : tddp_hosts_try(self, it->op, poll_any, it);
    if (status || !it->arrival) {
        return status ? status : finish_here(self, it, source);
    }
    it->arrival->op.cancel = it->op->cancel;
    it->arrival->op.awaited = it->op->awaited;
    status = all->backend->finish(all->context, it->arrival->request, source);
    if (status != TDDP_CANCELED) {
        free(it->arrival);
    }
    return status;
}

/* The ranks are not connected. False: it was posted at the last moment, and has to be finished. */
static bool withdraw(tddp_hosts *self, const message *it)
{
    pthread_mutex_lock(&self->lock);
    message **link = &self->queued;
    while (*link && *link != it) {
        link = &(*link)->next;
    }
    if (*link) {
        *link = it->next;
    }
    const bool posted = it->posted;
    pthread_mutex_unlock(&self->lock);
    return !posted;
}

static tddp_status finish_in_all(tddp_hosts *self, message *it, int *source)
{
    const tddp_inner *all = &self->comms[TDDP_HOSTS_GLOBAL].inner;
    tddp_status status = tddp_hosts_await_global(self, it->op, it->deadline);
    if (status && (status == TDDP_CANCELED || withdraw(self, it))) {
        return status;
    }
    it->local.cancel = it->op->cancel;
    it->local.awaited = it->op->awaited;
    return it->status ? fail_with(it->status, it->text)
                      : all->backend->finish(all->context, it->request, source);
}

tddp_status tddp_hosts_finish(void *context, void *request, int *source)
{
    tddp_hosts *self = context;
    message *it = request;
    tddp_status status = it->any                       ? finish_any(self, it, source)
                         : is_here(self, it->op->peer) ? finish_here(self, it, source)
                                                       : finish_in_all(self, it, source);
    if (status == TDDP_CANCELED) {
        return status;
    }
    free(it->text);
    free(it);
    return tddp_hosts_report_if_fatal(self, status);
}
