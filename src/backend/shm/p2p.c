/*
 * Sends and receives between ranks of one host: writing and opening letters, and waiting. Posted by
 * any thread, one at a time; finished by any, several at a time.
 *
 * All who wait bring on what there is for everybody: they send this rank's letters that found no
 * room, and take in what has come. So nobody's call waits for another's.
 *
 * Invariant: payload is copied by the thread that posts or finishes the message, and by nobody
 * with the mutex of matching.c held. Large payload is offer.c's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/arith/arith.h"
#include "backend/shm/post.h"

enum {
    SPIN_AWAITED_NS = 50000, /* a system call and a half: what sleeping and waking cost together */
    SPIN_BESIDE_NS = 2000,
};

static bool is_settled(tddp_shm *shm, tddp_shm_post *self)
{
    (void)shm;
    return atomic_load_explicit(&self->settled, memory_order_acquire);
}

/* Who it waits for: of a receive from any that is known when it is settled, by another thread. */
static int peer_of(tddp_shm *shm, tddp_shm_post *self)
{
    return is_settled(shm, self) ? self->peer : self->op->peer;
}

static tddp_status fail_late(tddp_shm *shm, tddp_shm_post *self)
{
    const tddp_op *op = self->op;
    const int peer = peer_of(shm, self);
    bool sends = op->kind == TDDP_OP_SEND;
    char who[32] = "no rank has";
    if (peer != TDDP_ANY_SOURCE) {
        snprintf(who, sizeof who, "rank %d has", tddp_shm_name(shm, peer));
    }
    if (self->begun) {
        return tddp_fail(TDDP_TIMEOUT,
                         "not done after %" PRId64
                         " ms; %s begun to %s this message, but is not through",
                         op->timeout_ms, who, sends ? "receive" : "send");
    }
    return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms; %s%s %s %s with tag %" PRIu32,
                     op->timeout_ms, who, peer == TDDP_ANY_SOURCE ? "" : " not",
                     sends ? "received" : "sent", peer == TDDP_ANY_SOURCE ? "one" : "it", op->tag);
}

/* What stands against waiting longer, if it is time to look. */
static tddp_status look(tddp_shm *shm, tddp_shm_post *self, int64_t now)
{
    if (now >= self->deadline) {
        return fail_late(shm, self);
    }
    if (now - self->looked < TDDP_SHM_LOOK_NS) {
        return TDDP_OK;
    }
    self->looked = now;
    return tddp_shm_look(shm, peer_of(shm, self));
}

