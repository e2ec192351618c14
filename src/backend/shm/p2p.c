/*
 * Sends and receives between ranks of one host: posts requests and waits for them. Posted by any
 * thread, one at a time; finished by any, several at a time.
 *
 * Resumption: finish() may be interrupted wherever it waits, and is then called again: whatever
 * precedes a wait does nothing the second time.
 *
 * Every waiting thread makes progress for all requests of the rank: it sends pending headers and
 * matches those that arrived. So no request waits for another one's thread.
 *
 * Invariant: the thread that posts or finishes a request copies its payload, never with the mutex
 * of matching.c held. rndv.c moves large payloads.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/control.h"
#include "backend/shm/p2p_request.h"

enum {
    SPIN_AWAITED_NS = 50000, /* 1.5 system calls: what sleeping and waking up cost together */
    SPIN_BACKGROUND_NS = 2000,
};

static bool is_matched(tddp_shm *shm, tddp_shm_request *self)
{
    (void)shm;
    return atomic_load_explicit(&self->matched, memory_order_acquire);
}

/* The awaited rank. The source of a wildcard receive is known once another thread has matched
 * it. */
static int peer_of(tddp_shm *shm, tddp_shm_request *self)
{
    return is_matched(shm, self) ? self->peer : self->op->peer;
}

static tddp_status fail_timeout(tddp_shm *shm, tddp_shm_request *self)
{
    const tddp_op *op = self->op;
    /* Not the source that another thread may just have found: it may be of another host. */
    const int peer = self->started ? self->peer : op->peer;
    bool sends = op->kind == TDDP_OP_SEND;
    char who[32] = "no rank has";
    if (peer != TDDP_ANY_SOURCE) {
        snprintf(who, sizeof who, "rank %d has", tddp_shm_rank_name(shm, peer));
    }
    if (self->started) {
        return tddp_fail(TDDP_TIMEOUT,
                         "not done after %" PRId64
                         " ms; %s begun to %s this message, but has not finished",
                         op->timeout_ms, who, sends ? "receive" : "send");
    }
    return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms; %s%s %s %s with tag %" PRIu32,
                     op->timeout_ms, who, peer == TDDP_ANY_SOURCE ? "" : " not",
                     sends ? "received" : "sent", peer == TDDP_ANY_SOURCE ? "one" : "it", op->tag);
}

/* Checks the deadline, and now and then whether the peer is alive. */
static tddp_status check_peer(tddp_shm *shm, tddp_shm_request *self, int64_t now)
{

    if (now >= self->deadline) {
        return fail_timeout(shm, self);
    }
    if (now - self->checked_at < TDDP_SHM_CHECK_INTERVAL_NS) {
        return TDDP_OK;
    }
    self->checked_at = now;
    const int peer = peer_of(shm, self);
    const bool is_foreign = peer >= shm->size || (peer < 0 && shm->foreign_senders);
    /* Waiting for this rank itself fails only if another has ended. */
    return tddp_shm_check_peer(shm, is_foreign ? shm->rank : peer);
}

