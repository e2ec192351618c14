/*
 * Tag matching: which message is for which receive. Used by all threads that post and finish
 * requests.
 *
 * A message matches the first posted receive with its source and tag. Any thread of the receiving
 * rank matches the headers that have arrived. Messages without a posted receive go to the
 * unexpected queue. A send whose header doesn't fit into the receiver's ring is pending until any
 * thread of this rank makes progress.
 *
 * Invariant: with the mutex held, headers of a pair are put and taken in the order of their
 * numbers. A matched request is in no queue, and may have been freed.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/shm/p2p_request.h"

/* Requests in order. */
typedef struct queue {
    tddp_shm_request *first;
    tddp_shm_request **end;
} queue;

typedef struct matched_peer {
    uint32_t sent;     /* headers put into the ring to that rank */
    uint32_t received; /* headers taken from the ring from it */
    _Atomic int64_t checked_at;
    queue pending; /* sends whose headers found the ring full */
} matched_peer;

struct tddp_shm_matching {
    pthread_mutex_t mutex;
    tddp_shm_block_pool pool;
    uint32_t seen_events; /* this rank's when the rings were last checked */
    queue posted;         /* receives */
    queue unexpected; /* messages that arrived before their receive was posted: only peer, header */
    int size;
    matched_peer peers[];
};

typedef struct tddp_shm_matching matching;

tddp_status tddp_shm_matching_create(tddp_shm *shm, struct tddp_shm_matching **out)
{
    size_t size = (size_t)tddp_shm_size(shm);
    matching *self = tddp_alloc(sizeof *self + size * sizeof self->peers[0]);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&self->mutex, NULL);
    self->size = (int)size;
    self->posted.end = &self->posted.first;
    self->unexpected.end = &self->unexpected.first;
    for (size_t i = 0; i < size; i++) {
        self->peers[i].pending.end = &self->peers[i].pending.first;
    }
    *out = self;
    return TDDP_OK;
}

