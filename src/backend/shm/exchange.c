/*
 * Moves parts from ranks to other ranks, for the collectives that don't reduce. Runs on the
 * operation's thread.
 *
 * Sender and receiver select the same algorithm for a part. Inline: the part travels with the call,
 * if it is small and the sender's only one. Direct: the sender's call has the part's offset in its
 * segment, and the receiver copies from there; the sender waits until it has. Staged: through the
 * sender's staging, by staged_exchange.c. A broadcast in registered memory may also be sliced: each
 * rank, the root included, writes a slice to all others.
 *
 * Invariant: no rank returns while others still read or write its memory.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/exchange.h"

enum {
    LINE = 64,
    PAGE = 4096,
    MAX_TABLE = TDDP_SHM_PAYLOAD_BYTES / 8,
    DIRECT_MIN_BYTES = 16 * 1024, /* below this a copy is cheaper than waiting for the receiver */
    SLICED_MIN_BYTES = 64 * 1024, /* the same for two waits */
    SLICE_CHUNK = 64 * 1024,      /* read once from memory, then from the cache */
};

/* The stages of an operation. */
enum { STAGE_START, STAGE_SYNC, STAGE_TRANSFER, STAGE_WAIT_PEERS };

/* --- algorithms of a part -------------------------------------------------------------------- */

static bool is_forced(const tddp_shm_transfer *self, tddp_shm_algorithm algorithm)
{
    return self->forced == 1 + (int)algorithm;
}

static bool is_inline(const tddp_shm_transfer *self, size_t bytes)
{
    return self->single_part && bytes <= TDDP_SHM_PAYLOAD_BYTES &&
           (!self->forced || is_forced(self, TDDP_SHM_INLINE));
}

/* The offset that the sender publishes for a part that isn't inline. */
static uint64_t direct_offset(const tddp_shm_transfer *self, const tddp_buffer *part)
{
    size_t bytes = tddp_buffer_bytes(part);
    bool direct = self->forced
                      ? is_forced(self, TDDP_SHM_DIRECT) || is_forced(self, TDDP_SHM_SLICED)
                      : bytes >= DIRECT_MIN_BYTES;
    return bytes > 0 && direct ? tddp_shm_offset_of(self->shm, part->data, bytes)
                               : TDDP_SHM_NOT_SHARED;
}

/* The offset that a sender published for this rank's part. */
static uint64_t peer_offset(const tddp_shm_transfer *self, int sender)
{
    uint64_t offset;
    const char *table = tddp_shm_payload(self->shm, sender);
    memcpy(&offset, table + (size_t)tddp_shm_part_index(self, sender, self->rank) * sizeof offset,
           sizeof offset);
    return offset;
}

bool tddp_shm_sends_staged(const tddp_shm_transfer *self, const tddp_buffer *part)
{
    size_t bytes = tddp_buffer_bytes(part);
    return bytes > 0 && !is_inline(self, bytes) && direct_offset(self, part) == TDDP_SHM_NOT_SHARED;
}

bool tddp_shm_receives_staged(const tddp_shm_transfer *self, int sender, const tddp_buffer *part)
{
    size_t bytes = tddp_buffer_bytes(part);
    return bytes > 0 && !is_inline(self, bytes) && peer_offset(self, sender) == TDDP_SHM_NOT_SHARED;
}

/* --- the operation --------------------------------------------------------------------------- */

/* The one part that this rank sends to all its receivers. */
static tddp_buffer shared_part(const tddp_shm_transfer *self)
{
    tddp_buffer part = {.data = NULL};
    for (int i = 1; i < self->size && part.count == 0; i++) {
        part = tddp_shm_send_part(self, tddp_shm_peer_after(self, i));
    }
    return part;
}

static void enter(const tddp_shm_transfer *self)
{
    if (self->single_part) {
        tddp_buffer part = shared_part(self);
        size_t bytes = tddp_buffer_bytes(&part);
        if (is_inline(self, bytes)) {
            tddp_shm_enter(self->shm, self->op, part.data, bytes);
        } else {
            uint64_t offset = direct_offset(self, &part);
            tddp_shm_enter(self->shm, self->op, &offset, sizeof offset);
        }
        return;
    }
    uint64_t table[MAX_TABLE];
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer part = tddp_shm_send_part(self, peer);
        table[tddp_shm_part_index(self, self->rank, peer)] = direct_offset(self, &part);
    }
    tddp_shm_enter(self->shm, self->op, table, (size_t)(self->size - 1) * sizeof *table);
}