tddp_status tddp_shm_request_wait(tddp_shm *shm, tddp_shm_request *self,
                                  bool (*reached)(tddp_shm *shm, tddp_shm_request *self))
{
    const tddp_cancel *cancel = self->op->cancel;
    tddp_eventcount *events = tddp_shm_events(shm, tddp_shm_rank(shm));
    bool spins = self->op->awaited && tddp_shm_ranks_per_core(shm) <= 1;
    tddp_status failure = TDDP_OK;
    while (!reached(shm, self)) {
        uint32_t seen = tddp_eventcount_read(events);
        tddp_status status = tddp_shm_matching_progress(shm);
        if (status) {
            return status;
        }
        if (reached(shm, self)) {
            break;
        }
        /* Everything that a rank sent before it left has been matched since. */
        if (failure) {
            return failure;
        }
        int64_t now = tddp_now_ns();
        failure = check_peer(shm, self, now);
        if (failure == TDDP_OK && cancel && tddp_cancel_triggered(cancel)) {
            return TDDP_CANCELED;
        }
        if (failure == TDDP_OK) {
            int64_t end = tddp_cancel_deadline(cancel);
            int64_t left = (end < self->deadline ? end : self->deadline) - now;
            tddp_eventcount_wait(events, seen, spins ? SPIN_AWAITED_NS : SPIN_BACKGROUND_NS,
                                 left < TDDP_SHM_CHECK_INTERVAL_NS ? left
                                                                   : TDDP_SHM_CHECK_INTERVAL_NS);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_shm_request_mismatch(const tddp_shm *shm, const tddp_shm_request *self, int sender,
                                      int receiver)
{
    bool sends = self->op->kind == TDDP_OP_SEND;
    uint64_t expected = sends ? self->rndv->count : self->op->output.count;
    uint32_t dtype = sends ? self->rndv->dtype : (uint32_t)self->op->output.dtype;
    return tddp_fail(TDDP_MISMATCH,
                     "rank %d sends %" PRIu64 " elements of %s, rank %d receives %" PRIu64
                     " elements of %s with tag %" PRIu32 ": both must be the same",
                     tddp_shm_rank_name(shm, sender), self->header.count,
                     tddp_dtype_name((tddp_dtype)self->header.dtype),
                     tddp_shm_rank_name(shm, receiver), expected,
                     tddp_dtype_name((tddp_dtype)dtype), self->op->tag);
}

/* --- posting --------------------------------------------------------------------------------- */

/* Writes the header of a send, and its payload if it is inline or eager. */
static tddp_status write_header(tddp_shm *shm, tddp_shm_request *self)
{
    const tddp_buffer *input = &self->op->input;
    tddp_shm_header *header = &self->header;
    size_t bytes = tddp_buffer_bytes(input);
    header->tag = self->op->tag;
    header->count = input->count;
    header->dtype = (uint16_t)input->dtype;
    if (bytes <= sizeof header->data) {
        header->protocol = TDDP_SHM_PROTOCOL_INLINE;
        tddp_arith_copy(header->data, input->data, bytes, false);
        return TDDP_OK;
    }
    header->protocol = TDDP_SHM_PROTOCOL_EAGER;
    header->block = bytes <= TDDP_SHM_EAGER_BYTES
                        ? tddp_shm_matching_alloc(shm, tddp_shm_eager_kind(bytes))
                        : 0;
    if (header->block) {
        void *data = tddp_shm_eager_data(shm, tddp_shm_rank(shm), header->block);
        tddp_arith_copy(data, input->data, bytes, false);
        return TDDP_OK;
    }
    header->protocol = TDDP_SHM_PROTOCOL_RNDV;
    header->block = tddp_shm_matching_alloc(shm, TDDP_SHM_RNDV_BLOCKS);
    if (!header->block) {
        /* Of those that are under way to a rank that is lost none ends any more. */
        tddp_status status = tddp_shm_check_peer(shm, self->op->peer);
        return status ? status
                      : tddp_fail(TDDP_OUT_OF_MEMORY,
                                  "too many large messages under way: wait for some of them first");
    }
    tddp_shm_rndv *rndv = tddp_shm_rndv_at(shm, tddp_shm_rank(shm), header->block);
    rndv->offset = tddp_shm_offset_of(shm, input->data, bytes);
    rndv->channel = 0;
    atomic_store(&rndv->state, TDDP_SHM_RNDV_RTS);
    return TDDP_OK;
}

tddp_status tddp_shm_p2p_post(tddp_shm *shm, const tddp_op *op, void **request)
{
    if (tddp_shm_size(shm) == 1 && !shm->foreign_senders) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "there is no other rank");
    }
    tddp_shm_request *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->op = op;
    self->peer = op->peer;
    self->checked_at = tddp_now_ns();
    self->deadline = tddp_deadline_after_ms(op->timeout_ms);
    if (op->kind == TDDP_OP_RECV) {
        tddp_shm_matching_add_receive(shm, self);
        *request = self;
        return TDDP_OK;
    }
    /* A send that completes at once would not notice that the peer is lost. */
    bool looks = tddp_shm_matching_check_due(shm, op->peer, self->checked_at);
    tddp_status status = looks ? tddp_shm_check_peer(shm, op->peer) : TDDP_OK;
    if (status == TDDP_OK) {
        status = write_header(shm, self);
    }
    if (status) {
        free(self);
        return status;
    }
    tddp_shm_matching_add_send(shm, self);
    *request = self;
    return TDDP_OK;
}

void tddp_shm_p2p_add_foreign(tddp_shm *shm)
{
    shm->foreign_senders = true;
}

tddp_status tddp_shm_p2p_deliver(tddp_shm *shm, int from, uint32_t tag, void *message)
{
    tddp_shm_header header = {.tag = tag, .protocol = TDDP_SHM_PROTOCOL_FOREIGN};
    memcpy(header.data, &message, sizeof message);
    return tddp_shm_matching_deliver(shm, from, &header);
}

/* --- finishing ------------------------------------------------------------------------------- */

static tddp_status finish_send(tddp_shm *shm, tddp_shm_request *self)
{
    tddp_status status = tddp_shm_request_wait(shm, self, is_matched);
    if (status == TDDP_OK && self->header.protocol == TDDP_SHM_PROTOCOL_RNDV) {
        status = tddp_shm_rndv_send(shm, self);
    }
    return status;
}

/* Copies the payload of a matched message. */
static tddp_status receive_payload(tddp_shm *shm, tddp_shm_request *self)
{
    const tddp_buffer *output = &self->op->output;
    const tddp_shm_header *header = &self->header;
    bool agrees = header->count == output->count && header->dtype == (uint32_t)output->dtype;
    size_t bytes = tddp_buffer_bytes(output);
    if (header->protocol == TDDP_SHM_PROTOCOL_RNDV) {
        self->rndv = tddp_shm_rndv_at(shm, self->peer, header->block);
        self->started = true;
        if (agrees) {
            return tddp_shm_rndv_recv(shm, self);
        }
        tddp_shm_rndv_reject(shm, self);
    } else if (header->protocol == TDDP_SHM_PROTOCOL_INLINE) {
        tddp_arith_copy(output->data, header->data, agrees ? bytes : 0, false);
    } else {
        const void *data = tddp_shm_eager_data(shm, self->peer, header->block);
        tddp_arith_copy(output->data, data, agrees ? bytes : 0, false);
        tddp_shm_block_free(shm, self->peer, header->block);
    }
    return agrees ? TDDP_OK : tddp_shm_request_mismatch(shm, self, self->peer, tddp_shm_rank(shm));
}

tddp_status tddp_shm_p2p_finish(tddp_shm *shm, void *request, int *source)
{
    tddp_shm_request *self = request;
    tddp_status status;
    if (self->op->kind == TDDP_OP_SEND) {
        status = finish_send(shm, self);
    } else {
        status = tddp_shm_request_wait(shm, self, is_matched);
        status = status ? status : receive_payload(shm, self);
        if (status == TDDP_OK) {
            *source = self->peer;
        }
    }
    if (status == TDDP_CANCELED) {
        return status;
    }
    if (status) {
        tddp_shm_matching_remove(shm, self);
    }
    free(self);
    return status;
}

void tddp_shm_p2p_drop(tddp_shm *shm, void *request)
{
    tddp_shm_matching_remove(shm, request);
    free(request);
}

tddp_status tddp_shm_p2p_await_message(tddp_shm *shm, void *request, void **message, int *from)
{
    tddp_shm_request *self = request;
    *message = NULL;
    tddp_status status = tddp_shm_request_wait(shm, self, is_matched);
    if (status == TDDP_CANCELED) {
        return status;
    }
    if (status) {
        tddp_shm_p2p_drop(shm, self);
    } else if (self->header.protocol == TDDP_SHM_PROTOCOL_FOREIGN) {
        memcpy(message, self->header.data, sizeof *message);
        *from = self->peer;
        free(self);
    }
    return status;
}
