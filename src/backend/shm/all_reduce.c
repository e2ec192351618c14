/*
 * all_reduce, and reduce, which differs only in who receives the result. Runs on the operation's
 * thread; can be left at any wait and resumed.
 *
 *     inline    the data travel with the call; each receiver combines all ranks' data
 *     staged    reduction.c: each receiver combines all ranks' data, chunk by chunk
 *     sliced    sliced_reduction.c: each rank combines its slice of each chunk
 *     direct    each rank combines its slice of all ranks' memory in place, and writes it to all of
 *               them; no rank returns before all have finished
 *
 * All algorithms combine the same sources in the same order, so the bits of the result don't depend
 * on the algorithm.
 */
#include "backend/shm/reduction.h"

#include "backend/arith/arith.h"

enum { MIN_CHUNKS = 4, MIN_CHUNK_BYTES = 64 * 1024 };

/* Several chunks, so that copying and combining overlap. If ranks share cores, one chunk where
 * the data fit: there a wait costs more than the work. */
static size_t chunk_bytes_for(const tddp_shm *shm, size_t bytes)
{
    if (tddp_shm_ranks_per_core(shm) > 1 && bytes <= TDDP_SHM_STAGING_BYTES) {
        return TDDP_SHM_STAGING_BYTES;
    }
    size_t chunk = bytes / MIN_CHUNKS / TDDP_SHM_SLICE_LINE * TDDP_SHM_SLICE_LINE;
    return chunk < MIN_CHUNK_BYTES            ? MIN_CHUNK_BYTES
           : chunk > TDDP_SHM_MAX_CHUNK_BYTES ? TDDP_SHM_MAX_CHUNK_BYTES
                                              : chunk;
}

static char *local_chunk(const tddp_shm_reduction *self, size_t chunk, size_t *bytes)
{
    size_t from = chunk * self->chunk;
    size_t left = self->bytes - from;
    *bytes = left < self->chunk ? left : self->chunk;
    return (char *)self->op->output.data + from;
}

static void copy_chunk(const tddp_shm_reduction *self, size_t chunk)
{
    size_t bytes;
    const char *local = local_chunk(self, chunk, &bytes);
    if (self->root != self->rank) {
        tddp_arith_copy(tddp_shm_local_staged_chunk(self, chunk), local, bytes, false);
    }
}

static void combine_chunk(const tddp_shm_reduction *self, size_t chunk)
{
    const void *sources[TDDP_SHM_MAX_RANKS];
    if (!tddp_shm_receives_result(self, self->rank)) {
        return;
    }
    size_t bytes;
    void *local = local_chunk(self, chunk, &bytes);
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = tddp_shm_staged_chunk(self, rank, chunk);
    }
    sources[self->rank] = local;
    tddp_shm_combine(self, sources, &local, 1, bytes, false);
}

static void combine_inline(const tddp_shm_reduction *self)
{
    const void *sources[TDDP_SHM_MAX_RANKS];
    if (!tddp_shm_receives_result(self, self->rank)) {
        return;
    }
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = tddp_shm_payload(self->shm, rank);
    }
    void *local = self->op->output.data;
    tddp_shm_combine(self, sources, &local, 1, self->bytes, false);
}

static tddp_status reduce_direct(const tddp_shm_reduction *self)
{
    if (self->cursor->stage == TDDP_SHM_STAGE_SYNCED) {
        const void *sources[TDDP_SHM_MAX_RANKS];
        void *results[TDDP_SHM_MAX_RANKS];
        size_t length;
        size_t from = tddp_shm_slice(self, self->bytes, self->rank, &length);
        for (int rank = 0; rank < self->size; rank++) {
            results[rank] = (char *)tddp_shm_output(self->shm, rank) + from;
            sources[rank] = results[rank];
        }
        if (self->root < 0) {
            tddp_shm_combine(self, sources, results, self->size, length, false);
        } else {
            tddp_shm_combine(self, sources, &results[self->root], 1, length, false);
        }
        tddp_shm_publish_step(self->shm, 1);
        self->cursor->stage = TDDP_SHM_STAGE_FINISHED;
    }
    return tddp_shm_wait_step_all(self->shm, 1);
}

/* With one rank the data are the result, except for the rank's factor. */
static tddp_status reduce_single_rank(const tddp_shm_reduction *self)
{
    tddp_shm_enter(self->shm, self->op, NULL, 0);
    tddp_status status = tddp_shm_sync(self->shm);
    if (status == TDDP_OK && self->op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        void *local = self->op->output.data;
        tddp_shm_combine(self, (const void *const *)&local, &local, 1, self->bytes, false);
    }
    return status;
}

tddp_status tddp_shm_reduce_to(tddp_shm *shm, const tddp_op *op, int root)
{
    tddp_shm_reduction self = {.shm = shm,
                               .op = op,
                               .cursor = tddp_shm_cursor_of(shm),
                               .rank = tddp_shm_rank(shm),
                               .size = tddp_shm_size(shm),
                               .root = root,
                               .bytes = tddp_buffer_bytes(&op->output),
                               .combine = combine_chunk};
    if (self.size == 1) {
        return reduce_single_rank(&self);
    }
    self.chunk = chunk_bytes_for(shm, self.bytes);
    self.chunks = (self.bytes + self.chunk - 1) / self.chunk;
    tddp_shm_algorithm algorithm = tddp_shm_choose(shm, op->kind, self.bytes, false);
    self.copy = algorithm == TDDP_SHM_SLICED ? tddp_shm_copy_slices : copy_chunk;
    tddp_status status = tddp_shm_start_reduction(&self, op->output.data, &op->output,
                                                  tddp_shm_all_outputs, &algorithm);
    if (status) {
        return status;
    }
    tddp_shm_log_choice(shm, op->kind, self.bytes, algorithm);
    switch (algorithm) {
    case TDDP_SHM_INLINE:
        combine_inline(&self);
        return TDDP_OK;
    case TDDP_SHM_SLICED:
        return tddp_shm_run_sliced(&self);
    case TDDP_SHM_DIRECT:
        return reduce_direct(&self);
    default:
        return tddp_shm_run_staged(&self);
    }
}

tddp_status tddp_shm_all_reduce(tddp_shm *shm, const tddp_op *op)
{
    return tddp_shm_reduce_to(shm, op, -1);
}
