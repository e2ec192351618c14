/*
 * Pieces that go through staging, chunk after chunk. On the thread that runs the operation.
 *
 * Each piece has an area of its giver's staging, which holds the last few chunks of it and stays in
 * the cache. The first one is there when the giver enters.
 *
 * Steps: who has published t has staged its chunks up to t and taken those up to t - 2; a chunk's
 * place is used again when its taker has said so. So the next chunk is staged before the one at
 * hand is taken, and ranks of about one speed do not wait for each other.
 */
#include "backend/arith/arith.h"
#include "backend/shm/exchange.h"

enum {
    LINE = 64,
    PAGE = 4096,
    CHUNK_MOST = 64 * 1024, /* measured with two ranks on two cores: */
    CHUNK_LEAST = 8 * 1024, /* a few chunks fit into the inner caches of both */
    CHUNKS = 4,             /* so many at least in a piece, if they are not too small */
    DEPTH = 4,              /* chunks that an area holds, at least, */
    DEPTH_MOST = 8,         /* and at most */
};

/* How a piece is cut. */
typedef struct cut {
    size_t bytes;
    size_t chunk;
    size_t depth;
} cut;

/* --- chunks ---------------------------------------------------------------------------------- */

static cut cut_of(const tddp_shm_moves *self, size_t bytes)
{
    size_t most = self->area / DEPTH / LINE * LINE;
    size_t chunk = (bytes / CHUNKS + PAGE - 1) / PAGE * PAGE;
    chunk = chunk < CHUNK_LEAST ? CHUNK_LEAST : chunk > CHUNK_MOST ? CHUNK_MOST : chunk;
    chunk = chunk > most ? most : chunk;
    size_t depth = self->area / chunk;
    return (cut){bytes, chunk, depth > DEPTH_MOST ? DEPTH_MOST : depth};
}

/* How many steps the piece takes. */
static size_t steps_of(const cut *of)
{
    return (of->bytes + of->chunk - 1) / of->chunk;
}

static size_t start_of(const cut *of, size_t step)
{
    return (step - 1) * of->chunk;
}

static size_t length_of(const cut *of, size_t step)
{
    size_t left = of->bytes - start_of(of, step);
    return left < of->chunk ? left : of->chunk;
}

static char *place_in_staging(const tddp_shm_moves *self, int giver, int taker, const cut *of,
                              size_t step)
{
    char *half = giver == self->rank ? self->half : tddp_shm_staging(self->shm, giver);
    return half + (size_t)tddp_shm_piece_index(self, giver, taker) * self->area +
           (step - 1) % of->depth * of->chunk;
}

/* The chunks of this rank's piece for the peer; none if it goes another way. */
static cut staged_for(const tddp_shm_moves *self, int peer, tddp_buffer *piece)
{
    *piece = tddp_shm_given_to(self, peer);
    return cut_of(self, tddp_shm_gives_staged(self, piece) ? tddp_shm_bytes_of(piece) : 0);
}

static cut staged_by(const tddp_shm_moves *self, int peer, tddp_buffer *piece)
{
    *piece = tddp_shm_wanted_from(self, peer);
    return cut_of(self, tddp_shm_gets_staged(self, peer, piece) ? tddp_shm_bytes_of(piece) : 0);
}

bool tddp_shm_stages_own(const tddp_shm_moves *self)
{
    if (!self->pattern->whole || self->size == 1) {
        return false;
    }
    tddp_buffer own = tddp_shm_given_to(self, self->rank);
    tddp_buffer place = tddp_shm_wanted_from(self, self->rank);
    tddp_buffer piece = tddp_shm_given_to(self, tddp_shm_peer_after(self, 1));
    return place.count > 0 && own.data != place.data && own.data == piece.data &&
           tddp_shm_gives_staged(self, &piece);
}

/* Copies the chunks of one step into staging; they have room there. */
static void stage(const tddp_shm_moves *self, size_t step)
{
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer piece;
        cut of = staged_for(self, peer, &piece);
        if (step > steps_of(&of)) {
            continue;
        }
        size_t start = start_of(&of, step);
        size_t bytes = length_of(&of, step);
        const char *from = (const char *)piece.data + start;
        tddp_arith_copy(place_in_staging(self, self->rank, peer, &of, step), from, bytes, false);
        if (tddp_shm_stages_own(self)) {
            /* While it is in the cache. */
            tddp_buffer own = tddp_shm_wanted_from(self, self->rank);
            tddp_arith_copy((char *)own.data + start, from, bytes, self->streaming);
        }
        if (self->pattern->whole) {
            return;
        }
    }
}

void tddp_shm_stage_first(const tddp_shm_moves *self)
{
    stage(self, 1);
}

/* Waits until there is room for the chunks of a step. */
static tddp_status await_room(const tddp_shm_moves *self, size_t step)
{
    tddp_status status = TDDP_OK;
    for (int i = 1; i < self->size && status == TDDP_OK; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer piece;
        cut of = staged_for(self, peer, &piece);
        if (step <= steps_of(&of) && step > of.depth) {
            status = tddp_shm_await(self->shm, peer, (uint32_t)(step - of.depth + 2));
        }
    }
    return status;
}

/* Takes the chunks of one step from all who have one. Done again from its beginning if a wait was
 * cancelled: nothing is overwritten before this rank has published that it has taken it. */
static tddp_status take(const tddp_shm_moves *self, size_t step)
{
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer piece;
        cut of = staged_by(self, peer, &piece);
        if (step > steps_of(&of)) {
            continue;
        }
        tddp_status status = step > 1 ? tddp_shm_await(self->shm, peer, (uint32_t)step) : TDDP_OK;
        if (status) {
            return status;
        }
        tddp_arith_copy((char *)piece.data + start_of(&of, step),
                        place_in_staging(self, peer, self->rank, &of, step), length_of(&of, step),
                        self->streaming);
    }
    return TDDP_OK;
}

size_t tddp_shm_count_steps(const tddp_shm_moves *self)
{
    size_t most = 0;
    for (int i = 1; i < self->size; i++) {
        tddp_buffer piece;
        cut out = staged_for(self, tddp_shm_peer_after(self, i), &piece);
        cut in = staged_by(self, tddp_shm_peer_after(self, i), &piece);
        most = steps_of(&out) > most ? steps_of(&out) : most;
        most = steps_of(&in) > most ? steps_of(&in) : most;
    }
    return most;
}

/* Stages the chunks of a step, when there is room. */
static tddp_status stage_next(const tddp_shm_moves *self, size_t step)
{
    tddp_status status = await_room(self, step);
    if (status == TDDP_OK) {
        stage(self, step);
        tddp_shm_publish(self->shm, (uint32_t)step);
    }
    return status;
}

/* The course is at twice the number of the steps that are over, and one more when the next step's
 * successor is staged. */
tddp_status tddp_shm_move_chunks(const tddp_shm_moves *self)
{
    size_t *at = &self->course->at;
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
            status = take(self, step);
        }
        if (status) {
            return status;
        }
        ++*at;
    }
    return TDDP_OK;
}
