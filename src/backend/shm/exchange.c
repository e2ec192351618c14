/*
 * Moves parts from ranks to other ranks, for the collectives that don't reduce. Runs on the
 * operation's thread; can be left at any wait and resumed.
 *
 * Sender and receiver select the same algorithm for a part. Inline: the part travels with the call,
 * if it is small and the sender's only one. Direct: the sender's call has the part's offset in its
 * segment, and the receiver copies from there; the sender waits until it has. Staged: through the
 * sender's staging, in chunks. A broadcast in registered memory may also be sliced: each rank, the
 * root included, writes a slice to all others.
 *
 * Each staged part has an area of its sender's staging, which holds the last few chunks and stays
 * in the cache. The first chunk is there when the sender enters. A rank that has published step t
 * has staged its chunks up to t and received those up to t - 2. A chunk's place is reused once its
 * receiver has published that. So a rank stages the next chunk before it receives the current one,
 * and ranks of about equal speed don't wait for each other.
 *
 * Invariant: no rank returns while others still read or write its memory.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/algorithms.h"

enum {
    LINE = 64,
    PAGE = 4096,
    MAX_TABLE = TDDP_SHM_PAYLOAD_BYTES / 8,
    LAST_STEP = (1 << 24) - 1,    /* of a rank that has finished */
    DIRECT_MIN_BYTES = 16 * 1024, /* below this a copy is cheaper than waiting for the receiver */
    SLICED_MIN_BYTES = 64 * 1024, /* the same for two waits */
    SLICE_CHUNK = 64 * 1024,      /* read once from memory, then from the cache */
    MAX_CHUNK = 64 * 1024,        /* staged; measured with two ranks on two cores: */
    MIN_CHUNK = 8 * 1024,         /* a few chunks fit into the inner caches of both */
    MIN_CHUNKS = 4,               /* of a part, unless they'd be too small */
    MIN_DEPTH = 4,                /* chunks in an area, at least */
    MAX_DEPTH = 8,                /* and at most */
};

/* The stages of an operation. */
enum { STAGE_START, STAGE_SYNC, STAGE_TRANSFER, STAGE_WAIT_PEERS };

/* This rank's view of a running operation. */
typedef struct transfer {
    tddp_shm *shm;
    const tddp_op *op;
    tddp_shm_cursor *cursor;
    int forced; /* by TDDP_SHM_ALGORITHM: 1 + tddp_shm_algorithm, or 0 */
    int rank;
    int size;
    bool uniform;     /* a sender sends the same part to all its receivers */
    bool single_part; /* a sender has one part, for one or all receivers */
    bool streaming;   /* more is written than fits into the cache */
    char *staging;    /* this rank's staging half */
    size_t area;      /* its bytes for each part */
} transfer;

/* What one rank sends to another one. */
typedef struct part {
    char *data; /* this rank's memory */
    size_t bytes;
    tddp_shm_algorithm algorithm;
    size_t index;    /* among those of its sender */
    uint64_t offset; /* direct: in the sender's segment; else TDDP_SHM_NOT_SHARED */
    /* Staged; else there are no steps. */
    char *area;
    size_t chunk;
    size_t depth; /* chunks in the area */
    size_t steps;
} part;

/* --- parts ----------------------------------------------------------------------------------- */

static bool is_forced(const transfer *self, tddp_shm_algorithm algorithm)
{
    return self->forced == 1 + (int)algorithm;
}

static bool is_inline(const transfer *self, size_t bytes)
{
    return self->single_part && bytes <= TDDP_SHM_PAYLOAD_BYTES &&
           (!self->forced || is_forced(self, TDDP_SHM_INLINE));
}

/* The offset that this rank publishes for a part that it sends. */
static uint64_t direct_offset(const transfer *self, const part *it)
{
    bool direct = self->forced
                      ? is_forced(self, TDDP_SHM_DIRECT) || is_forced(self, TDDP_SHM_SLICED)
                      : it->bytes >= DIRECT_MIN_BYTES;
    return direct ? tddp_shm_offset_of(self->shm, it->data, it->bytes) : TDDP_SHM_NOT_SHARED;
}

/* The offset that a sender published for this rank's part. */
static uint64_t published_offset(const transfer *self, int sender, size_t index)
{
    uint64_t offset;
    const char *table = tddp_shm_payload(self->shm, sender);
    memcpy(&offset, table + index * sizeof offset, sizeof offset);
    return offset;
}

