/*
 * Pieces of memory from ranks to others, for the collectives that only move data. On the thread
 * that runs the operation.
 *
 * A piece goes one of three ways, which its giver and its taker both know. Inline: with the call,
 * if it is small and the giver has no other. Direct: the giver's call says where in its segment the
 * piece lies, and the taker copies it from there; the giver waits until it has. Staged: through the
 * giver's staging, by chunks.c. A broadcast in registered memory goes a fourth way: sliced, each
 * rank writing a part of it to all others.
 *
 * Invariant: nobody returns while others still read its memory or write to it.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/exchange.h"

enum {
    LINE = 64,
    PAGE = 4096,
    MOST_TABLE = TDDP_SHM_PAYLOAD_BYTES / 8,
    DIRECT_FROM = 16 * 1024, /* below this a copy costs less than waiting for the taker */
    SLICED_FROM = 64 * 1024, /* the same for two waits */
    SLICE_CHUNK = 64 * 1024, /* read once from memory, then from the cache */
};

/* Where an operation is. */
enum { BEGINNING, MEETING, PASSING, LEAVING };

/* --- ways ------------------------------------------------------------------------------------ */

static bool is_forced(const tddp_shm_moves *self, tddp_shm_algorithm algorithm)
{
    return self->forced == 1 + (int)algorithm;
}

static bool is_inline(const tddp_shm_moves *self, size_t bytes)
{
    return self->alone && bytes <= TDDP_SHM_PAYLOAD_BYTES &&
           (!self->forced || is_forced(self, TDDP_SHM_INLINE));
}

/* What the giver says of a piece that does not come with its call. */
static uint64_t place_of(const tddp_shm_moves *self, const tddp_buffer *piece)
{
    size_t bytes = tddp_shm_bytes_of(piece);
    bool direct = self->forced
                      ? is_forced(self, TDDP_SHM_DIRECT) || is_forced(self, TDDP_SHM_SLICED)
                      : bytes >= DIRECT_FROM;
    return bytes > 0 && direct ? tddp_shm_locate(self->shm, piece->data, bytes) : TDDP_SHM_NOWHERE;
}

/* What the giver has said of this rank's piece. */
static uint64_t told_place(const tddp_shm_moves *self, int giver)
{
    uint64_t place;
    const char *table = tddp_shm_payload(self->shm, giver);
    memcpy(&place, table + (size_t)tddp_shm_piece_index(self, giver, self->rank) * sizeof place,
           sizeof place);
    return place;
}

bool tddp_shm_gives_staged(const tddp_shm_moves *self, const tddp_buffer *piece)
{
    size_t bytes = tddp_shm_bytes_of(piece);
    return bytes > 0 && !is_inline(self, bytes) && place_of(self, piece) == TDDP_SHM_NOWHERE;
}

bool tddp_shm_gets_staged(const tddp_shm_moves *self, int giver, const tddp_buffer *piece)
{
    size_t bytes = tddp_shm_bytes_of(piece);
    return bytes > 0 && !is_inline(self, bytes) && told_place(self, giver) == TDDP_SHM_NOWHERE;
}

/* --- the operation --------------------------------------------------------------------------- */

/* The one piece that all get who get something. */
static tddp_buffer only_piece(const tddp_shm_moves *self)
{
    tddp_buffer piece = tddp_shm_nothing(self->op);
    for (int i = 1; i < self->size && piece.count == 0; i++) {
        piece = tddp_shm_given_to(self, tddp_shm_peer_after(self, i));
    }
    return piece;
}

static void enter(const tddp_shm_moves *self)
{
    if (self->alone) {
        tddp_buffer piece = only_piece(self);
        size_t bytes = tddp_shm_bytes_of(&piece);
        if (is_inline(self, bytes)) {
            tddp_shm_enter(self->shm, self->op, piece.data, bytes);
        } else {
            uint64_t place = place_of(self, &piece);
            tddp_shm_enter(self->shm, self->op, &place, sizeof place);
        }
        return;
    }
    uint64_t table[MOST_TABLE];
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer piece = tddp_shm_given_to(self, peer);
        table[tddp_shm_piece_index(self, self->rank, peer)] = place_of(self, &piece);
    }
    tddp_shm_enter(self->shm, self->op, table, (size_t)(self->size - 1) * sizeof *table);
}

/* What this rank gives itself. */
static void copy_own(const tddp_shm_moves *self, const tddp_buffer *own, const tddp_buffer *place)
{
    size_t bytes = tddp_shm_bytes_of(place);
    if (bytes > 0 && own->data != place->data && !tddp_shm_stages_own(self)) {
        tddp_arith_copy(place->data, own->data, bytes, self->streaming);
    }
}

/* Takes what came with calls, and what lies where it can be read. Whether there was such as lies
 * elsewhere: its givers wait for this rank. */
static bool take_at_once(const tddp_shm_moves *self)
{
    bool direct = false;
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer piece = tddp_shm_wanted_from(self, peer);
        size_t bytes = tddp_shm_bytes_of(&piece);
        if (bytes == 0) {
            continue;
        }
        if (is_inline(self, bytes)) {
            tddp_arith_copy(piece.data, tddp_shm_payload(self->shm, peer), bytes, false);
            continue;
        }
        uint64_t place = told_place(self, peer);
        if (place != TDDP_SHM_NOWHERE) {
            tddp_arith_copy(piece.data, tddp_shm_at(self->shm, peer, place), bytes,
                            self->streaming);
            direct = true;
        }
    }
    return direct;
}

