/*
 * Parts that go through staging, in chunks. Runs on the operation's thread.
 *
 * Each part has an area of its sender's staging, which holds the last few chunks and stays in the
 * cache. The first chunk is there when the sender enters.
 *
 * Steps: a rank that has published t has staged its chunks up to t and received those up to t - 2.
 * A chunk's place is reused once its receiver has published that. So a rank stages the next chunk
 * before it receives the current one, and ranks of about equal speed don't wait for each other.
 */
#include "backend/arith/arith.h"
#include "backend/shm/exchange.h"

enum {
    LINE = 64,
    PAGE = 4096,
    MAX_CHUNK = 64 * 1024, /* measured with two ranks on two cores: */
    MIN_CHUNK = 8 * 1024,  /* a few chunks fit into the inner caches of both */
    MIN_CHUNKS = 4,        /* of a part, unless they'd be too small */
    MIN_DEPTH = 4,         /* chunks in an area, at least */
    MAX_DEPTH = 8,         /* and at most */
};

/* How a part is divided. */
typedef struct chunking {
    size_t bytes;
    size_t chunk;
    size_t depth;
} chunking;

/* --- chunks ---------------------------------------------------------------------------------- */

static chunking chunking_of(const tddp_shm_transfer *self, size_t bytes)
{
    size_t max = self->area / MIN_DEPTH / LINE * LINE;
    size_t chunk = (bytes / MIN_CHUNKS + PAGE - 1) / PAGE * PAGE;
    chunk = chunk < MIN_CHUNK ? MIN_CHUNK : chunk > MAX_CHUNK ? MAX_CHUNK : chunk;
    chunk = chunk > max ? max : chunk;
    size_t depth = self->area / chunk;
    return (chunking){bytes, chunk, depth > MAX_DEPTH ? MAX_DEPTH : depth};
}

/* The number of steps of a part. */
static size_t step_count(const chunking *cut)
{
    return (cut->bytes + cut->chunk - 1) / cut->chunk;
}

static size_t chunk_start(const chunking *cut, size_t step)
{
    return (step - 1) * cut->chunk;
}

static size_t chunk_length(const chunking *cut, size_t step)
{
    size_t left = cut->bytes - chunk_start(cut, step);
    return left < cut->chunk ? left : cut->chunk;
}

static char *staging_address(const tddp_shm_transfer *self, int sender, int receiver,
                             const chunking *cut, size_t step)
{
    char *staging = sender == self->rank ? self->staging : tddp_shm_staging(self->shm, sender);
    return staging + (size_t)tddp_shm_part_index(self, sender, receiver) * self->area +
           (step - 1) % cut->depth * cut->chunk;
}

/* The chunks of this rank's part for the peer; none if it isn't staged. */
static chunking staged_send(const tddp_shm_transfer *self, int peer, tddp_buffer *part)
{
    *part = tddp_shm_send_part(self, peer);
    return chunking_of(self, tddp_shm_sends_staged(self, part) ? tddp_buffer_bytes(part) : 0);
}

static chunking staged_recv(const tddp_shm_transfer *self, int peer, tddp_buffer *part)
{
    *part = tddp_shm_recv_part(self, peer);
    return chunking_of(self,
                       tddp_shm_receives_staged(self, peer, part) ? tddp_buffer_bytes(part) : 0);
}

bool tddp_shm_copies_local_while_staging(const tddp_shm_transfer *self)
{
    if (!self->uniform || self->size == 1) {
        return false;
    }
    tddp_buffer local = tddp_shm_send_part(self, self->rank);
    tddp_buffer target = tddp_shm_recv_part(self, self->rank);
    tddp_buffer part = tddp_shm_send_part(self, tddp_shm_peer_after(self, 1));
    return target.count > 0 && local.data != target.data && local.data == part.data &&
           tddp_shm_sends_staged(self, &part);
}