tddp_status tddp_shm_post_await(tddp_shm *shm, tddp_shm_post *self,
                                bool (*reached)(tddp_shm *shm, tddp_shm_post *self))
{
    bool spins = self->op->awaited && tddp_shm_ranks_per_core(shm) <= 1;
    tddp_status trouble = TDDP_OK;
    while (!reached(shm, self)) {
        uint32_t seen = tddp_shm_bell(shm);
        tddp_status status = tddp_shm_posts_bring_on(shm);
        if (status) {
            return status;
        }
        if (reached(shm, self)) {
            break;
        }
        /* What a rank sent before it left was brought on since. */
        if (trouble) {
            return trouble;
        }
        int64_t now = tddp_now_ns();
        trouble = look(shm, self, now);
        if (trouble == TDDP_OK) {
            int64_t left = self->deadline - now;
            tddp_shm_bell_wait(shm, seen, spins ? SPIN_AWAITED_NS : SPIN_BESIDE_NS,
                               left < TDDP_SHM_LOOK_NS ? left : TDDP_SHM_LOOK_NS);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_shm_post_disagree(const tddp_shm *shm, const tddp_shm_post *self, int sender,
                                   int receiver)
{
    bool sends = self->op->kind == TDDP_OP_SEND;
    uint64_t expected = sends ? self->offer->count : self->op->output.count;
    uint32_t dtype = sends ? self->offer->dtype : (uint32_t)self->op->output.dtype;
    return tddp_fail(TDDP_MISMATCH,
                     "rank %d sends %" PRIu64 " elements of %s, rank %d receives %" PRIu64
                     " elements of %s with tag %" PRIu32 ": both must be the same",
                     tddp_shm_name(shm, sender), self->letter.count,
                     tddp_dtype_name((tddp_dtype)self->letter.dtype), tddp_shm_name(shm, receiver),
                     expected, tddp_dtype_name((tddp_dtype)dtype), self->op->tag);
}

/* --- posting --------------------------------------------------------------------------------- */

/* Writes the letter of a send, and its payload where it goes ahead of being asked for. */
static tddp_status write_letter(tddp_shm *shm, tddp_shm_post *self)
{
    const tddp_buffer *input = &self->op->input;
    tddp_shm_letter *letter = &self->letter;
    size_t bytes = tddp_shm_post_bytes(input);
    letter->tag = self->op->tag;
    letter->count = input->count;
    letter->dtype = (uint16_t)input->dtype;
    if (bytes <= sizeof letter->data) {
        letter->way = TDDP_SHM_ENCLOSED;
        tddp_arith_copy(letter->data, input->data, bytes, false);
        return TDDP_OK;
    }
    letter->way = TDDP_SHM_PARCEL;
    letter->block = bytes <= TDDP_SHM_EAGER_BYTES ? tddp_shm_posts_take_parcel(shm, bytes) : 0;
    if (letter->block) {
        void *data = tddp_shm_parcel_data(shm, tddp_shm_rank(shm), letter->block);
        tddp_arith_copy(data, input->data, bytes, false);
        return TDDP_OK;
    }
    letter->way = TDDP_SHM_OFFER;
    letter->block = tddp_shm_posts_take_block(shm, TDDP_SHM_OFFERS);
    if (!letter->block) {
        return tddp_fail(TDDP_OUT_OF_MEMORY,
                         "no room for one more large message under way: finish some first");
    }
    tddp_shm_offer *offer = tddp_shm_offer_at(shm, tddp_shm_rank(shm), letter->block);
    offer->where = tddp_shm_locate(shm, input->data, bytes);
    atomic_store(&offer->state, TDDP_SHM_OFFERED);
    return TDDP_OK;
}

tddp_status tddp_shm_post_create(tddp_shm *shm, const tddp_op *op, void **request)
{
    if (tddp_shm_size(shm) == 1) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "there is no other rank");
    }
    tddp_shm_post *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->op = op;
    self->peer = op->peer;
    self->looked = tddp_now_ns();
    self->deadline = tddp_deadline_after_ms(op->timeout_ms);
    if (op->kind == TDDP_OP_RECV) {
        tddp_shm_posts_add_receive(shm, self);
        *request = self;
        return TDDP_OK;
    }
    /* One that waits for nobody would not see that nobody is there. */
    bool looks = tddp_shm_posts_time_to_look(shm, op->peer, self->looked);
    tddp_status status = looks ? tddp_shm_look(shm, op->peer) : TDDP_OK;
    if (status == TDDP_OK) {
        status = write_letter(shm, self);
    }
    if (status) {
        free(self);
        return status;
    }
    tddp_shm_posts_add_send(shm, self);
    *request = self;
    return TDDP_OK;
}

/* --- finishing ------------------------------------------------------------------------------- */

static tddp_status finish_send(tddp_shm *shm, tddp_shm_post *self)
{
    tddp_status status = tddp_shm_post_await(shm, self, is_settled);
    if (status == TDDP_OK && self->letter.way == TDDP_SHM_OFFER) {
        status = tddp_shm_offer_serve(shm, self);
    }
    return status;
}

/* Takes the payload that its letter tells of. */
static tddp_status open_letter(tddp_shm *shm, tddp_shm_post *self)
{
    const tddp_buffer *output = &self->op->output;
    const tddp_shm_letter *letter = &self->letter;
    bool agrees = letter->count == output->count && letter->dtype == (uint32_t)output->dtype;
    size_t bytes = tddp_shm_post_bytes(output);
    if (letter->way == TDDP_SHM_OFFER) {
        self->offer = tddp_shm_offer_at(shm, self->peer, letter->block);
        self->begun = true;
        if (agrees) {
            return tddp_shm_offer_accept(shm, self);
        }
        tddp_shm_offer_refuse(shm, self);
    } else if (letter->way == TDDP_SHM_ENCLOSED) {
        tddp_arith_copy(output->data, letter->data, agrees ? bytes : 0, false);
    } else {
        const void *data = tddp_shm_parcel_data(shm, self->peer, letter->block);
        tddp_arith_copy(output->data, data, agrees ? bytes : 0, false);
        tddp_shm_parcel_return(shm, self->peer, letter->block);
    }
    return agrees ? TDDP_OK : tddp_shm_post_disagree(shm, self, self->peer, tddp_shm_rank(shm));
}

tddp_status tddp_shm_post_finish(tddp_shm *shm, void *request, int *source)
{
    tddp_shm_post *self = request;
    tddp_status status;
    if (self->op->kind == TDDP_OP_SEND) {
        status = finish_send(shm, self);
    } else {
        status = tddp_shm_post_await(shm, self, is_settled);
        status = status ? status : open_letter(shm, self);
        if (status == TDDP_OK) {
            *source = self->peer;
        }
    }
    if (status) {
        tddp_shm_posts_remove(shm, self);
    }
    free(self);
    return status;
}
