/*
 * The transport in memory. One lock for everything; deliveries with it held.
 *
 * A transfer is unmatched, in the list in the order of posting; or matched with another one, until
 * the delivering thread completes both; or complete.
 */
#include "mailbox.h"

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
    bool delivered; /* or canceled by the other side */
    bool released;  /* buffered: freed when it is delivered */
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
    pthread_t delivering;
};

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

/* Whether a rank has gone, and all that it has sent to this one has arrived. */
static bool has_gone(const mailbox *box, int rank, int observer)
{
    const transfer *each = box->ends[rank].gone ? box->matched : NULL;
    while (each && !(each->rank == rank && each->match->rank == observer)) {
        each = each->next;
    }
    return box->ends[rank].gone && !each;
}

/* What waits for ranks that have gone waits in vain; what they have sent still arrives, before
 * their end is noticed. */
static void fail_those_in_vain(mailbox *box)
{
    for (transfer *each = box->unmatched; each; each = each->next) {
        if (each->peer >= 0 && !each->complete && has_gone(box, each->peer, each->rank)) {
            complete(box, each, TDDP_PEER_LOST);
        }
    }
}

static void go(mailbox *box, int rank)
{
    box->ends[rank].gone = true;
    fail_those_in_vain(box);
    for (int other = 0; other < box->size; other++) {
        tddp_eventcount_notify(box->ends[other].events);
    }
}

/* A notice arrives last. */
static bool may_arrive(const mailbox *box, const transfer *send)
{
    const transfer *each = send->tag == NOTICE_TAG ? box->matched : NULL;
    while (each && (each == send || each->rank != send->rank || each->peer != send->peer)) {
        each = each->next;
    }
    return !each;
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
        if (chosen && may_arrive(box, chosen)) {
            deliver(box, chosen);
            fail_those_in_vain(box);
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
    CHECK(what->tag >> TDDP_TRANSPORT_TAG_BITS == 0);
    end->noticed = end->noticed || (what->sends && what->tag == NOTICE_TAG);
    if (it->sends && coll_random(&box->seed, 3) == 0) {
        it->copy = malloc(it->bytes + 1);
        CHECK(it->copy);
        memcpy(it->copy, it->data, it->bytes);
        it->complete = true;
    }
    post(box, it);
    fail_those_in_vain(box);
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
        status = tddp_fail(TDDP_PEER_LOST, "gone");
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
        other->delivered = true;
        if (other->released) {
            free_transfer(other);
        } else {
            complete(box, other, TDDP_PEER_LOST);
        }
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

/* Ranks are connected from the start, and end when the test says so. */
static tddp_status box_open(const tddp_backend_opts *opts, void **context, tddp_slice *address)
{
    (void)opts;
    (void)context;
    (void)address;
    return tddp_fail(TDDP_UNSUPPORTED, "a mailbox is not opened");
}

static tddp_status box_connect(void *context, const tddp_slice *addresses, const tddp_wait *wait,
                               int *peer)
{
    (void)context;
    (void)addresses;
    (void)wait;
    (void)peer;
    return TDDP_OK;
}

static void box_close(void *context, int64_t ms)
{
    (void)ms;
    mailbox_leave(context);
}

static void box_destroy(void *context)
{
    (void)context;
}

const tddp_transport_ops mailbox_ops = {
    .size = sizeof(tddp_transport_ops),
    .name = "mailbox",
    .open = box_open,
    .connect = box_connect,
    .send = box_send,
    .recv = box_recv,
    .test = box_test,
    .release = box_release,
    .close = box_close,
    .destroy = box_destroy,
};

/* --- mailboxes ------------------------------------------------------------------------------- */

mailbox *mailbox_create(int size, unsigned seed)
{
    mailbox *box = calloc(1, sizeof *box);
    CHECK(box && size <= MOST_RANKS);
    box->size = size;
    box->seed = seed;
    pthread_mutex_init(&box->mutex, NULL);
    pthread_cond_init(&box->changed, NULL);
    for (int rank = 0; rank < size; rank++) {
        box->ends[rank].box = box;
        box->ends[rank].rank = rank;
        CHECK_OK(tddp_eventcount_create(&box->ends[rank].events));
    }
    CHECK_INT(pthread_create(&box->delivering, NULL, deliver_body, box), 0);
    return box;
}

void mailbox_destroy(mailbox *box)
{
    pthread_mutex_lock(&box->mutex);
    box->ending = true;
    pthread_cond_signal(&box->changed);
    pthread_mutex_unlock(&box->mutex);
    pthread_join(box->delivering, NULL);
    while (box->unmatched) {
        transfer *it = box->unmatched;
        box->unmatched = it->next;
        free_transfer(it);
    }
    for (int rank = 0; rank < box->size; rank++) {
        tddp_eventcount_free(box->ends[rank].events);
    }
    pthread_cond_destroy(&box->changed);
    pthread_mutex_destroy(&box->mutex);
    free(box);
}

mailbox_end *mailbox_end_of(mailbox *box, int rank)
{
    return &box->ends[rank];
}

void mailbox_leave(mailbox_end *end)
{
    pthread_mutex_lock(&end->box->mutex);
    go(end->box, end->rank);
    pthread_mutex_unlock(&end->box->mutex);
}

bool mailbox_is_whole(mailbox *box)
{
    bool gone = false;
    pthread_mutex_lock(&box->mutex);
    for (int rank = 0; rank < box->size; rank++) {
        gone = gone || box->ends[rank].gone || box->ends[rank].noticed;
    }
    pthread_mutex_unlock(&box->mutex);
    return !gone;
}