/* Copies the chunks of one step to staging, which must have space. */
static void stage_step(const tddp_shm_transfer *self, size_t step)
{
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer part;
        chunking cut = staged_send(self, peer, &part);
        if (step > step_count(&cut)) {
            continue;
        }
        size_t start = chunk_start(&cut, step);
        size_t bytes = chunk_length(&cut, step);
        const char *from = (const char *)part.data + start;
        tddp_arith_copy(staging_address(self, self->rank, peer, &cut, step), from, bytes, false);
        if (tddp_shm_copies_local_while_staging(self)) {
            /* While it is in the cache. */
            tddp_buffer local = tddp_shm_recv_part(self, self->rank);
            tddp_arith_copy((char *)local.data + start, from, bytes, self->streaming);
        }
        if (self->uniform) {
            return;
        }
    }
}

void tddp_shm_stage_first(const tddp_shm_transfer *self)
{
    stage_step(self, 1);
}

/* Waits until staging has space for the chunks of a step. */
static tddp_status wait_for_space(const tddp_shm_transfer *self, size_t step)
{
    tddp_status status = TDDP_OK;
    for (int i = 1; i < self->size && status == TDDP_OK; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer part;
        chunking cut = staged_send(self, peer, &part);
        if (step <= step_count(&cut) && step > cut.depth) {
            status = tddp_shm_wait_step(self->shm, peer, (uint32_t)(step - cut.depth + 2));
        }
    }
    return status;
}

/* Receives the chunks of one step from all senders. Starts over if a wait was canceled: the
 * senders overwrite nothing before this rank publishes that it has received it. */
static tddp_status receive_step(const tddp_shm_transfer *self, size_t step)
{
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer part;
        chunking cut = staged_recv(self, peer, &part);
        if (step > step_count(&cut)) {
            continue;
        }
        tddp_status status =
            step > 1 ? tddp_shm_wait_step(self->shm, peer, (uint32_t)step) : TDDP_OK;
        if (status) {
            return status;
        }
        tddp_arith_copy((char *)part.data + chunk_start(&cut, step),
                        staging_address(self, peer, self->rank, &cut, step),
                        chunk_length(&cut, step), self->streaming);
    }
    return TDDP_OK;
}

size_t tddp_shm_count_steps(const tddp_shm_transfer *self)
{
    size_t max = 0;
    for (int i = 1; i < self->size; i++) {
        tddp_buffer part;
        chunking out = staged_send(self, tddp_shm_peer_after(self, i), &part);
        chunking in = staged_recv(self, tddp_shm_peer_after(self, i), &part);
        max = step_count(&out) > max ? step_count(&out) : max;
        max = step_count(&in) > max ? step_count(&in) : max;
    }
    return max;
}

/* Stages the chunks of a step, once there is space. */
static tddp_status stage_next(const tddp_shm_transfer *self, size_t step)
{
    tddp_status status = wait_for_space(self, step);
    if (status == TDDP_OK) {
        stage_step(self, step);
        tddp_shm_publish_step(self->shm, (uint32_t)step);
    }
    return status;
}

/* The cursor is twice the number of finished steps, plus one when the chunks after the next
 * step's are staged. */
tddp_status tddp_shm_run_staged_exchange(const tddp_shm_transfer *self)
{
    size_t *at = &self->cursor->index;
    size_t count = tddp_shm_count_steps(self);
    if (count >= TDDP_SHM_LAST_STEP) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s in %zu chunks among %d ranks: expected less than %d",
                         tddp_op_name(self->op->kind), count, self->size, TDDP_SHM_LAST_STEP);
    }
    while (*at < 2 * count) {
        size_t step = *at / 2 + 1;
        tddp_status status = TDDP_OK;
        if (*at % 2 == 0) {
            status = step < count ? stage_next(self, step + 1) : TDDP_OK;
        } else {
            status = receive_step(self, step);
        }
        if (status) {
            return status;
        }
        ++*at;
    }
    return TDDP_OK;
}