/* Copies this rank's part for itself. */
static void copy_local(const tddp_shm_transfer *self, const tddp_buffer *local,
                       const tddp_buffer *target)
{
    size_t bytes = tddp_buffer_bytes(target);
    if (bytes > 0 && local->data != target->data && !tddp_shm_copies_local_while_staging(self)) {
        tddp_arith_copy(target->data, local->data, bytes, self->streaming);
    }
}

/* Copies all inline and direct parts. Returns whether there were direct ones: their senders wait
 * for this rank. */
static bool receive_unstaged(const tddp_shm_transfer *self)
{
    bool direct = false;
    for (int i = 1; i < self->size; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer part = tddp_shm_recv_part(self, peer);
        size_t bytes = tddp_buffer_bytes(&part);
        if (bytes == 0) {
            continue;
        }
        if (is_inline(self, bytes)) {
            tddp_arith_copy(part.data, tddp_shm_payload(self->shm, peer), bytes, false);
            continue;
        }
        uint64_t offset = peer_offset(self, peer);
        if (offset != TDDP_SHM_NOT_SHARED) {
            tddp_arith_copy(part.data, tddp_shm_address(self->shm, peer, offset), bytes,
                            self->streaming);
            direct = true;
        }
    }
    return direct;
}

/* Whether each rank writes a slice of the root's memory to all others, instead of reading all of
 * it. */
static bool is_sliced(const tddp_shm_transfer *self)
{
    size_t bytes = tddp_buffer_bytes(&self->op->input);
    bool worthwhile =
        self->forced ? is_forced(self, TDDP_SHM_SLICED) && bytes > 0 : bytes >= SLICED_MIN_BYTES;
    return worthwhile && self->op->kind == TDDP_OP_BROADCAST && self->size > 1 &&
           tddp_shm_all_inputs(self->shm);
}

static void broadcast_slice(const tddp_shm_transfer *self)
{
    size_t bytes = tddp_buffer_bytes(&self->op->input);
    size_t each = (bytes / (size_t)self->size + PAGE - 1) / PAGE * PAGE;
    size_t slice_start = each * (size_t)self->rank < bytes ? each * (size_t)self->rank : bytes;
    size_t slice_end =
        bytes - slice_start < each || self->rank == self->size - 1 ? bytes : slice_start + each;
    const char *root = tddp_shm_input(self->shm, self->op->root);
    for (size_t at = slice_start; at < slice_end; at += SLICE_CHUNK) {
        size_t length = slice_end - at < SLICE_CHUNK ? slice_end - at : SLICE_CHUNK;
        for (int peer = 0; peer < self->size; peer++) {
            if (peer != self->op->root) {
                tddp_arith_copy((char *)tddp_shm_output(self->shm, peer) + at, root + at, length,
                                self->streaming);
            }
        }
    }
}

/* Waits for the ranks that read this rank's parts in place, or write its output. */
static tddp_status wait_for_peers(const tddp_shm_transfer *self)
{
    if (is_sliced(self)) {
        return tddp_shm_wait_step_all(self->shm, TDDP_SHM_LAST_STEP);
    }
    tddp_status status = TDDP_OK;
    for (int i = 1; i < self->size && status == TDDP_OK; i++) {
        int peer = tddp_shm_peer_after(self, i);
        tddp_buffer part = tddp_shm_send_part(self, peer);
        if (!is_inline(self, tddp_buffer_bytes(&part)) &&
            direct_offset(self, &part) != TDDP_SHM_NOT_SHARED) {
            status = tddp_shm_wait_step(self->shm, peer, TDDP_SHM_LAST_STEP);
        }
    }
    return status;
}

