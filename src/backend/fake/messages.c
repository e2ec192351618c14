/*
 * The `fake` backend's sends and receives, over a store: message n from one rank to another with a
 * tag has the key `message/<from>/<to>/<tag>/<n>`. A send is complete when its key is set; the
 * receiver removes it. Posted on any thread, one at a time; finished by several at once.
 *
 * A receive gets its number n when it is posted, except a wildcard receive, and one behind a
 * wildcard receive that may take the same message: they get it when they are first in order and a
 * message is there. Nothing here blocks in the store, whose connection the other threads need: a
 * receive polls.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/fake/context.h"

enum { KEY_BYTES = 96, POLL_MS = 1 };

typedef tddp_fake_context context;

/* Precedes a message's data. */
typedef struct header {
    uint32_t dtype;
    uint32_t fingerprint;
    uint64_t count;
} header;

/* Counts the messages to or from one rank with one tag. */
typedef struct tddp_fake_counter {
    int peer;
    bool inbound;
    uint32_t tag;
    uint64_t next;
    struct tddp_fake_counter *link;
} counter;

typedef struct tddp_fake_message {
    const tddp_op *op;
    int64_t deadline;
    bool decided;
    int peer;        /* valid once the number is assigned */
    uint64_t number; /* of the message */
    struct tddp_fake_message *link;
} message;

static counter *find_counter(tddp_fake_p2p *p2p, int peer, bool inbound, uint32_t tag)
{
    for (counter *each = p2p->counters; each; each = each->link) {
        if (each->peer == peer && each->inbound == inbound && each->tag == tag) {
            return each;
        }
    }
    counter *added = tddp_alloc(sizeof *added);
    if (added) {
        *added = (counter){peer, inbound, tag, 0, p2p->counters};
        p2p->counters = added;
    }
    return added;
}

/* Assigns the next number of a peer's messages. With the lock held. */
static tddp_status assign_number(tddp_fake_p2p *p2p, message *self, int peer)
{
    counter *of = find_counter(p2p, peer, self->op->kind == TDDP_OP_RECV, self->op->tag);
    if (!of) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->decided = true;
    self->peer = peer;
    self->number = of->next++;
    return TDDP_OK;
}

/* Whether an earlier unmatched receive may take the next message of a peer. */
static bool earlier_claims(const tddp_fake_p2p *p2p, const message *self, int peer)
{
    for (const message *each = p2p->unmatched; each && each != self; each = each->link) {
        if (each->op->tag == self->op->tag &&
            (each->op->peer == TDDP_ANY_SOURCE || each->op->peer == peer)) {
            return true;
        }
    }
    return false;
}

static void add_unmatched(tddp_fake_p2p *p2p, message *self)
{
    message **end = &p2p->unmatched;
    while (*end) {
        end = &(*end)->link;
    }
    *end = self;
}

static void remove_unmatched(tddp_fake_p2p *p2p, message *self)
{
    message **link = &p2p->unmatched;
    while (*link && *link != self) {
        link = &(*link)->link;
    }
    if (*link) {
        *link = self->link;
    }
}

tddp_status tddp_fake_post(void *data, const tddp_op *op, void **request)
{
    context *self = data;
    if (self->faults.post_fail_at == (int64_t)op->sequence) {
        return tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    }
    message *added = tddp_alloc(sizeof *added);
    if (!added) {
        return TDDP_OUT_OF_MEMORY;
    }
    added->op = op;
    added->deadline = tddp_deadline_after_ms(op->timeout_ms);
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&self->p2p.mutex);
    bool is_open = op->kind == TDDP_OP_RECV &&
                   (op->peer == TDDP_ANY_SOURCE || earlier_claims(&self->p2p, added, op->peer));
    if (is_open) {
        add_unmatched(&self->p2p, added);
    } else {
        status = assign_number(&self->p2p, added, op->peer);
    }
    pthread_mutex_unlock(&self->p2p.mutex);
    if (status) {
        free(added);
        return status;
    }
    *request = added;
    return TDDP_OK;
}

