/*
 * Large messages: both ends agree by the state of an offer, and the payload goes from where it lies
 * to where it is wanted if the receiver can see it, else through a channel, chunk after chunk. On
 * the threads that finish messages.
 *
 * Invariant: a state is left by one end only, but that either may withdraw; so a message is taken
 * as whole only if the sender has not given up meanwhile and let its memory go. Blocks of a message
 * that was withdrawn are not used again: the other end may still be at them. The group has failed
 * then.
 *
 * A channel is held only while both ends are at work on its message: waiting for one is waiting for
 * nobody's other call.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/post.h"

static uint32_t state_of(const tddp_shm_post *self)
{
    return atomic_load(&self->offer->state);
}

/* False: the state is another one by now. */
static bool turn(tddp_shm_post *self, uint32_t from, uint32_t to)
{
    return atomic_compare_exchange_strong(&self->offer->state, &from, to);
}

static char *chunk_at(tddp_shm_channel *channel, uint64_t step)
{
    return channel->chunks[step % TDDP_SHM_CHANNEL_DEPTH];
}

static size_t chunk_bytes(size_t bytes, uint64_t step)
{
    size_t left = bytes - (size_t)step * TDDP_SHM_CHANNEL_CHUNK;
    return left < TDDP_SHM_CHANNEL_CHUNK ? left : TDDP_SHM_CHANNEL_CHUNK;
}

static tddp_status fail_withdrawn(const tddp_shm *shm, const tddp_shm_post *self)
{
    return tddp_fail(TDDP_PEER_LOST, "rank %d gave up a message with tag %u that was under way",
                     tddp_shm_name(shm, self->peer), (unsigned)self->op->tag);
}

/* Whatever the state is, nothing more happens with the offer. */
static void withdraw(tddp_shm *shm, tddp_shm_post *self)
{
    atomic_store(&self->offer->state, TDDP_SHM_WITHDRAWN);
    tddp_shm_bell_ring(shm, self->peer);
}

/* --- the sender ------------------------------------------------------------------------------ */

static bool is_answered(tddp_shm *shm, tddp_shm_post *self)
{
    (void)shm;
    uint32_t state = state_of(self);
    return state != TDDP_SHM_OFFERED && state != TDDP_SHM_COPIED;
}

static bool flows_no_more(tddp_shm *shm, tddp_shm_post *self)
{
    (void)shm;
    return state_of(self) != TDDP_SHM_FLOWING;
}

static bool has_room(tddp_shm *shm, tddp_shm_post *self)
{
    uint64_t emptied = atomic_load_explicit(&self->channel->emptied, memory_order_acquire);
    return self->step - emptied < TDDP_SHM_CHANNEL_DEPTH || flows_no_more(shm, self);
}

static bool has_channel(tddp_shm *shm, tddp_shm_post *self)
{
    self->channel_block = tddp_shm_posts_take_block(shm, TDDP_SHM_CHANNELS);
    return self->channel_block || state_of(self) != TDDP_SHM_ASKED;
}

/* Fills the channel until the receiver has all, or has withdrawn. */
static tddp_status fill(tddp_shm *shm, tddp_shm_post *self)
{
    const char *data = self->op->input.data;
    size_t bytes = tddp_shm_post_bytes(&self->op->input);
    for (self->step = 0; self->step * TDDP_SHM_CHANNEL_CHUNK < bytes; self->step++) {
        tddp_status status = tddp_shm_post_await(shm, self, has_room);
        if (status || flows_no_more(shm, self)) {
            return status;
        }
        tddp_arith_copy(chunk_at(self->channel, self->step),
                        data + self->step * TDDP_SHM_CHANNEL_CHUNK, chunk_bytes(bytes, self->step),
                        false);
        atomic_store_explicit(&self->channel->filled, self->step + 1, memory_order_release);
        tddp_shm_bell_ring(shm, self->peer);
    }
    return tddp_shm_post_await(shm, self, flows_no_more);
}

/* The receiver has asked for it. */
static tddp_status flow(tddp_shm *shm, tddp_shm_post *self)
{
    tddp_status status = tddp_shm_post_await(shm, self, has_channel);
    if (status || !self->channel_block) {
        return status;
    }
    self->channel = tddp_shm_channel_at(shm, tddp_shm_rank(shm), self->channel_block);
    atomic_store(&self->channel->filled, 0);
    atomic_store(&self->channel->emptied, 0);
    self->offer->channel = self->channel_block;
    if (turn(self, TDDP_SHM_ASKED, TDDP_SHM_FLOWING)) {
        tddp_shm_bell_ring(shm, self->peer);
        status = fill(shm, self);
    }
    if (state_of(self) == TDDP_SHM_ACCEPTED) {
        tddp_shm_posts_free_block(shm, TDDP_SHM_CHANNELS, self->channel_block);
        /* For those who wait for one. */
        tddp_shm_bell_ring(shm, tddp_shm_rank(shm));
    }
    return status;
}