static void divide(const transfer *self, part *it)
{
    const size_t max = self->area / MIN_DEPTH / LINE * LINE;
    const size_t chunk = (it->bytes / MIN_CHUNKS + PAGE - 1) / PAGE * PAGE;
    it->chunk = chunk < MIN_CHUNK ? MIN_CHUNK : chunk > MAX_CHUNK ? MAX_CHUNK : chunk;
    it->chunk = it->chunk > max ? max : it->chunk;
    it->depth = self->area / it->chunk;
    it->depth = it->depth > MAX_DEPTH ? MAX_DEPTH : it->depth;
    it->steps = (it->bytes + it->chunk - 1) / it->chunk;
}

/* A part that this rank sends, or that it receives; the latter only after the sync. */
static part part_of(const transfer *self, int sender, int receiver)
{
    const bool sends = sender == self->rank;
    const tddp_buffer buffer = sends ? tddp_op_sends(self->op, sender, receiver)
                                     : tddp_op_receives(self->op, receiver, sender);
    part it = {.data = buffer.data,
               .bytes = tddp_buffer_bytes(&buffer),
               .algorithm = TDDP_SHM_INLINE,
               .offset = TDDP_SHM_NOT_SHARED};
    if (!self->single_part) {
        it.index = (size_t)(receiver < sender ? receiver : receiver - 1);
    }
    if (it.bytes == 0 || is_inline(self, it.bytes)) {
        return it;
    }
    it.offset = sends ? direct_offset(self, &it) : published_offset(self, sender, it.index);
    it.algorithm = it.offset == TDDP_SHM_NOT_SHARED ? TDDP_SHM_STAGED : TDDP_SHM_DIRECT;
    if (it.algorithm == TDDP_SHM_STAGED) {
        divide(self, &it);
        it.area = (sends ? self->staging : (char *)tddp_shm_staging(self->shm, sender)) +
                  it.index * self->area;
    }
    return it;
}

/* The peers in rotated order: each rank starts with its successor. */
static int peer_after(const transfer *self, int distance)
{
    return (self->rank + distance) % self->size;
}

static part part_sent(const transfer *self, int distance)
{
    return part_of(self, self->rank, peer_after(self, distance));
}

static part part_received(const transfer *self, int distance)
{
    return part_of(self, peer_after(self, distance), self->rank);
}

/* --- staged parts ---------------------------------------------------------------------------- */

/* Copies a chunk, of a step from 1, between a part and its area. */
static void copy_chunk(const part *it, size_t step, char *into, const char *from, bool streaming)
{
    const size_t left = it->bytes - (step - 1) * it->chunk;
    tddp_arith_copy(into, from, left < it->chunk ? left : it->chunk, streaming);
}

static char *in_area(const part *it, size_t step)
{
    return it->area + (step - 1) % it->depth * it->chunk;
}

/* Whether the rank's part for itself is copied while it is staged, and in the cache. */
static bool stages_local(const transfer *self)
{
    return self->uniform && self->size > 1 && part_sent(self, 1).algorithm == TDDP_SHM_STAGED;
}

/* Copies this rank's chunks of a step to staging, once there is space; at once in the first. */
static tddp_status stage_step(const transfer *self, size_t step)
{
    for (int i = 1; i < self->size; i++) {
        const part it = part_sent(self, i);
        if (step <= it.steps && step > it.depth) {
            tddp_status status =
                tddp_shm_wait_step(self->shm, peer_after(self, i), (uint32_t)(step - it.depth + 2));
            if (status) {
                return status;
            }
        }
    }
    bool staged = false;
    for (int i = 1; i < self->size && !(staged && self->uniform); i++) {
        const part it = part_sent(self, i);
        staged = step <= it.steps;
        if (staged) {
            const char *from = it.data + (step - 1) * it.chunk;
            copy_chunk(&it, step, in_area(&it, step), from, false);
            const tddp_buffer local = tddp_op_receives(self->op, self->rank, self->rank);
            if (self->uniform && local.count > 0) {
                char *into = (char *)local.data + (step - 1) * it.chunk;
                copy_chunk(&it, step, into, from, self->streaming);
            }
        }
    }
    return TDDP_OK;
}

/* Receives the chunks of one step from all senders. Starts over if a wait was canceled: the
 * senders overwrite nothing before this rank publishes that it has received it. */
