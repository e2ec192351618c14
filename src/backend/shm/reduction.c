/*
 * The common part of reductions: their start, combining all ranks' data, and the pipeline "staged".
 * Runs on the operation's thread; can be left at any wait and resumed.
 *
 * While chunk k is combined, chunk k + 1 is already in staging, so that ranks of about equal speed
 * seldom wait for each other:
 *
 *     copy(0) enter sync | copy(1) publish(2) combine(0) | copy(2) publish(3) wait(2) combine(1) |
 * ...
 *
 * A rank that has published s has copied all chunks up to s - 1 and combined all up to s - 3.
 * Before copy(k + 1) a rank has waited until all others published k: they have finished chunk k -
 * 3, so chunk k + 1 may overwrite it. Therefore four chunks in staging are enough, without waiting
 * for space.
 *
 * A rank's own source is its memory, not its staging. Others may read the last chunks after this
 * rank has returned: the next operation uses the other staging half.
 */
#include "backend/shm/reduction.h"

#include "backend/arith/arith.h"

void tddp_shm_combine(const tddp_shm_reduction *self, const void *const *sources,
                      void *const *results, int result_count, size_t bytes, bool streaming)
{
    const tddp_op *op = self->op;
    tddp_dtype dtype = op->output.dtype;
    double factors[TDDP_SHM_MAX_RANKS];
    if (bytes == 0) {
        return;
    }
    tddp_arith_job job = {.op = op->reduce,
                          .dtype = dtype,
                          .count = bytes / tddp_dtype_size(dtype),
                          .sources = sources,
                          .source_count = self->size,
                          .results = results,
                          .result_count = result_count,
                          .factor = op->reduce == TDDP_REDUCE_AVG ? 1.0 / self->size : 1.0,
                          .streaming = streaming};
    if (op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        for (int rank = 0; rank < self->size; rank++) {
            factors[rank] = tddp_shm_premul(self->shm, rank);
        }
        job.factors = factors;
    }
    tddp_arith_reduce(&job);
}

size_t tddp_shm_slice(const tddp_shm_reduction *self, size_t bytes, int rank, size_t *length)
{
    size_t lines = (bytes + TDDP_SHM_SLICE_LINE - 1) / TDDP_SHM_SLICE_LINE;
    size_t size = (size_t)self->size;
    size_t each = (lines + size - 1) / size * TDDP_SHM_SLICE_LINE;
    size_t from = each * (size_t)rank;
    from = from < bytes ? from : bytes;
    *length = bytes - from < each ? bytes - from : each;
    return from;
}

char *tddp_shm_staged_chunk(const tddp_shm_reduction *self, int rank, size_t chunk)
{
    return (char *)tddp_shm_staging(self->shm, rank) +
           chunk % TDDP_SHM_STAGING_CHUNKS * TDDP_SHM_MAX_CHUNK_BYTES;
}

char *tddp_shm_local_staged_chunk(const tddp_shm_reduction *self, size_t chunk)
{
    return self->staging + chunk % TDDP_SHM_STAGING_CHUNKS * TDDP_SHM_MAX_CHUNK_BYTES;
}

bool tddp_shm_copies_after_sync(const tddp_shm_reduction *self, int rank)
{
    if (!self->may_be_direct) {
        return false;
    }
    return self->op->kind == TDDP_OP_REDUCE_SCATTER ? tddp_shm_input(self->shm, rank)
                                                    : tddp_shm_output(self->shm, rank);
}

tddp_status tddp_shm_start_reduction(tddp_shm_reduction *self, const void *payload,
                                     const tddp_buffer *local,
                                     bool (*registered)(const tddp_shm *shm),
                                     tddp_shm_algorithm *algorithm)
{
    tddp_shm_cursor *cursor = self->cursor;
    tddp_op_kind kind = self->op->kind;
    tddp_shm_algorithm first = tddp_shm_choose(self->shm, kind, self->bytes, false);
    if (first == TDDP_SHM_INLINE) {
        *algorithm = first;
        tddp_shm_enter(self->shm, self->op, payload, self->bytes);
        return tddp_shm_sync(self->shm);
    }
    self->may_be_direct = tddp_shm_choose(self->shm, kind, self->bytes, true) == TDDP_SHM_DIRECT;
    bool entered = tddp_shm_entered(self->shm, self->op);
    if (!entered) {
        bool late = self->may_be_direct &&
                    tddp_shm_offset_of(self->shm, local->data, self->bytes) != TDDP_SHM_NOT_SHARED;
        self->staging = tddp_shm_next_staging(self->shm);
        if (!late) {
            self->copy(self, 0);
        }
    }
    tddp_shm_enter(self->shm, self->op, NULL, 0);
    self->staging = tddp_shm_staging(self->shm, self->rank);
    if (cursor->stage == TDDP_SHM_STAGE_START) {
        cursor->stage = TDDP_SHM_STAGE_ENTERED;
    }
    if (cursor->stage == TDDP_SHM_STAGE_ENTERED) {
        tddp_status status = tddp_shm_sync(self->shm);
        if (status) {
            return status;
        }
        cursor->stage = TDDP_SHM_STAGE_SYNCED;
    }
    *algorithm = self->may_be_direct && registered(self->shm) ? TDDP_SHM_DIRECT : first;
    if (cursor->stage == TDDP_SHM_STAGE_SYNCED && *algorithm != TDDP_SHM_DIRECT) {
        if (tddp_shm_copies_after_sync(self, self->rank)) {
            self->copy(self, 0);
            tddp_shm_publish_step(self->shm, 1);
        }
        cursor->stage = TDDP_SHM_STAGE_COPY;
    }
    return TDDP_OK;
}

tddp_status tddp_shm_wait_chunk(const tddp_shm_reduction *self, size_t at)
{
    if (at > 0) {
        return tddp_shm_wait_step_all(self->shm, (uint32_t)(at + 1));
    }
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < self->size && status == TDDP_OK; rank++) {
        if (rank != self->rank && tddp_shm_copies_after_sync(self, rank)) {
            status = tddp_shm_wait_step(self->shm, rank, 1);
        }
    }
    return status;
}

/* A rank that receives nothing waits only until the root has space for more. */
static tddp_status wait_chunk(const tddp_shm_reduction *self, size_t at)
{
    if (tddp_shm_receives_result(self, self->rank)) {
        return tddp_shm_wait_chunk(self, at);
    }
    return at > 0 ? tddp_shm_wait_step(self->shm, self->root, (uint32_t)(at + 1)) : TDDP_OK;
}

tddp_status tddp_shm_run_staged(const tddp_shm_reduction *self)
{
    tddp_shm_cursor *cursor = self->cursor;
    while (cursor->index < self->chunks) {
        if (cursor->stage == TDDP_SHM_STAGE_COPY) {
            if (cursor->index + 1 < self->chunks) {
                self->copy(self, cursor->index + 1);
                tddp_shm_publish_step(self->shm, (uint32_t)(cursor->index + 2));
            }
            cursor->stage = TDDP_SHM_STAGE_WAIT;
        }
        tddp_status status = wait_chunk(self, cursor->index);
        if (status) {
            return status;
        }
        self->combine(self, cursor->index);
        cursor->index++;
        cursor->stage = TDDP_SHM_STAGE_COPY;
    }
    return TDDP_OK;
}