/* Whether all write slices of the root's memory to all others, instead of each reading it all. */
static bool is_sliced(const tddp_shm_moves *self)
{
    size_t bytes = tddp_shm_bytes_of(&self->op->input);
    bool worth =
        self->forced ? is_forced(self, TDDP_SHM_SLICED) && bytes > 0 : bytes >= SLICED_FROM;
    return worth && self->pattern->spreads && self->size > 1 && tddp_shm_all_inputs(self->shm);
}

static void spread_slice(const tddp_shm_moves *self)
{
    size_t bytes = tddp_shm_bytes_of(&self->op->input);
    size_t each = (bytes / (size_t)self->size + PAGE - 1) / PAGE * PAGE;
    size_t start = each * (size_t)self->rank < bytes ? each * (size_t)self->rank : bytes;
    size_t end = bytes - start < each || self->rank == self->size - 1 ? bytes : start + each;
    const char *root = tddp_shm_input(self->shm, self->op->root);
    for (size_t at = start; at < end; at += SLICE_CHUNK) {
        size_t length = end - at < SLICE_CHUNK ? end - at : SLICE_CHUNK;
        for (int peer = 0; peer < self->size; peer++) {
            if (peer != self->op->root) {
                tddp_arith_copy((char *)tddp_shm_output(self->shm, peer) + at, root + at, length,
                                self->streaming);
            }
        }
    }
}

/* Waits for those who read where this rank's pieces lie, or write where its results do. */
static tddp_status leave(const tddp_shm_moves *self)
{
    if (is_sliced(self)) {
        return tddp_shm_await_all(self->shm, TDDP_SHM_LAST_STEP);
    }
    tddp_status status = TDDP_OK;
    for (int i = 1; i < self->size && status == TDDP_OK; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer piece = tddp_shm_given_to(self, peer);
        if (!is_inline(self, tddp_shm_bytes_of(&piece)) &&
            place_of(self, &piece) != TDDP_SHM_NOWHERE) {
            status = tddp_shm_await(self->shm, peer, TDDP_SHM_LAST_STEP);
        }
    }
    return status;
}

static tddp_status lay_out(tddp_shm_moves *self)
{
    tddp_shm *shm = self->shm;
    self->course = tddp_shm_course_of(shm);
    self->forced = tddp_shm_choices_of(shm)->forced[self->op->kind];
    self->rank = tddp_shm_rank(shm);
    self->size = tddp_shm_size(shm);
    self->alone = self->pattern->whole || self->size == 2;
    size_t pieces = self->alone ? 1 : (size_t)self->size - 1;
    if (pieces > MOST_TABLE) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s among %d ranks of one host: expected at most %d",
                         tddp_op_name(self->op->kind), self->size, MOST_TABLE + 1);
    }
    self->area = TDDP_SHM_STAGING_BYTES / (pieces ? pieces : 1) / LINE * LINE;
    self->half = tddp_shm_entered(shm, self->op) ? tddp_shm_staging(shm, self->rank)
                                                 : tddp_shm_staging_ahead(shm);
    size_t moved = tddp_shm_bytes_of(&self->op->input) + tddp_shm_bytes_of(&self->op->output);
    self->streaming = moved > tddp_shm_cache_bytes(shm);
    return TDDP_OK;
}

/* What can be done before the others have entered. */
static tddp_status begin(const tddp_shm_moves *self)
{
    tddp_buffer own = tddp_shm_given_to(self, self->rank);
    tddp_buffer place = tddp_shm_wanted_from(self, self->rank);
    if (own.count != place.count) {
        /* Only a caller that did not check can come here. */
        return tddp_fail(TDDP_MISMATCH, "%s: rank %d gives itself %zu elements and expects %zu",
                         tddp_op_name(self->op->kind), tddp_shm_name(self->shm, self->rank),
                         own.count, place.count);
    }
    copy_own(self, &own, &place);
    self->course->stage = MEETING;
    return TDDP_OK;
}

/* All have entered: how each piece goes is known. */
static void begin_taking(const tddp_shm_moves *self)
{
    size_t bytes = tddp_shm_bytes_of(&self->op->input);
    if (is_sliced(self)) {
        tddp_shm_chose(self->shm, self->op->kind, bytes, TDDP_SHM_SLICED);
        spread_slice(self);
        tddp_shm_publish(self->shm, TDDP_SHM_LAST_STEP);
        self->course->stage = LEAVING;
        return;
    }
    bool direct = take_at_once(self);
    bool staged = tddp_shm_count_steps(self) > 0;
    tddp_shm_chose(self->shm, self->op->kind, bytes,
                   staged   ? TDDP_SHM_STAGED
                   : direct ? TDDP_SHM_DIRECT
                            : TDDP_SHM_INLINE);
    if (direct && !staged) {
        tddp_shm_publish(self->shm, TDDP_SHM_LAST_STEP);
    }
    self->course->stage = staged ? PASSING : LEAVING;
}

tddp_status tddp_shm_exchange(tddp_shm *shm, const tddp_op *op, const tddp_shm_pattern *pattern)
{
    tddp_shm_moves self = {.shm = shm, .op = op, .pattern = pattern};
    tddp_status status = lay_out(&self);
    if (status) {
        return status;
    }
    tddp_shm_course *course = self.course;
    if (!tddp_shm_entered(shm, op)) {
        tddp_shm_stage_first(&self);
    }
    enter(&self);
    if (course->stage == BEGINNING) {
        status = begin(&self);
    }
    if (status == TDDP_OK && course->stage == MEETING) {
        status = tddp_shm_meet(shm);
        if (status == TDDP_OK) {
            begin_taking(&self);
        }
    }
    if (status == TDDP_OK && course->stage == PASSING) {
        status = tddp_shm_move_chunks(&self);
        if (status == TDDP_OK) {
            tddp_shm_publish(shm, TDDP_SHM_LAST_STEP);
            course->stage = LEAVING;
        }
    }
    return status ? status : leave(&self);
}