static tddp_status receive_step(const transfer *self, size_t step)
{
    for (int i = 1; i < self->size; i++) {
        const part it = part_received(self, i);
        if (step > it.steps) {
            continue;
        }
        tddp_status status =
            step > 1 ? tddp_shm_wait_step(self->shm, peer_after(self, i), (uint32_t)step) : TDDP_OK;
        if (status) {
            return status;
        }
        copy_chunk(&it, step, it.data + (step - 1) * it.chunk, in_area(&it, step), self->streaming);
    }
    return TDDP_OK;
}

/* The number of steps in which this rank sends or receives. */
static size_t count_steps(const transfer *self)
{
    size_t max = 0;
    for (int i = 1; i < self->size; i++) {
        const size_t out = part_sent(self, i).steps;
        const size_t in = part_received(self, i).steps;
        max = out > max ? out : max;
        max = in > max ? in : max;
    }
    return max;
}

/* The cursor is twice the number of finished steps, plus one when the chunks after the next
 * step's are staged. */
static tddp_status run_steps(const transfer *self)
{
    size_t *at = &self->cursor->index;
    const size_t count = count_steps(self);
    if (count >= LAST_STEP) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s in %zu chunks among %d ranks: expected less than %d",
                         tddp_op_name(self->op->kind), count, self->size, LAST_STEP);
    }
    for (; *at < 2 * count; ++*at) {
        const size_t step = *at / 2 + 1;
        const bool stages = *at % 2 == 0;
        tddp_status status = !stages        ? receive_step(self, step)
                             : step < count ? stage_step(self, step + 1)
                                            : TDDP_OK;
        if (status) {
            return status;
        }
        if (stages && step < count) {
            tddp_shm_publish_step(self->shm, (uint32_t)(step + 1));
        }
    }
    return TDDP_OK;
}

/* --- sliced broadcasts ----------------------------------------------------------------------- */

/* Whether each rank writes a slice of the root's memory to all others, instead of reading all of
 * it. */
static bool is_sliced(const transfer *self)
{
    size_t bytes = tddp_buffer_bytes(&self->op->input);
    bool worthwhile =
        self->forced ? is_forced(self, TDDP_SHM_SLICED) && bytes > 0 : bytes >= SLICED_MIN_BYTES;
    return worthwhile && self->op->kind == TDDP_OP_BROADCAST && self->size > 1 &&
           tddp_shm_all_inputs(self->shm);
}

static void broadcast_slice(const transfer *self)
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

/* --- the operation --------------------------------------------------------------------------- */

static tddp_status prepare(transfer *self)
{
    tddp_shm *shm = self->shm;
    self->cursor = tddp_shm_cursor_of(shm);
    self->forced = tddp_shm_choices_of(shm)->forced[self->op->kind];
    self->rank = tddp_shm_rank(shm);
    self->size = tddp_shm_size(shm);
    self->single_part = self->uniform || self->size <= 2;
    size_t parts = self->single_part ? 1 : (size_t)self->size - 1;
    if (parts > MAX_TABLE) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s among %d ranks of one host: expected at most %d",
                         tddp_op_name(self->op->kind), self->size, MAX_TABLE + 1);
    }
    self->area = TDDP_SHM_STAGING_BYTES / parts / LINE * LINE;
    self->staging = tddp_shm_entered(shm, self->op) ? tddp_shm_staging(shm, self->rank)
                                                    : tddp_shm_next_staging(shm);
    size_t moved = tddp_buffer_bytes(&self->op->input) + tddp_buffer_bytes(&self->op->output);
    self->streaming = moved > tddp_shm_cache_bytes(shm);
    return TDDP_OK;
}

/* With an inline part, or the offsets of all parts. */
static void enter(const transfer *self)
{
    uint64_t table[MAX_TABLE];
    const void *payload = table;
    size_t bytes = sizeof *table * (self->single_part ? 1 : (size_t)self->size - 1);
    table[0] = TDDP_SHM_NOT_SHARED;
    for (int i = 1; i < self->size; i++) {
        const part it = part_sent(self, i);
        if (it.bytes > 0 && is_inline(self, it.bytes)) {
            payload = it.data;
            bytes = it.bytes;
            break;
        }
        if (it.bytes > 0 || !self->single_part) {
            table[it.index] = it.offset;
        }
    }
    tddp_shm_enter(self->shm, self->op, payload, bytes);
}