tddp_status tddp_shm_offer_serve(tddp_shm *shm, tddp_shm_post *self)
{
    self->offer = tddp_shm_offer_at(shm, tddp_shm_rank(shm), self->letter.block);
    tddp_status status = tddp_shm_post_await(shm, self, is_answered);
    self->begun = true;
    if (status == TDDP_OK && state_of(self) == TDDP_SHM_ASKED) {
        status = flow(shm, self);
    }
    if (status) {
        withdraw(shm, self);
        return status;
    }
    uint32_t state = state_of(self);
    if (state != TDDP_SHM_ACCEPTED && state != TDDP_SHM_REFUSED) {
        return fail_withdrawn(shm, self);
    }
    if (state == TDDP_SHM_REFUSED) {
        status = tddp_shm_post_disagree(shm, self, tddp_shm_rank(shm), self->peer);
    }
    tddp_shm_posts_free_block(shm, TDDP_SHM_OFFERS, self->letter.block);
    return status;
}

/* --- the receiver ---------------------------------------------------------------------------- */

static bool is_served(tddp_shm *shm, tddp_shm_post *self)
{
    (void)shm;
    return state_of(self) != TDDP_SHM_ASKED;
}

static bool has_chunk(tddp_shm *shm, tddp_shm_post *self)
{
    uint64_t filled = atomic_load_explicit(&self->channel->filled, memory_order_acquire);
    return filled > self->step || flows_no_more(shm, self);
}

static tddp_status empty(tddp_shm *shm, tddp_shm_post *self)
{
    char *data = self->op->output.data;
    size_t bytes = tddp_shm_post_bytes(&self->op->output);
    bool streaming = bytes > tddp_shm_cache_bytes(shm);
    self->channel = tddp_shm_channel_at(shm, self->peer, self->offer->channel);
    for (self->step = 0; self->step * TDDP_SHM_CHANNEL_CHUNK < bytes; self->step++) {
        tddp_status status = tddp_shm_post_await(shm, self, has_chunk);
        if (status || flows_no_more(shm, self)) {
            return status;
        }
        tddp_arith_copy(data + self->step * TDDP_SHM_CHANNEL_CHUNK,
                        chunk_at(self->channel, self->step), chunk_bytes(bytes, self->step),
                        streaming);
        atomic_store_explicit(&self->channel->emptied, self->step + 1, memory_order_release);
        tddp_shm_bell_ring(shm, self->peer);
    }
    return TDDP_OK;
}

tddp_status tddp_shm_offer_accept(tddp_shm *shm, tddp_shm_post *self)
{
    size_t bytes = tddp_shm_post_bytes(&self->op->output);
    char *data = self->op->output.data;
    uint64_t where = self->offer->where;
    tddp_status status = TDDP_OK;
    bool taken = false;
    if (where != TDDP_SHM_NOWHERE && turn(self, TDDP_SHM_OFFERED, TDDP_SHM_COPIED)) {
        tddp_arith_copy(data, tddp_shm_at(shm, self->peer, where), bytes,
                        bytes > tddp_shm_cache_bytes(shm));
        taken = turn(self, TDDP_SHM_COPIED, TDDP_SHM_ACCEPTED);
    } else if (where == TDDP_SHM_NOWHERE && turn(self, TDDP_SHM_OFFERED, TDDP_SHM_ASKED)) {
        tddp_shm_bell_ring(shm, self->peer);
        status = tddp_shm_post_await(shm, self, is_served);
        if (status == TDDP_OK && state_of(self) == TDDP_SHM_FLOWING) {
            status = empty(shm, self);
        }
        taken = status == TDDP_OK && turn(self, TDDP_SHM_FLOWING, TDDP_SHM_ACCEPTED);
    }
    if (taken) {
        tddp_shm_bell_ring(shm, self->peer);
        return TDDP_OK;
    }
    withdraw(shm, self);
    return status ? status : fail_withdrawn(shm, self);
}

void tddp_shm_offer_refuse(tddp_shm *shm, tddp_shm_post *self)
{
    self->offer->count = self->op->output.count;
    self->offer->dtype = (uint32_t)self->op->output.dtype;
    (void)turn(self, TDDP_SHM_OFFERED, TDDP_SHM_REFUSED);
    tddp_shm_bell_ring(shm, self->peer);
}
