/*
 * The rendezvous protocol for large messages. The receiver copies the payload directly if it is in
 * the sender's segment; otherwise it goes through a channel, chunk by chunk. Runs on the threads
 * that finish requests.
 *
 * Invariant: only one side may leave a state, but either may cancel. So a message is complete only
 * if the sender did not cancel, and free its memory, meanwhile. The blocks of a canceled message
 * are not reused: the other side may still use them. The group has failed then.
 *
 * A channel is allocated only while both sides work on its message, so waiting for a channel never
 * means waiting for another call of a peer.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/p2p_request.h"

static uint32_t state_of(const tddp_shm_request *self)
{
    return atomic_load(&self->rndv->state);
}

/* Returns false if the state is another one by now. */
static bool transition(tddp_shm_request *self, uint32_t from, uint32_t to)
{
    return atomic_compare_exchange_strong(&self->rndv->state, &from, to);
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

static tddp_status fail_canceled(const tddp_shm *shm, const tddp_shm_request *self)
{
    return tddp_fail(TDDP_PEER_LOST, "rank %d gave up a message with tag %u that was under way",
                     tddp_shm_rank_name(shm, self->peer), (unsigned)self->op->tag);
}

/* Ends the protocol, whatever the state. */
static void cancel(tddp_shm *shm, tddp_shm_request *self)
{
    atomic_store(&self->rndv->state, TDDP_SHM_RNDV_CANCELED);
    tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
}

/* --- the sender ------------------------------------------------------------------------------ */

static bool is_answered(tddp_shm *shm, tddp_shm_request *self)
{
    (void)shm;
    uint32_t state = state_of(self);
    return state != TDDP_SHM_RNDV_RTS && state != TDDP_SHM_RNDV_COPYING;
}

static bool is_not_streaming(tddp_shm *shm, tddp_shm_request *self)
{
    (void)shm;
    return state_of(self) != TDDP_SHM_RNDV_STREAMING;
}

static bool has_space(tddp_shm *shm, tddp_shm_request *self)
{
    uint64_t consumed = atomic_load_explicit(&self->channel->consumed, memory_order_acquire);
    return self->step - consumed < TDDP_SHM_CHANNEL_DEPTH || is_not_streaming(shm, self);
}

static bool has_channel(tddp_shm *shm, tddp_shm_request *self)
{
    self->rndv->channel = tddp_shm_matching_alloc(shm, TDDP_SHM_CHANNEL_BLOCKS);
    return self->rndv->channel || state_of(self) != TDDP_SHM_RNDV_CTS;
}

/* Writes chunks until the receiver has everything or cancels. */
static tddp_status stream_out(tddp_shm *shm, tddp_shm_request *self)
{
    const char *data = self->op->input.data;
    size_t bytes = tddp_buffer_bytes(&self->op->input);
    for (; self->step * TDDP_SHM_CHANNEL_CHUNK < bytes; self->step++) {
        tddp_status status = tddp_shm_request_wait(shm, self, has_space);
        if (status || is_not_streaming(shm, self)) {
            return status;
        }
        tddp_arith_copy(chunk_at(self->channel, self->step),
                        data + self->step * TDDP_SHM_CHANNEL_CHUNK, chunk_bytes(bytes, self->step),
                        false);
        atomic_store_explicit(&self->channel->produced, self->step + 1, memory_order_release);
        tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
    }
    return tddp_shm_request_wait(shm, self, is_not_streaming);
}

/* After the receiver's CTS; `channel` stays NULL if it has canceled. */
static tddp_status open_channel(tddp_shm *shm, tddp_shm_request *self)
{
    tddp_status status = tddp_shm_request_wait(shm, self, has_channel);
    if (status || !self->rndv->channel) {
        return status;
    }
    self->channel = tddp_shm_channel_at(shm, tddp_shm_rank(shm), self->rndv->channel);
    atomic_store(&self->channel->produced, 0);
    atomic_store(&self->channel->consumed, 0);
    if (transition(self, TDDP_SHM_RNDV_CTS, TDDP_SHM_RNDV_STREAMING)) {
        tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
    }
    return TDDP_OK;
}

/* Sends through a channel. */
static tddp_status stream(tddp_shm *shm, tddp_shm_request *self)
{
    tddp_status status = self->channel ? TDDP_OK : open_channel(shm, self);
    if (status == TDDP_OK && self->channel) {
        status = stream_out(shm, self);
    }
    if (status == TDDP_CANCELED || !self->channel) {
        return status;
    }
    if (state_of(self) == TDDP_SHM_RNDV_COMPLETE) {
        tddp_shm_block_free(shm, tddp_shm_rank(shm), self->rndv->channel);
        /* For requests that wait for a channel. */
        tddp_eventcount_notify(tddp_shm_events(shm, tddp_shm_rank(shm)));
    }
    return status;
}

tddp_status tddp_shm_rndv_send(tddp_shm *shm, tddp_shm_request *self)
{
    self->rndv = tddp_shm_rndv_at(shm, tddp_shm_rank(shm), self->header.block);
    tddp_status status = tddp_shm_request_wait(shm, self, is_answered);
    if (status != TDDP_CANCELED) {
        self->started = true;
    }
    if (status == TDDP_OK && (self->channel || state_of(self) == TDDP_SHM_RNDV_CTS)) {
        status = stream(shm, self);
    }
    if (status == TDDP_CANCELED) {
        return status;
    }
    if (status) {
        cancel(shm, self);
        return status;
    }
    uint32_t state = state_of(self);
    if (state != TDDP_SHM_RNDV_COMPLETE && state != TDDP_SHM_RNDV_REJECTED) {
        return fail_canceled(shm, self);
    }
    if (state == TDDP_SHM_RNDV_REJECTED) {
        status = tddp_shm_request_mismatch(shm, self, tddp_shm_rank(shm), self->peer);
    }
    tddp_shm_block_free(shm, tddp_shm_rank(shm), self->header.block);
    return status;
}

/* --- the receiver ---------------------------------------------------------------------------- */

static bool is_streaming_or_canceled(tddp_shm *shm, tddp_shm_request *self)
{
    (void)shm;
    return state_of(self) != TDDP_SHM_RNDV_CTS;
}

static bool has_chunk(tddp_shm *shm, tddp_shm_request *self)
{
    uint64_t produced = atomic_load_explicit(&self->channel->produced, memory_order_acquire);
    return produced > self->step || is_not_streaming(shm, self);
}

static tddp_status stream_in(tddp_shm *shm, tddp_shm_request *self)
{
    char *data = self->op->output.data;
    size_t bytes = tddp_buffer_bytes(&self->op->output);
    bool streaming = bytes > tddp_shm_cache_bytes(shm);
    self->channel = tddp_shm_channel_at(shm, self->peer, self->rndv->channel);
    for (; self->step * TDDP_SHM_CHANNEL_CHUNK < bytes; self->step++) {
        tddp_status status = tddp_shm_request_wait(shm, self, has_chunk);
        if (status || is_not_streaming(shm, self)) {
            return status;
        }
        tddp_arith_copy(data + self->step * TDDP_SHM_CHANNEL_CHUNK,
                        chunk_at(self->channel, self->step), chunk_bytes(bytes, self->step),
                        streaming);
        atomic_store_explicit(&self->channel->consumed, self->step + 1, memory_order_release);
        tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
    }
    return TDDP_OK;
}

tddp_status tddp_shm_rndv_recv(tddp_shm *shm, tddp_shm_request *self)
{
    size_t bytes = tddp_buffer_bytes(&self->op->output);
    char *data = self->op->output.data;
    uint64_t offset = self->rndv->offset;
    tddp_status status = TDDP_OK;
    bool complete = false;
    if (offset != TDDP_SHM_NOT_SHARED &&
        transition(self, TDDP_SHM_RNDV_RTS, TDDP_SHM_RNDV_COPYING)) {
        tddp_arith_copy(data, tddp_shm_address(shm, self->peer, offset), bytes,
                        bytes > tddp_shm_cache_bytes(shm));
        complete = transition(self, TDDP_SHM_RNDV_COPYING, TDDP_SHM_RNDV_COMPLETE);
    } else if (offset == TDDP_SHM_NOT_SHARED) {
        if (transition(self, TDDP_SHM_RNDV_RTS, TDDP_SHM_RNDV_CTS)) {
            tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
        }
        status = tddp_shm_request_wait(shm, self, is_streaming_or_canceled);
        if (status == TDDP_OK && state_of(self) == TDDP_SHM_RNDV_STREAMING) {
            status = stream_in(shm, self);
        }
        if (status == TDDP_CANCELED) {
            return status;
        }
        complete =
            status == TDDP_OK && transition(self, TDDP_SHM_RNDV_STREAMING, TDDP_SHM_RNDV_COMPLETE);
    }
    if (complete) {
        tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
        return TDDP_OK;
    }
    cancel(shm, self);
    return status ? status : fail_canceled(shm, self);
}

void tddp_shm_rndv_reject(tddp_shm *shm, tddp_shm_request *self)
{
    self->rndv->count = self->op->output.count;
    self->rndv->dtype = (uint32_t)self->op->output.dtype;
    (void)transition(self, TDDP_SHM_RNDV_RTS, TDDP_SHM_RNDV_REJECTED);
    tddp_eventcount_notify(tddp_shm_events(shm, self->peer));
}