static tddp_slice key_of(char text[KEY_BYTES], int from, int to, uint32_t tag, uint64_t number)
{
    int length =
        snprintf(text, KEY_BYTES, "message/%d/%d/%" PRIu32 "/%" PRIu64, from, to, tag, number);
    return (tddp_slice){text, (size_t)length};
}

static tddp_wait time_left(const context *self, const message *of)
{
    return (tddp_wait){tddp_deadline_poll_ms(of->deadline), self->cancel};
}

/* Opens the store's connection for messages before the first one. */
static tddp_status open_store(context *self, const message *first)
{
    tddp_status status = TDDP_OK;
    tddp_wait wait = time_left(self, first);
    pthread_mutex_lock(&self->p2p.mutex);
    if (!self->p2p.store) {
        status = tddp_store_clone(self->store, &wait, &self->p2p.store);
    }
    pthread_mutex_unlock(&self->p2p.mutex);
    return status;
}

static tddp_status send_it(const context *self, const message *sent)
{
    char key[KEY_BYTES];
    const tddp_op *op = sent->op;
    header head = {(uint32_t)op->input.dtype, op->fingerprint, op->input.count};
    tddp_bytes value = {0};
    tddp_wait wait = time_left(self, sent);
    tddp_status status = tddp_bytes_append(&value, &head, sizeof head);
    if (status == TDDP_OK) {
        status = tddp_bytes_append(&value, op->input.data,
                                   op->input.count * tddp_dtype_size(op->input.dtype));
    }
    if (status == TDDP_OK) {
        status = tddp_store_set(self->p2p.store,
                                key_of(key, self->rank, sent->peer, op->tag, sent->number),
                                (tddp_slice){value.data, value.size}, &wait);
    }
    tddp_bytes_free(&value);
    return status;
}

static tddp_status accept_value(const context *self, const message *received,
                                const tddp_blob *value)
{
    const tddp_op *op = received->op;
    const tddp_buffer *output = &op->output;
    header head;
    if (value->size < sizeof head) {
        return tddp_fail(TDDP_INTERNAL, "rank %d sent %zu bytes, expected a header of %zu",
                         received->peer, value->size, sizeof head);
    }
    memcpy(&head, value->data, sizeof head);
    if (head.dtype != (uint32_t)output->dtype || head.count != output->count) {
        return tddp_fail(TDDP_MISMATCH,
                         "rank %d sends %" PRIu64 " elements of %s, rank %d expects %zu of %s "
                         "(tag %" PRIu32 ")",
                         received->peer, head.count, tddp_dtype_name((tddp_dtype)head.dtype),
                         self->rank, output->count, tddp_dtype_name(output->dtype), op->tag);
    }
    if (head.fingerprint && op->fingerprint && head.fingerprint != op->fingerprint) {
        return tddp_fail(TDDP_MISMATCH, "rank %d and rank %d describe it differently", self->rank,
                         received->peer);
    }
    size_t bytes = output->count * tddp_dtype_size(output->dtype);
    if (value->size != sizeof head + bytes) {
        return tddp_fail(TDDP_INTERNAL, "rank %d sent %zu bytes, expected %zu", received->peer,
                         value->size, sizeof head + bytes);
    }
    if (bytes > 0) {
        memcpy(output->data, value->data + sizeof head, bytes);
    }
    return TDDP_OK;
}

/* Whether a receive's next message from a rank is there. */
static tddp_status is_there(const context *self, const message *received, int peer, uint64_t number,
                            int *there)
{
    char key[KEY_BYTES];
    tddp_slice name = key_of(key, peer, self->rank, received->op->tag, number);
    tddp_wait wait = time_left(self, received);
    return tddp_store_check(self->p2p.store, &name, 1, &wait, there);
}

