/*
 * The transport in memory. One lock for everything; deliveries with it held.
 *
 * A transfer is unmatched, in the list in the order of posting; or matched with another one, until
 * the delivering thread completes both; or complete.
 */
#include "mailbox.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct transfer transfer;
struct transfer {
    bool sends;
    int rank;
    int peer; /* or TDDP_ANY_SOURCE */
    uint64_t tag;
    char *data;
    size_t bytes;
    char *copy; /* of a buffered message */
    bool complete;
    bool delivered;
    bool released; /* buffered: freed when it is delivered */
    tddp_status status;
    transfer *match;
    transfer *next; /* in the list of those that are not matched, or of sends that are */
};

struct mailbox {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    mailbox_end ends[MOST_RANKS];
    int size;
    unsigned seed;
    transfer *unmatched;
    transfer *matched; /* sends */
    bool ending;
    pthread_barrier_t all;
};

unsigned coll_random(unsigned *seed, unsigned limit)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % limit;
}

/* --- with the lock held ---------------------------------------------------------------------- */

static void append(transfer **list, transfer *it)
{
    while (*list) {
        list = &(*list)->next;
    }
    it->next = NULL;
    *list = it;
}

static bool detach(transfer **list, const transfer *it)
{
    while (*list && *list != it) {
        list = &(*list)->next;
    }
    const bool found = *list != NULL;
    if (found) {
        *list = it->next;
    }
    return found;
}

static void free_transfer(transfer *it)
{
    free(it->copy);
    free(it);
}

static void complete(mailbox *box, transfer *it, tddp_status status)
{
    it->status = it->complete ? it->status : status;
    it->complete = true;
    tddp_eventcount_notify(box->ends[it->rank].events);
}

static bool fits(const transfer *send, const transfer *recv)
{
    return send->peer == recv->rank && send->tag == recv->tag &&
           (recv->peer == send->rank || recv->peer == TDDP_ANY_SOURCE);
}

static void match(mailbox *box, transfer *send, transfer *recv)
{
    CHECK(send->bytes <= recv->bytes);
    send->match = recv;
    recv->match = send;
    append(&box->matched, send);
    pthread_cond_signal(&box->changed);
}

static void post(mailbox *box, transfer *it)
{
    for (transfer *each = box->unmatched; each; each = each->next) {
        if (each->sends != it->sends && (it->sends ? fits(it, each) : fits(each, it))) {
            (void)detach(&box->unmatched, each);
            match(box, it->sends ? it : each, it->sends ? each : it);
            return;
        }
    }
    append(&box->unmatched, it);
}

static void deliver(mailbox *box, transfer *send)
{
    transfer *recv = send->match;
    (void)detach(&box->matched, send);
    if (send->bytes > 0) {
        memcpy(recv->data, send->copy ? send->copy : send->data, send->bytes);
    }
    recv->peer = send->rank;
    complete(box, recv, TDDP_OK);
    complete(box, send, TDDP_OK);
    recv->match = send->match = NULL;
    send->delivered = true;
    if (send->released) {
        free_transfer(send);
    }
}

/* What waits for this rank waits in vain; what it has sent still arrives. */
static void go(mailbox *box, int rank)
{
    box->ends[rank].gone = true;
    for (transfer *each = box->unmatched; each; each = each->next) {
        if (each->peer == rank) {
            complete(box, each, TDDP_PEER_LOST);
        }
    }
    for (int other = 0; other < box->size; other++) {
        tddp_eventcount_notify(box->ends[other].events);
    }
}

/* Whether a rank has gone, and all that it has sent to this one has arrived. */
static bool has_gone(const mailbox *box, int rank, int observer)
{
    const transfer *each = box->matched;
    while (each && !(each->rank == rank && each->match->rank == observer)) {
        each = each->next;
    }
    return box->ends[rank].gone && rank != observer && !each;
}

static tddp_status describe_lost(const mailbox_end *end)
{
    return end->failed ? tddp_fail(TDDP_PEER_LOST, "lost rank %d, which gave up: %s", end->rank,
                                   end->reason)
                       : tddp_fail(TDDP_PEER_LOST, "lost rank %d (gone)", end->rank);
}

/* --- the delivering thread ------------------------------------------------------------------- */

