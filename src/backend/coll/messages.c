/*
 * Sends and receives. Posted by any thread, one at a time; finished by any, several at a time.
 *
 * A message is a header with a payload of at most EAGER_BYTES, in an eager buffer of maximum size,
 * since the receiver doesn't know which message comes. Its tag contains the operation's, so that
 * messages match in order. A larger payload uses a rendezvous: it goes from the sender's memory to
 * the receiver's, with its own tag, which the header names. The receiver posts its receive after it
 * has checked the header. So the payload is never sent to memory that does not fit, and two large
 * messages at once do not wait for each other.
 *
 * With wildcard receives and receives from one rank for the same tag, each message matches one of
 * them, but not always the one that was posted first.
 *
 * Invariant: a request is in the list, and has its transfers, until it is finished, or dropped, or
 * its tddp_coll ends.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "backend/coll/coll.h"

enum { MAX_IDLE = 64 }; /* eager buffers */

typedef struct message {
    uint64_t count;
    uint32_t dtype;
    uint32_t number; /* of a large payload's tag; 0: the payload is with this header */
} message;
_Static_assert(sizeof(message) <= HEADER_BYTES, "a header has its place");

/* An idle one's first bytes are the link to the next. */
typedef union tddp_coll_eager {
    union tddp_coll_eager *next;
    message header;
    char data[HEADER_BYTES + EAGER_BYTES];
} eager_buffer;

typedef struct tddp_coll_request {
    tddp_coll *coll; /* NULL: it has ended */
    const tddp_op *op;
    tddp_coll_wait wait;
    eager_buffer *eager;
    void *header;  /* the transfers */
    void *payload; /* of a large message; posted: by a receiver only once the header has arrived */
    int source;    /* the other rank; of a receive from any source once the message has arrived */
    bool probed;
    struct tddp_coll_request *next;
    struct tddp_coll_request **link; /* what points to it */
} request;

static uint64_t header_tag(const tddp_op *op)
{
    return TDDP_COLL_TAG(TDDP_TRANSPORT_PROGRAM_TAG, op->tag);
}

static uint64_t payload_tag(uint32_t number)
{
    return TDDP_COLL_TAG(2, number);
}

/* --- requests and their memory --------------------------------------------------------------- */

/* A header and as much payload as may come; the memory is not cleared. */
static eager_buffer *take_eager(tddp_coll *coll)
{
    pthread_mutex_lock(&coll->mutex);
    eager_buffer *eager = coll->idle;
    if (eager) {
        coll->idle = eager->next;
        coll->idle_count--;
    }
    pthread_mutex_unlock(&coll->mutex);
    return eager ? eager : tddp_resize(NULL, sizeof *eager);
}

static request *make_request(tddp_coll *coll, const tddp_op *op)
{
    request *self = tddp_alloc(sizeof *self);
    eager_buffer *eager = self ? take_eager(coll) : NULL;
    if (!eager) {
        free(self);
        return NULL;
    }
    *self = (request){.coll = coll, .op = op, .eager = eager, .source = op->peer};
    tddp_coll_wait_init(&self->wait, op);
    pthread_mutex_lock(&coll->mutex);
    self->next = coll->requests;
    self->link = &coll->requests;
    if (self->next) {
        self->next->link = &self->next;
    }
    coll->requests = self;
    pthread_mutex_unlock(&coll->mutex);
    return self;
}

static void free_request(request *self)
{
    tddp_coll *coll = self->coll;
    if (coll) {
        tddp_coll_release(coll, &self->header);
        tddp_coll_release(coll, &self->payload);
        pthread_mutex_lock(&coll->mutex);
        *self->link = self->next;
        if (self->next) {
            self->next->link = self->link;
        }
        if (coll->idle_count < MAX_IDLE) {
            self->eager->next = coll->idle;
            coll->idle = self->eager;
            coll->idle_count++;
            self->eager = NULL;
        }
        pthread_mutex_unlock(&coll->mutex);
    }
    free(self->eager);
    free(self);
}

void tddp_coll_end_messages(tddp_coll *coll)
{
    while (coll->requests) {
        request *self = coll->requests;
        coll->requests = self->next;
        tddp_coll_release(coll, &self->header);
        tddp_coll_release(coll, &self->payload);
        self->coll = NULL;
    }
    while (coll->idle) {
        eager_buffer *eager = coll->idle;
        coll->idle = eager->next;
        free(eager);
    }
}

/* --- posting --------------------------------------------------------------------------------- */

/* Unique among the large messages in flight to one peer. */
static uint32_t next_number(tddp_coll *coll, int peer)
{
    uint32_t *messages = &coll->links[peer].messages;
    *messages = *messages == UINT32_MAX ? 1 : *messages + 1;
    return *messages;
}