void tddp_shm_matching_destroy(struct tddp_shm_matching *self)
{
    if (!self) {
        return;
    }
    while (self->unexpected.first) {
        tddp_shm_request *next = self->unexpected.first->next;
        free(self->unexpected.first);
        self->unexpected.first = next;
    }
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

/* --- queues, with the mutex held ------------------------------------------------------------- */

static void append(queue *into, tddp_shm_request *request)
{
    request->next = NULL;
    *into->end = request;
    into->end = &request->next;
}

static void unlink_at(queue *from, tddp_shm_request **at)
{
    if (from->end == &(*at)->next) {
        from->end = at;
    }
    *at = (*at)->next;
}

static void remove_from(queue *from, const tddp_shm_request *request)
{
    for (tddp_shm_request **at = &from->first; *at; at = &(*at)->next) {
        if (*at == request) {
            unlink_at(from, at);
            return;
        }
    }
}

static bool matches(const tddp_shm_request *request, int from, const tddp_shm_header *header)
{
    return request->op->tag == header->tag &&
           (request->op->peer == TDDP_ANY_SOURCE || request->op->peer == from);
}

static void match(tddp_shm_request *request, int peer, const tddp_shm_header *header)
{
    request->peer = peer;
    memcpy(&request->header, header, sizeof *header);
    /* From here on another thread may free it. */
    atomic_store_explicit(&request->matched, true, memory_order_release);
}

/* Matches a header that has arrived with a posted receive, or queues it as unexpected. */
static tddp_status deliver(matching *self, int from, const tddp_shm_header *header, bool *matched)
{
    tddp_shm_request **at = &self->posted.first;
    while (*at && !matches(*at, from, header)) {
        at = &(*at)->next;
    }
    tddp_shm_request *request = *at;
    *matched |= request != NULL;
    if (request) {
        unlink_at(&self->posted, at);
    } else if ((request = tddp_alloc(sizeof *request))) {
        append(&self->unexpected, request);
    } else {
        return TDDP_OUT_OF_MEMORY;
    }
    match(request, from, header);
    return TDDP_OK;
}

/* Takes all headers that arrived since the last event. */
static tddp_status receive_headers(tddp_shm *shm, matching *self, bool *matched)
{
    const uint32_t events = tddp_eventcount_read(tddp_shm_events(shm, tddp_shm_rank(shm)));
    if (events == self->seen_events) {
        return TDDP_OK;
    }
    for (int from = 0; from < self->size; from++) {
        tddp_shm_header header;
        matched_peer *peer = &self->peers[from];
        while (from != tddp_shm_rank(shm) &&
               tddp_shm_ring_get(shm, from, peer->received, &header)) {
            peer->received++;
            tddp_status status = deliver(self, from, &header, matched);
            if (status) {
                return status;
            }
        }
    }
    self->seen_events = events;
    return TDDP_OK;
}

/* Puts pending headers into the ring to a rank until it is full. Returns whether it put any. */
static bool send_pending(tddp_shm *shm, matching *self, int to)
{
    matched_peer *peer = &self->peers[to];
    queue *pending = &peer->pending;
    bool sent_any = false;
    while (pending->first && tddp_shm_ring_put(shm, to, peer->sent, &pending->first->header)) {
        tddp_shm_request *request = pending->first;
        unlink_at(pending, &pending->first);
        peer->sent++;
        sent_any = true;
        atomic_store_explicit(&request->matched, true, memory_order_release);
    }
    return sent_any;
}

/* --- requests -------------------------------------------------------------------------------- */

tddp_status tddp_shm_matching_progress(tddp_shm *shm)
{
    matching *self = tddp_shm_matching_of(shm);
    bool local_event = false;
    pthread_mutex_lock(&self->mutex);
    tddp_status status = receive_headers(shm, self, &local_event);
    for (int to = 0; to < self->size; to++) {
        if (self->peers[to].pending.first && send_pending(shm, self, to)) {
            local_event = true;
            tddp_eventcount_notify(tddp_shm_events(shm, to));
        }
    }
    pthread_mutex_unlock(&self->mutex);
    if (local_event) {
        tddp_eventcount_notify(tddp_shm_events(shm, tddp_shm_rank(shm)));
    }
    return status;
}

void tddp_shm_matching_add_send(tddp_shm *shm, tddp_shm_request *self)
{
    matching *all = tddp_shm_matching_of(shm);
    int to = self->peer;
    pthread_mutex_lock(&all->mutex);
    append(&all->peers[to].pending, self);
    bool sent_any = send_pending(shm, all, to);
    pthread_mutex_unlock(&all->mutex);
    if (sent_any) {
        tddp_eventcount_notify(tddp_shm_events(shm, to));
    }
}

void tddp_shm_matching_add_receive(tddp_shm *shm, tddp_shm_request *self)
{
    matching *all = tddp_shm_matching_of(shm);
    pthread_mutex_lock(&all->mutex);
    tddp_shm_request **at = &all->unexpected.first;
    while (*at && !matches(self, (*at)->peer, &(*at)->header)) {
        at = &(*at)->next;
    }
    tddp_shm_request *found = *at;
    if (found) {
        unlink_at(&all->unexpected, at);
        match(self, found->peer, &found->header);
    } else {
        append(&all->posted, self);
    }
    pthread_mutex_unlock(&all->mutex);
    free(found);
}

tddp_status tddp_shm_matching_deliver(tddp_shm *shm, int from, const tddp_shm_header *header)
{
    matching *all = tddp_shm_matching_of(shm);
    bool matched = false;
    pthread_mutex_lock(&all->mutex);
    tddp_status status = deliver(all, from, header, &matched);
    pthread_mutex_unlock(&all->mutex);
    if (matched) {
        tddp_eventcount_notify(tddp_shm_events(shm, tddp_shm_rank(shm)));
    }
    return status;
}

void tddp_shm_matching_remove(tddp_shm *shm, const tddp_shm_request *self)
{
    matching *all = tddp_shm_matching_of(shm);
    pthread_mutex_lock(&all->mutex);
    remove_from(self->op->kind == TDDP_OP_SEND ? &all->peers[self->peer].pending : &all->posted,
                self);
    pthread_mutex_unlock(&all->mutex);
}

/* --- blocks ---------------------------------------------------------------------------------- */

uint32_t tddp_shm_matching_alloc(tddp_shm *shm, tddp_shm_block_kind kind)
{
    matching *all = tddp_shm_matching_of(shm);
    pthread_mutex_lock(&all->mutex);
    uint32_t block = tddp_shm_block_alloc(shm, &all->pool, kind);
    pthread_mutex_unlock(&all->mutex);
    return block;
}

bool tddp_shm_matching_check_due(tddp_shm *shm, int peer, int64_t now)
{
    _Atomic int64_t *checked_at = &tddp_shm_matching_of(shm)->peers[peer].checked_at;
    if (now - atomic_load_explicit(checked_at, memory_order_relaxed) < TDDP_SHM_CHECK_INTERVAL_NS) {
        return false;
    }
    atomic_store_explicit(checked_at, now, memory_order_relaxed);
    return true;
}