static void *deliver_body(void *data)
{
    mailbox *box = data;
    pthread_mutex_lock(&box->mutex);
    while (!box->ending) {
        if (!box->matched) {
            pthread_cond_wait(&box->changed, &box->mutex);
            continue;
        }
        /* Others may post meanwhile. */
        for (unsigned yields = coll_random(&box->seed, 4); yields > 0; yields--) {
            pthread_mutex_unlock(&box->mutex);
            (void)sched_yield();
            pthread_mutex_lock(&box->mutex);
        }
        unsigned count = 0;
        for (const transfer *each = box->matched; each; each = each->next) {
            count++;
        }
        transfer *chosen = box->matched;
        for (unsigned i = count > 0 ? coll_random(&box->seed, count) : 0; i > 0; i--) {
            chosen = chosen->next;
        }
        if (chosen) {
            deliver(box, chosen);
        }
    }
    pthread_mutex_unlock(&box->mutex);
    return NULL;
}

/* --- the transport --------------------------------------------------------------------------- */

static tddp_status start(mailbox_end *end, const transfer *what, void **out)
{
    mailbox *box = end->box;
    const int peer = what->peer;
    transfer *it = malloc(sizeof *it);
    CHECK(it);
    *it = *what;
    it->rank = end->rank;
    pthread_mutex_lock(&box->mutex);
    CHECK(peer == TDDP_ANY_SOURCE || (peer >= 0 && peer < box->size && peer != end->rank));
    CHECK(what->tag < TDDP_TRANSPORT_TAGS);
    if (it->sends && coll_random(&box->seed, 3) == 0) {
        it->copy = malloc(it->bytes + 1);
        CHECK(it->copy);
        memcpy(it->copy, it->data, it->bytes);
        it->complete = true;
    }
    post(box, it);
    /* What the peer has sent was matched. */
    if (!it->match && peer >= 0 && box->ends[peer].gone) {
        complete(box, it, TDDP_PEER_LOST);
    }
    pthread_mutex_unlock(&box->mutex);
    *out = it;
    return TDDP_OK;
}

static tddp_status box_send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                            void **out)
{
    const transfer it = {
        .sends = true, .peer = peer, .tag = tag, .data = (char *)(uintptr_t)data, .bytes = bytes};
    return start(context, &it, out);
}

static tddp_status box_recv(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                            void **out)
{
    const transfer it = {.peer = peer, .tag = tag, .data = data, .bytes = bytes};
    return start(context, &it, out);
}

static tddp_status box_test(void *context, void *which, int *is_complete, int *source)
{
    mailbox *box = ((mailbox_end *)context)->box;
    const transfer *it = which;
    pthread_mutex_lock(&box->mutex);
    tddp_status status = TDDP_OK;
    *is_complete = it->complete;
    if (it->complete && it->status) {
        status = describe_lost(&box->ends[it->peer]);
    } else if (it->complete && !it->sends && source) {
        *source = it->peer;
    }
    pthread_mutex_unlock(&box->mutex);
    return status;
}

/* With the lock held: the other side fails, and the rank's connections are of no further use. */
static void cancel(mailbox *box, transfer *it)
{
    transfer *other = it->match;
    box->ends[it->rank].unfinished++;
    if (other) {
        (void)detach(&box->matched, it->sends ? it : other);
        other->match = NULL;
        other->peer = it->rank;
        complete(box, other, TDDP_PEER_LOST);
    }
    go(box, it->rank);
}

static void box_release(void *context, void *which)
{
    mailbox *box = ((mailbox_end *)context)->box;
    transfer *it = which;
    pthread_mutex_lock(&box->mutex);
    if (!it->complete) {
        cancel(box, it);
    }
    if (it->copy && !it->delivered) {
        it->released = true; /* still to be delivered */
    } else {
        (void)detach(&box->unmatched, it);
        free_transfer(it);
    }
    pthread_mutex_unlock(&box->mutex);
}

static struct tddp_eventcount *box_events(void *context)
{
    return ((mailbox_end *)context)->events;
}

static tddp_status box_check_peer(void *context, int peer, uint64_t sequence)
{
    mailbox_end *end = context;
    mailbox *box = end->box;
    int gone = 0;
    const mailbox_end *lost = NULL;
    pthread_mutex_lock(&box->mutex);
    for (int rank = 0; rank < box->size; rank++) {
        const mailbox_end *each = &box->ends[rank];
        const bool counts = rank == peer || sequence > each->completed;
        if (has_gone(box, rank, end->rank)) {
            gone++;
            lost = counts && (!lost || rank == peer) ? each : lost;
        }
    }
    tddp_status status = lost ? describe_lost(lost) : TDDP_OK;
    if (!status && peer == TDDP_ANY_SOURCE && gone == box->size - 1) {
        status = tddp_fail(TDDP_PEER_LOST, "all ranks have left the group");
    }
    pthread_mutex_unlock(&box->mutex);
    return status;
}