static tddp_status post_send(tddp_coll *coll, request *self)
{
    const tddp_op *op = self->op;
    const size_t bytes = tddp_buffer_bytes(&op->input);
    const bool eager = bytes <= EAGER_BYTES;
    const message header = {op->input.count, (uint32_t)op->input.dtype,
                            eager ? 0 : next_number(coll, op->peer)};
    char *data = self->eager->data;
    memset(data, 0, HEADER_BYTES);
    memcpy(data, &header, sizeof header);
    if (eager && bytes > 0) {
        memcpy(data + HEADER_BYTES, op->input.data, bytes);
    }
    tddp_status status = tddp_coll_start_send(coll, op->peer, header_tag(op), data,
                                              HEADER_BYTES + (eager ? bytes : 0), &self->header);
    if (status == TDDP_OK && !eager) {
        status = tddp_coll_start_send(coll, op->peer, payload_tag(header.number), op->input.data,
                                      bytes, &self->payload);
    }
    return status;
}

tddp_status tddp_coll_post(tddp_coll *coll, const tddp_op *op, void **out)
{
    if (coll->size == 1) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "there is no other rank");
    }
    tddp_status status =
        atomic_load(&coll->has_noticed) ? tddp_coll_check(coll, op->peer, 0) : TDDP_OK;
    request *self = status ? NULL : make_request(coll, op);
    if (!self) {
        return tddp_coll_report(coll, status ? status : TDDP_OUT_OF_MEMORY);
    }
    if (op->kind == TDDP_OP_SEND) {
        status = post_send(coll, self);
    } else {
        status = tddp_coll_start_recv(coll, op->peer, header_tag(op), self->eager->data,
                                      sizeof self->eager->data, &self->header);
    }
    if (status) {
        status = tddp_coll_report(coll, status);
        free_request(self);
        return status;
    }
    tddp_coll_arm(coll);
    *out = self;
    return TDDP_OK;
}

/* --- finishing ------------------------------------------------------------------------------- */

/* Waits until the other side has arrived. */
static tddp_status await_header(request *self)
{
    if (self->wait.matched) {
        return TDDP_OK;
    }
    tddp_status status =
        tddp_coll_await(self->coll, &self->wait, self->header, self->op->peer, &self->source);
    self->wait.matched = status == TDDP_OK;
    return status;
}

/* Posts the receive of a large payload, or copies a small one, if it is the one that is expected.
 */
static tddp_status begin_payload(request *self)
{
    tddp_coll *coll = self->coll;
    const tddp_buffer *output = &self->op->output;
    const size_t bytes = tddp_buffer_bytes(output);
    message header;
    memcpy(&header, self->eager->data, sizeof header);
    if (header.count != output->count || header.dtype != (uint32_t)output->dtype) {
        return tddp_fail(TDDP_MISMATCH,
                         "rank %d sends %" PRIu64 " elements of %s, rank %d receives %zu elements "
                         "of %s with tag %" PRIu32 ": both must be the same",
                         tddp_coll_rank_name(coll, self->source), header.count,
                         tddp_dtype_name((tddp_dtype)header.dtype),
                         tddp_coll_rank_name(coll, coll->rank), output->count,
                         tddp_dtype_name(output->dtype), self->op->tag);
    }
    if (header.number != 0) {
        return tddp_coll_start_recv(coll, self->source, payload_tag(header.number), output->data,
                                    bytes, &self->payload);
    }
    if (bytes > 0) {
        memcpy(output->data, self->eager->data + HEADER_BYTES, bytes);
    }
    return TDDP_OK;
}

tddp_status tddp_coll_finish(tddp_coll *coll, void *it, int *source)
{
    request *self = it;
    const bool receives = self->op->kind == TDDP_OP_RECV;
    if (self->probed) {
        self->probed = false;
        self->wait.deadline = tddp_deadline_after_ms(self->op->timeout_ms); /* since the probe */
    }
    tddp_status status = await_header(self);
    if (status == TDDP_OK && receives && !self->payload) {
        status = begin_payload(self);
    }
    if (status == TDDP_OK && self->payload) {
        status = tddp_coll_await(coll, &self->wait, self->payload, self->source, NULL);
    }
    if (status == TDDP_CANCELED) {
        return status;
    }
    if (status == TDDP_OK && receives) {
        *source = self->source;
    }
    status = tddp_coll_report(coll, status);
    free_request(self);
    return status;
}

tddp_status tddp_coll_probe(tddp_coll *coll, void *it, int *source)
{
    request *self = it;
    tddp_status status = await_header(self);
    if (status == TDDP_OK) {
        *source = self->source;
        self->probed = true;
    }
    return tddp_coll_report(coll, status);
}

void tddp_coll_drop(void *it)
{
    free_request(it);
}
