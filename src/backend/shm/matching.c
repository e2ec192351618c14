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

/* A message that arrived before its receive was posted. */
typedef struct unexpected {
    int from;
    tddp_shm_header header;
    struct unexpected *next;
} unexpected;

typedef struct peer_queue {
    uint32_t sent;     /* headers put into the ring to that rank */
    uint32_t received; /* headers taken from the ring from it */
    _Atomic int64_t checked_at;
    tddp_shm_request *pending; /* sends whose headers found the ring full, in order */
    tddp_shm_request **pending_end;
} peer_queue;

struct tddp_shm_matching {
    pthread_mutex_t mutex;
    tddp_shm_block_pool pool;
    uint32_t seen_events; /* this rank's when the rings were last checked */
    tddp_shm_request *posted;
    tddp_shm_request **posted_end;
    unexpected *unexpected;
    unexpected **unexpected_end;
    int size;
    peer_queue queues[];
};

typedef struct tddp_shm_matching matching;

tddp_status tddp_shm_matching_create(tddp_shm *shm, struct tddp_shm_matching **out)
{
    size_t size = (size_t)tddp_shm_size(shm);
    matching *self = tddp_alloc(sizeof *self + size * sizeof self->queues[0]);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&self->mutex, NULL);
    self->size = (int)size;
    self->posted_end = &self->posted;
    self->unexpected_end = &self->unexpected;
    for (size_t i = 0; i < size; i++) {
        self->queues[i].pending_end = &self->queues[i].pending;
    }
    *out = self;
    return TDDP_OK;
}

void tddp_shm_matching_destroy(struct tddp_shm_matching *self)
{
    if (!self) {
        return;
    }
    while (self->unexpected) {
        unexpected *next = self->unexpected->next;
        free(self->unexpected);
        self->unexpected = next;
    }
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

/* --- queues, with the mutex held ------------------------------------------------------------- */

static void append(tddp_shm_request ***end, tddp_shm_request *request)
{
    request->next = NULL;
    **end = request;
    *end = &request->next;
}

static void unlink_at(tddp_shm_request **at, tddp_shm_request ***end)
{
    if (*end == &(*at)->next) {
        *end = at;
    }
    *at = (*at)->next;
}

static void remove_from(tddp_shm_request **first, tddp_shm_request ***end,
                        const tddp_shm_request *request)
{
    for (tddp_shm_request **at = first; *at; at = &(*at)->next) {
        if (*at == request) {
            unlink_at(at, end);
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
    for (tddp_shm_request **at = &self->posted; *at; at = &(*at)->next) {
        if (matches(*at, from, header)) {
            tddp_shm_request *request = *at;
            unlink_at(at, &self->posted_end);
            match(request, from, header);
            *matched = true;
            return TDDP_OK;
        }
    }
    unexpected *added = tddp_alloc(sizeof *added);
    if (!added) {
        return TDDP_OUT_OF_MEMORY;
    }
    added->from = from;
    memcpy(&added->header, header, sizeof *header);
    *self->unexpected_end = added;
    self->unexpected_end = &added->next;
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
        peer_queue *queue = &self->queues[from];
        while (from != tddp_shm_rank(shm) &&
               tddp_shm_ring_get(shm, from, queue->received, &header)) {
            queue->received++;
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
    peer_queue *queue = &self->queues[to];
    bool sent_any = false;
    while (queue->pending && tddp_shm_ring_put(shm, to, queue->sent, &queue->pending->header)) {
        tddp_shm_request *request = queue->pending;
        unlink_at(&queue->pending, &queue->pending_end);
        queue->sent++;
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
        if (self->queues[to].pending && send_pending(shm, self, to)) {
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
    append(&all->queues[to].pending_end, self);
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
    unexpected **at = &all->unexpected;
    while (*at && !matches(self, (*at)->from, &(*at)->header)) {
        at = &(*at)->next;
    }
    unexpected *found = *at;
    if (found) {
        if (all->unexpected_end == &found->next) {
            all->unexpected_end = at;
        }
        *at = found->next;
        match(self, found->from, &found->header);
    } else {
        append(&all->posted_end, self);
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
    if (self->op->kind == TDDP_OP_SEND) {
        peer_queue *queue = &all->queues[self->peer];
        remove_from(&queue->pending, &queue->pending_end, self);
    } else {
        remove_from(&all->posted, &all->posted_end, self);
    }
    pthread_mutex_unlock(&all->mutex);
}

/* --- blocks ---------------------------------------------------------------------------------- */

uint32_t tddp_shm_matching_alloc_eager(tddp_shm *shm, size_t bytes)
{
    matching *all = tddp_shm_matching_of(shm);
    pthread_mutex_lock(&all->mutex);
    uint32_t buffer = tddp_shm_eager_alloc(shm, &all->pool, bytes);
    pthread_mutex_unlock(&all->mutex);
    return buffer;
}

uint32_t tddp_shm_matching_alloc_block(tddp_shm *shm, tddp_shm_block_kind kind)
{
    matching *all = tddp_shm_matching_of(shm);
    pthread_mutex_lock(&all->mutex);
    uint32_t block = tddp_shm_block_alloc(shm, &all->pool, kind);
    pthread_mutex_unlock(&all->mutex);
    return block;
}

void tddp_shm_matching_free_block(tddp_shm *shm, tddp_shm_block_kind kind, uint32_t block)
{
    matching *all = tddp_shm_matching_of(shm);
    pthread_mutex_lock(&all->mutex);
    tddp_shm_block_free(shm, &all->pool, kind, block);
    pthread_mutex_unlock(&all->mutex);
}

bool tddp_shm_matching_check_due(tddp_shm *shm, int peer, int64_t now)
{
    _Atomic int64_t *checked_at = &tddp_shm_matching_of(shm)->queues[peer].checked_at;
    if (now - atomic_load_explicit(checked_at, memory_order_relaxed) < TDDP_SHM_CHECK_INTERVAL_NS) {
        return false;
    }
    atomic_store_explicit(checked_at, now, memory_order_relaxed);
    return true;
}