static void box_report_failure(void *context, tddp_status status, const char *text)
{
    mailbox_end *end = context;
    pthread_mutex_lock(&end->box->mutex);
    CHECK(status != TDDP_OK && status != TDDP_CANCELED);
    if (!end->failed) {
        end->failed = true;
        (void)snprintf(end->reason, sizeof end->reason, "%s", text);
    }
    go(end->box, end->rank);
    pthread_mutex_unlock(&end->box->mutex);
}

const tddp_transport_ops mailbox_ops = {
    .size = sizeof(tddp_transport_ops),
    .send = box_send,
    .recv = box_recv,
    .test = box_test,
    .release = box_release,
    .events = box_events,
    .check_peer = box_check_peer,
    .report_failure = box_report_failure,
};

/* --- ranks ----------------------------------------------------------------------------------- */

typedef struct rank_thread {
    coll_rank it;
    void (*body)(coll_rank *it);
    pthread_t thread;
} rank_thread;

void coll_leave(coll_rank *it)
{
    pthread_mutex_lock(&it->end->box->mutex);
    go(it->end->box, it->rank);
    pthread_mutex_unlock(&it->end->box->mutex);
}

static void *rank_body(void *data)
{
    rank_thread *self = data;
    coll_rank *it = &self->it;
    mailbox *box = it->end->box;
    int names[MOST_RANKS];
    for (int rank = 0; rank < it->size; rank++) {
        names[rank] = rank;
    }
    const tddp_coll_opts opts = {.size = sizeof opts,
                                 .transport = &mailbox_ops,
                                 .context = it->end,
                                 .rank = it->rank,
                                 .world_size = it->size,
                                 .names = it->seed % 2 ? names : NULL};
    CHECK_OK(tddp_coll_create(&opts, &it->coll));
    self->body(it);
    pthread_barrier_wait(&box->all);
    bool gone = false;
    pthread_mutex_lock(&box->mutex);
    for (int rank = 0; rank < it->size; rank++) {
        gone = gone || box->ends[rank].gone;
    }
    pthread_mutex_unlock(&box->mutex);
    CHECK(gone || it->end->unfinished == 0);
    pthread_barrier_wait(&box->all);
    tddp_coll_destroy(it->coll);
    return NULL;
}

static void end_mailbox(mailbox *box, pthread_t delivering)
{
    pthread_mutex_lock(&box->mutex);
    box->ending = true;
    pthread_cond_signal(&box->changed);
    pthread_mutex_unlock(&box->mutex);
    pthread_join(delivering, NULL);
    while (box->unmatched) {
        transfer *it = box->unmatched;
        box->unmatched = it->next;
        free_transfer(it);
    }
    for (int rank = 0; rank < box->size; rank++) {
        tddp_eventcount_free(box->ends[rank].events);
    }
    pthread_barrier_destroy(&box->all);
    pthread_cond_destroy(&box->changed);
    pthread_mutex_destroy(&box->mutex);
    free(box);
}

void run_ranks(int size, unsigned seed, void (*body)(coll_rank *it), void *data)
{
    rank_thread threads[MOST_RANKS];
    pthread_t delivering;
    mailbox *box = calloc(1, sizeof *box);
    CHECK(box && size <= MOST_RANKS);
    box->size = size;
    box->seed = seed;
    pthread_mutex_init(&box->mutex, NULL);
    pthread_cond_init(&box->changed, NULL);
    pthread_barrier_init(&box->all, NULL, (unsigned)size);
    for (int rank = 0; rank < size; rank++) {
        mailbox_end *end = &box->ends[rank];
        end->box = box;
        end->rank = rank;
        CHECK_OK(tddp_eventcount_create(&end->events));
    }
    CHECK_INT(pthread_create(&delivering, NULL, deliver_body, box), 0);
    for (int rank = 0; rank < size; rank++) {
        threads[rank] = (rank_thread){.body = body};
        threads[rank].it = (coll_rank){.rank = rank,
                                       .size = size,
                                       .mode = (coll_mode)((seed + (unsigned)rank) % COLL_MODES),
                                       .seed = seed * 31 + (unsigned)rank,
                                       .end = &box->ends[rank],
                                       .data = data};
        CHECK_INT(pthread_create(&threads[rank].thread, NULL, rank_body, &threads[rank]), 0);
    }
    for (int rank = 0; rank < size; rank++) {
        CHECK_INT(pthread_join(threads[rank].thread, NULL), 0);
    }
    end_mailbox(box, delivering);
}

/* --- operations ------------------------------------------------------------------------------ */