/* Matches an unmatched receive if possible. With the lock held. */
static tddp_status try_to_decide(context *self, message *received)
{
    tddp_fake_p2p *p2p = &self->p2p;
    int wanted = received->op->peer;
    tddp_status status = TDDP_OK;
    for (int peer = 0; peer < self->world_size && status == TDDP_OK && !received->decided; peer++) {
        if (peer == self->rank || (wanted != TDDP_ANY_SOURCE && peer != wanted) ||
            earlier_claims(p2p, received, peer)) {
            continue;
        }
        int there = wanted != TDDP_ANY_SOURCE;
        if (!there) {
            counter *of = find_counter(p2p, peer, true, received->op->tag);
            status = of ? is_there(self, received, peer, of->next, &there) : TDDP_OUT_OF_MEMORY;
        }
        if (status == TDDP_OK && there) {
            status = assign_number(p2p, received, peer);
        }
    }
    if (received->decided) {
        remove_unmatched(p2p, received);
    }
    return status;
}

/* Sleeps a moment; fails at the deadline or after an abort. */
static tddp_status nap(const context *self, const message *received)
{
    struct pollfd entry = {.fd = tddp_cancel_fd(self->cancel), .events = POLLIN};
    if (tddp_deadline_poll_ms(received->deadline) == 0) {
        if (received->op->peer == TDDP_ANY_SOURCE) {
            return tddp_fail(TDDP_TIMEOUT,
                             "no message with tag %" PRIu32 " within %" PRId64
                             " ms: waiting for any rank",
                             received->op->tag, received->op->timeout_ms);
        }
        return tddp_fail(TDDP_TIMEOUT,
                         "no message with tag %" PRIu32 " within %" PRId64
                         " ms: waiting for rank(s) %d",
                         received->op->tag, received->op->timeout_ms, received->op->peer);
    }
    if (poll(&entry, 1, POLL_MS) < 0 && errno != EINTR) {
        return tddp_fail_errno("poll");
    }
    return tddp_cancel_triggered(self->cancel) ? tddp_fail(TDDP_CANCELED, "aborted") : TDDP_OK;
}

/* Waits until this receive's message is there. */
static tddp_status await_message(context *self, message *received)
{
    tddp_status status = TDDP_OK;
    int there = 0;
    while (status == TDDP_OK && !there) {
        if (!received->decided) {
            pthread_mutex_lock(&self->p2p.mutex);
            status = try_to_decide(self, received);
            pthread_mutex_unlock(&self->p2p.mutex);
        }
        if (status == TDDP_OK && received->decided) {
            status = is_there(self, received, received->peer, received->number, &there);
        }
        if (status == TDDP_OK && !there) {
            status = nap(self, received);
        }
    }
    return status;
}

static tddp_status receive_it(context *self, message *received)
{
    tddp_status status = await_message(self, received);
    if (status) {
        return status;
    }
    char key[KEY_BYTES];
    tddp_blob value = {0};
    int deleted;
    tddp_wait wait = time_left(self, received);
    tddp_slice name = key_of(key, received->peer, self->rank, received->op->tag, received->number);
    status = tddp_store_get(self->p2p.store, name, &wait, &value);
    if (status == TDDP_OK) {
        status = tddp_store_delete_key(self->p2p.store, name, &wait, &deleted);
    }
    if (status == TDDP_OK) {
        status = accept_value(self, received, &value);
    }
    tddp_blob_free(&value);
    return status;
}

tddp_status tddp_fake_finish(void *data, void *request, int *source)
{
    context *self = data;
    message *finished = request;
    bool receives = finished->op->kind == TDDP_OP_RECV;
    tddp_status status = tddp_fake_before(&self->faults, finished->op, self->cancel);
    if (status == TDDP_OK) {
        status = open_store(self, finished);
    }
    if (status == TDDP_OK) {
        status = receives ? receive_it(self, finished) : send_it(self, finished);
    }
    pthread_mutex_lock(&self->p2p.mutex);
    if (!finished->decided) {
        remove_unmatched(&self->p2p, finished);
    }
    pthread_mutex_unlock(&self->p2p.mutex);
    if (status == TDDP_OK && receives) {
        *source = finished->peer;
    }
    free(finished);
    return tddp_fake_translate(self, status);
}

void tddp_fake_p2p_free(tddp_fake_p2p *p2p)
{
    while (p2p->counters) {
        counter *next = p2p->counters->link;
        free(p2p->counters);
        p2p->counters = next;
    }
    pthread_mutex_destroy(&p2p->mutex);
    tddp_store_release(p2p->store);
}