/* Copies this rank's part for itself, which doesn't need the others to have entered. */
static tddp_status copy_local(const transfer *self)
{
    const tddp_buffer local = tddp_op_sends(self->op, self->rank, self->rank);
    const tddp_buffer target = tddp_op_receives(self->op, self->rank, self->rank);
    if (local.count != target.count) {
        /* Only an unchecked call can get here. */
        return tddp_fail(TDDP_MISMATCH, "%s: rank %d sends itself %zu elements and expects %zu",
                         tddp_op_name(self->op->kind), tddp_shm_rank_name(self->shm, self->rank),
                         local.count, target.count);
    }
    if (!stages_local(self)) {
        tddp_arith_copy(target.data, local.data, tddp_buffer_bytes(&target), self->streaming);
    }
    return TDDP_OK;
}

/* Copies all inline and direct parts. Returns whether there were direct ones: their senders wait
 * for this rank. */
static bool receive_unstaged(const transfer *self)
{
    bool direct = false;
    for (int i = 1; i < self->size; i++) {
        const int peer = peer_after(self, i);
        const part it = part_of(self, peer, self->rank);
        if (it.algorithm == TDDP_SHM_DIRECT) {
            tddp_arith_copy(it.data, tddp_shm_address(self->shm, peer, it.offset), it.bytes,
                            self->streaming);
            direct = true;
        } else if (it.algorithm == TDDP_SHM_INLINE) {
            tddp_arith_copy(it.data, tddp_shm_payload(self->shm, peer), it.bytes, false);
        }
    }
    return direct;
}

/* After the sync, when the algorithm of each part is known. */
static void start_transfer(const transfer *self)
{
    tddp_shm_algorithm algorithm = TDDP_SHM_SLICED;
    if (is_sliced(self)) {
        broadcast_slice(self);
    } else {
        const bool direct = receive_unstaged(self);
        algorithm = count_steps(self) > 0 ? TDDP_SHM_STAGED
                    : direct              ? TDDP_SHM_DIRECT
                                          : TDDP_SHM_INLINE;
    }
    tddp_shm_log_choice(self->shm, self->op->kind, tddp_buffer_bytes(&self->op->input), algorithm);
    if (algorithm == TDDP_SHM_SLICED || algorithm == TDDP_SHM_DIRECT) {
        tddp_shm_publish_step(self->shm, LAST_STEP);
    }
    self->cursor->stage = algorithm == TDDP_SHM_STAGED ? STAGE_TRANSFER : STAGE_WAIT_PEERS;
}

/* Waits for the ranks that read this rank's parts in place, or write its output. */
static tddp_status wait_for_peers(const transfer *self)
{
    if (is_sliced(self)) {
        return tddp_shm_wait_step_all(self->shm, LAST_STEP);
    }
    tddp_status status = TDDP_OK;
    for (int i = 1; i < self->size && status == TDDP_OK; i++) {
        if (part_sent(self, i).algorithm == TDDP_SHM_DIRECT) {
            status = tddp_shm_wait_step(self->shm, peer_after(self, i), LAST_STEP);
        }
    }
    return status;
}

tddp_status tddp_shm_move(tddp_shm *shm, const tddp_op *op)
{
    transfer self = {.shm = shm,
                     .op = op,
                     .uniform = op->kind == TDDP_OP_ALL_GATHER || op->kind == TDDP_OP_GATHER ||
                                op->kind == TDDP_OP_BROADCAST};
    tddp_status status = prepare(&self);
    if (status == TDDP_OK && !tddp_shm_entered(shm, op)) {
        status = stage_step(&self, 1);
    }
    if (status) {
        return status;
    }
    enter(&self);
    int *stage = &self.cursor->stage;
    if (*stage == STAGE_START) {
        status = copy_local(&self);
        *stage = STAGE_SYNC;
    }
    if (status == TDDP_OK && *stage == STAGE_SYNC) {
        status = tddp_shm_sync(shm);
        if (status == TDDP_OK) {
            start_transfer(&self);
        }
    }
    if (status == TDDP_OK && *stage == STAGE_TRANSFER) {
        status = run_steps(&self);
        if (status == TDDP_OK) {
            tddp_shm_publish_step(shm, LAST_STEP);
            *stage = STAGE_WAIT_PEERS;
        }
    }
    return status ? status : wait_for_peers(&self);
}

tddp_status tddp_shm_barrier(tddp_shm *shm, const tddp_op *op)
{
    tddp_shm_enter(shm, op, NULL, 0);
    return tddp_shm_sync(shm);
}