tddp_buffer coll_buffer(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){count > 0 ? data : NULL, count, dtype, TDDP_CPU, 0, NULL};
}

tddp_op coll_op(coll_rank *it, tddp_op_kind kind)
{
    const tddp_buffer none = coll_buffer(NULL, 0, TDDP_FLOAT32);
    return (tddp_op){.kind = kind,
                     .sequence = ++it->sequence,
                     .input = none,
                     .output = none,
                     .premul = 1,
                     .peer = TDDP_ANY_SOURCE,
                     .timeout_ms = COLL_TIMEOUT_MS};
}

tddp_op coll_message(tddp_op_kind kind, int peer, uint32_t tag, tddp_buffer buffer)
{
    return (tddp_op){.kind = kind,
                     .input = buffer,
                     .output = buffer,
                     .peer = peer,
                     .tag = tag,
                     .timeout_ms = COLL_TIMEOUT_MS};
}

/* Waits for an event, which must come; once a rank has gone, for a moment at most, as waits for
 * others are to notice that themselves. */
void coll_await_event(const coll_rank *it, uint32_t seen)
{
    mailbox *box = it->end->box;
    bool gone = false;
    pthread_mutex_lock(&box->mutex);
    for (int rank = 0; rank < box->size; rank++) {
        gone = gone || box->ends[rank].gone;
    }
    pthread_mutex_unlock(&box->mutex);
    tddp_eventcount_wait(it->end->events, seen, 0, gone ? TDDP_NS_PER_MS : 1000 * TDDP_NS_PER_S);
}

/* A token for the next call; a blocking rank has none. */
static tddp_cancel *next_token(coll_rank *it, tddp_cancel *token)
{
    const tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    *token = at_once;
    if (it->mode == COLL_INTERRUPTED) {
        token->deadline = tddp_now_ns() + coll_random(&it->seed, 50000);
    }
    return it->mode == COLL_BLOCKING ? NULL : token;
}

/* Runs a copy of the operation that is gone afterwards, its lists included. */
static tddp_status run_copy(coll_rank *it, const tddp_op *op, tddp_cancel *token, int awaited)
{
    const size_t size = (size_t)it->size;
    tddp_op *copy = malloc(sizeof *copy);
    tddp_buffer *parts = calloc(2 * size, sizeof *parts);
    CHECK(copy && parts);
    *copy = *op;
    copy->cancel = token;
    copy->awaited = awaited;
    if (op->input_parts) {
        memcpy(parts, op->input_parts, size * sizeof *parts);
        copy->input_parts = parts;
    }
    if (op->output_parts) {
        memcpy(parts + size, op->output_parts, size * sizeof *parts);
        copy->output_parts = parts + size;
    }
    tddp_status status = tddp_coll_run(it->coll, copy);
    pthread_mutex_lock(&it->end->box->mutex);
    it->end->completed = status == TDDP_OK ? op->sequence : it->end->completed;
    pthread_mutex_unlock(&it->end->box->mutex);
    memset(copy, 0xa5, sizeof *copy);
    memset(parts, 0xa5, 2 * size * sizeof *parts);
    free(copy);
    free(parts);
    return status;
}

tddp_status coll_try(coll_rank *it, const tddp_op *op)
{
    for (;;) {
        tddp_cancel token;
        tddp_cancel *cancel = next_token(it, &token);
        const int awaited = it->mode != COLL_POLLED && coll_random(&it->seed, 2);
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        const tddp_status status = run_copy(it, op, cancel, awaited);
        if (status != TDDP_CANCELED) {
            return status;
        }
        CHECK(cancel);
        coll_await_event(it, seen);
    }
}

tddp_status coll_try_times(coll_rank *it, const tddp_op *op, int calls)
{
    tddp_status status = TDDP_CANCELED;
    for (int i = 0; i < calls && status == TDDP_CANCELED; i++) {
        tddp_cancel token = TDDP_CANCEL_AT_ONCE;
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        status = run_copy(it, op, &token, 0);
        if (status == TDDP_CANCELED && i + 1 < calls) {
            coll_await_event(it, seen);
        }
    }
    return status;
}

tddp_status coll_finish(coll_rank *it, tddp_op *op, void *request, int *source)
{
    for (;;) {
        tddp_cancel token;
        op->cancel = next_token(it, &token);
        op->awaited = it->mode != COLL_POLLED && coll_random(&it->seed, 2);
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        const tddp_status status = tddp_coll_finish(it->coll, request, source);
        if (status != TDDP_CANCELED) {
            return status;
        }
        CHECK(op->cancel);
        coll_await_event(it, seen);
    }
}