static tddp_status prepare(tddp_shm_transfer *self)
{
    tddp_shm *shm = self->shm;
    self->cursor = tddp_shm_cursor_of(shm);
    self->forced = tddp_shm_choices_of(shm)->forced[self->op->kind];
    self->rank = tddp_shm_rank(shm);
    self->size = tddp_shm_size(shm);
    self->single_part = self->uniform || self->size == 2;
    size_t parts = self->single_part ? 1 : (size_t)self->size - 1;
    if (parts > MAX_TABLE) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s among %d ranks of one host: expected at most %d",
                         tddp_op_name(self->op->kind), self->size, MAX_TABLE + 1);
    }
    self->area = TDDP_SHM_STAGING_BYTES / (parts ? parts : 1) / LINE * LINE;
    self->staging = tddp_shm_entered(shm, self->op) ? tddp_shm_staging(shm, self->rank)
                                                    : tddp_shm_next_staging(shm);
    size_t moved = tddp_buffer_bytes(&self->op->input) + tddp_buffer_bytes(&self->op->output);
    self->streaming = moved > tddp_shm_cache_bytes(shm);
    return TDDP_OK;
}

/* Does what doesn't need the other ranks to have entered. */
static tddp_status start(const tddp_shm_transfer *self)
{
    tddp_buffer local = tddp_shm_send_part(self, self->rank);
    tddp_buffer target = tddp_shm_recv_part(self, self->rank);
    if (local.count != target.count) {
        /* Only an unchecked call can get here. */
        return tddp_fail(TDDP_MISMATCH, "%s: rank %d sends itself %zu elements and expects %zu",
                         tddp_op_name(self->op->kind), tddp_shm_rank_name(self->shm, self->rank),
                         local.count, target.count);
    }
    copy_local(self, &local, &target);
    self->cursor->stage = STAGE_SYNC;
    return TDDP_OK;
}

/* After the sync, when the algorithm of each part is known. */
static void start_transfer(const tddp_shm_transfer *self)
{
    size_t bytes = tddp_buffer_bytes(&self->op->input);
    if (is_sliced(self)) {
        tddp_shm_log_choice(self->shm, self->op->kind, bytes, TDDP_SHM_SLICED);
        broadcast_slice(self);
        tddp_shm_publish_step(self->shm, TDDP_SHM_LAST_STEP);
        self->cursor->stage = STAGE_WAIT_PEERS;
        return;
    }
    bool direct = receive_unstaged(self);
    bool staged = tddp_shm_count_steps(self) > 0;
    tddp_shm_log_choice(self->shm, self->op->kind, bytes,
                        staged   ? TDDP_SHM_STAGED
                        : direct ? TDDP_SHM_DIRECT
                                 : TDDP_SHM_INLINE);
    if (direct && !staged) {
        tddp_shm_publish_step(self->shm, TDDP_SHM_LAST_STEP);
    }
    self->cursor->stage = staged ? STAGE_TRANSFER : STAGE_WAIT_PEERS;
}

tddp_status tddp_shm_move(tddp_shm *shm, const tddp_op *op)
{
    tddp_shm_transfer self = {.shm = shm,
                              .op = op,
                              .uniform = op->kind == TDDP_OP_ALL_GATHER ||
                                         op->kind == TDDP_OP_GATHER ||
                                         op->kind == TDDP_OP_BROADCAST};
    tddp_status status = prepare(&self);
    if (status) {
        return status;
    }
    tddp_shm_cursor *cursor = self.cursor;
    if (!tddp_shm_entered(shm, op)) {
        tddp_shm_stage_first(&self);
    }
    enter(&self);
    if (cursor->stage == STAGE_START) {
        status = start(&self);
    }
    if (status == TDDP_OK && cursor->stage == STAGE_SYNC) {
        status = tddp_shm_sync(shm);
        if (status == TDDP_OK) {
            start_transfer(&self);
        }
    }
    if (status == TDDP_OK && cursor->stage == STAGE_TRANSFER) {
        status = tddp_shm_run_staged_exchange(&self);
        if (status == TDDP_OK) {
            tddp_shm_publish_step(shm, TDDP_SHM_LAST_STEP);
            cursor->stage = STAGE_WAIT_PEERS;
        }
    }
    return status ? status : wait_for_peers(&self);
}
