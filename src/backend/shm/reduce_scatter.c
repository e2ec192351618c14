/*
 * reduce_scatter: each rank combines its own part of all ranks' input. Runs on the operation's
 * thread; can be left at any wait and resumed.
 *
 *     inline    all parts travel with the call
 *     staged    reduction.c: a chunk has a portion of each other rank's part
 *     direct    from all ranks' memory in place; no rank returns before all have read
 *
 * Parts may differ in size, and need not be contiguous.
 */
#include "backend/shm/reduction.h"

#include <string.h>

#include "backend/arith/arith.h"

/* The bytes of each rank's portion in a chunk. */
static size_t part_chunk_bytes(const tddp_shm_reduction *self)
{
    return self->chunk / (size_t)self->size / TDDP_SHM_SLICE_LINE * TDDP_SHM_SLICE_LINE;
}

/* The portion of a part in a chunk: its length, and its offset in the part. */
static size_t part_chunk(const tddp_shm_reduction *self, int part, size_t chunk, size_t *from)
{
    size_t chunk_part = part_chunk_bytes(self);
    size_t bytes = tddp_buffer_bytes(&self->op->input_parts[part]);
    *from = chunk * chunk_part < bytes ? chunk * chunk_part : bytes;
    return bytes - *from < chunk_part ? bytes - *from : chunk_part;
}

static void copy_parts(const tddp_shm_reduction *self, size_t chunk)
{
    char *target = tddp_shm_local_staged_chunk(self, chunk);
    for (int rank = 0; rank < self->size; rank++) {
        size_t from;
        size_t bytes = part_chunk(self, rank, chunk, &from);
        if (rank != self->rank && bytes > 0) {
            const char *part = self->op->input_parts[rank].data;
            tddp_arith_copy(target + (size_t)rank * part_chunk_bytes(self), part + from, bytes,
                            false);
        }
    }
}

static void combine_parts(const tddp_shm_reduction *self, size_t chunk)
{
    const void *sources[TDDP_SHM_MAX_RANKS];
    size_t from;
    size_t bytes = part_chunk(self, self->rank, chunk, &from);
    if (bytes == 0) {
        return;
    }
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] =
            tddp_shm_staged_chunk(self, rank, chunk) + (size_t)self->rank * part_chunk_bytes(self);
    }
    sources[self->rank] = (const char *)self->op->input_parts[self->rank].data + from;
    void *result = (char *)self->op->output.data + from;
    tddp_shm_combine(self, sources, &result, 1, bytes, false);
}

/* The offset of this rank's part if the parts are contiguous. */
static size_t local_part_offset(const tddp_shm_reduction *self)
{
    size_t start = 0;
    for (int rank = 0; rank < self->rank; rank++) {
        start += tddp_buffer_bytes(&self->op->input_parts[rank]);
    }
    return start;
}

/* Combines this rank's part of the inputs at `base` of each rank. */
static void combine_local_part(const tddp_shm_reduction *self,
                               const void *(*base)(const tddp_shm *, int), bool streaming)
{
    const void *sources[TDDP_SHM_MAX_RANKS];
    size_t start = local_part_offset(self);
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = (const char *)base(self->shm, rank) + start;
    }
    void *result = self->op->output.data;
    tddp_shm_combine(self, sources, &result, 1, tddp_buffer_bytes(&self->op->output), streaming);
}

static tddp_status combine_direct(const tddp_shm_reduction *self)
{
    if (self->cursor->stage == TDDP_SHM_STAGE_SYNCED) {
        combine_local_part(self, tddp_shm_input,
                           tddp_buffer_bytes(&self->op->output) > tddp_shm_cache_bytes(self->shm));
        tddp_shm_publish_step(self->shm, 1);
        self->cursor->stage = TDDP_SHM_STAGE_FINISHED;
    }
    return tddp_shm_wait_step_all(self->shm, 1);
}

/* The input as contiguous memory: as it is, or packed into `scratch`. */
static const void *pack_input(const tddp_op *op, int size, char *scratch)
{
    if (op->input.data) {
        return op->input.data;
    }
    char *end = scratch;
    for (int rank = 0; rank < size; rank++) {
        size_t bytes = tddp_buffer_bytes(&op->input_parts[rank]);
        if (bytes > 0) {
            memcpy(end, op->input_parts[rank].data, bytes);
        }
        end += bytes;
    }
    return scratch;
}

static void set_chunks(tddp_shm_reduction *self)
{
    size_t max_bytes = 0;
    for (int rank = 0; rank < self->size; rank++) {
        size_t bytes = tddp_buffer_bytes(&self->op->input_parts[rank]);
        max_bytes = bytes > max_bytes ? bytes : max_bytes;
    }
    self->chunk = TDDP_SHM_MAX_CHUNK_BYTES;
    self->chunks = (max_bytes + part_chunk_bytes(self) - 1) / part_chunk_bytes(self);
}

tddp_status tddp_shm_reduce_scatter(tddp_shm *shm, const tddp_op *op)
{
    tddp_shm_reduction self = {.shm = shm,
                               .op = op,
                               .cursor = tddp_shm_cursor_of(shm),
                               .rank = tddp_shm_rank(shm),
                               .size = tddp_shm_size(shm),
                               .root = -1,
                               .bytes = tddp_buffer_bytes(&op->input),
                               .copy = copy_parts,
                               .combine = combine_parts};
    char scratch[TDDP_SHM_PAYLOAD_BYTES];
    tddp_shm_algorithm algorithm = tddp_shm_choose(shm, op->kind, self.bytes, false);
    const void *payload = algorithm == TDDP_SHM_INLINE ? pack_input(op, self.size, scratch) : NULL;
    set_chunks(&self);
    tddp_status status =
        tddp_shm_start_reduction(&self, payload, &op->input, tddp_shm_all_inputs, &algorithm);
    if (status) {
        return status;
    }
    tddp_shm_log_choice(shm, op->kind, self.bytes, algorithm);
    switch (algorithm) {
    case TDDP_SHM_INLINE:
        combine_local_part(&self, tddp_shm_payload, false);
        return TDDP_OK;
    case TDDP_SHM_DIRECT:
        return combine_direct(&self);
    default:
        return tddp_shm_run_staged(&self);
    }
}
