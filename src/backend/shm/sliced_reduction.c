/*
 * The pipeline "sliced" of all_reduce and reduce: every rank combines a slice of each chunk, and
 * writes the result over the sources in the other ranks' staging. Runs on the operation's thread;
 * can be left at any wait and resumed.
 *
 *     copy(0) enter sync | copy(1) combine(0) publish(2) | copy(2) wait(2) combine(1) publish(3)
 *     copy_back(0) | copy(3) wait(3) combine(2) publish(4) copy_back(1) | ... | wait copy_back
 *
 * A rank that has published s has copied chunks up to s - 1 and combined its slice of chunks up to
 * s - 2. Before copy(k + 1) a rank has waited until all others published k: they have finished
 * chunk k - 2 and its predecessors, also in this rank's staging. This rank has copied back chunk k
 * - 3, which chunk k + 1 overwrites.
 *
 * The time goes into moving cache lines between cores. Here each line moves there and back, half of
 * what it takes if each rank reads all the others' data. A rank's own slice isn't copied to
 * staging, since no other rank needs it.
 */
#include "backend/arith/arith.h"
#include "backend/shm/reduction.h"

static size_t chunk_bytes(const tddp_shm_reduction *self, size_t chunk)
{
    size_t left = self->bytes - chunk * self->chunk;
    return left < self->chunk ? left : self->chunk;
}

static char *local_chunk(const tddp_shm_reduction *self, size_t chunk)
{
    return (char *)self->op->output.data + chunk * self->chunk;
}

/* Copies everything but this rank's slice. */
static void copy_others(const tddp_shm_reduction *self, size_t chunk, char *into, const char *from)
{
    size_t bytes = chunk_bytes(self, chunk);
    size_t length;
    size_t before = tddp_shm_slice(self, bytes, self->rank, &length);
    size_t behind = before + length;
    tddp_arith_copy(into, from, before, false);
    tddp_arith_copy(into + behind, from + behind, bytes - behind, false);
}

void tddp_shm_copy_slices(const tddp_shm_reduction *self, size_t chunk)
{
    copy_others(self, chunk, tddp_shm_local_staged_chunk(self, chunk), local_chunk(self, chunk));
}

static void copy_back_slices(const tddp_shm_reduction *self, size_t chunk)
{
    copy_others(self, chunk, local_chunk(self, chunk), tddp_shm_local_staged_chunk(self, chunk));
}

static void combine_slice(const tddp_shm_reduction *self, size_t chunk)
{
    size_t length;
    size_t from = tddp_shm_slice(self, chunk_bytes(self, chunk), self->rank, &length);
    const void *sources[TDDP_SHM_MAX_RANKS];
    void *results[TDDP_SHM_MAX_RANKS];
    int result_count = 0;
    for (int rank = 0; rank < self->size; rank++) {
        char *target = rank == self->rank ? local_chunk(self, chunk)
                                          : tddp_shm_staged_chunk(self, rank, chunk);
        sources[rank] = target + from;
        if (tddp_shm_receives_result(self, rank)) {
            results[result_count++] = target + from;
        }
    }
    tddp_shm_combine(self, sources, results, result_count, length, false);
}

tddp_status tddp_shm_run_sliced(const tddp_shm_reduction *self)
{
    tddp_shm_cursor *cursor = self->cursor;
    const bool receives = tddp_shm_receives_result(self, self->rank);
    while (cursor->index < self->chunks + receives) {
        size_t at = cursor->index;
        if (cursor->stage == TDDP_SHM_STAGE_COPY) {
            if (at + 1 < self->chunks) {
                tddp_shm_copy_slices(self, at + 1);
            }
            cursor->stage = TDDP_SHM_STAGE_WAIT;
        }
        tddp_status status = tddp_shm_wait_chunk(self, at);
        if (status) {
            return status;
        }
        if (at < self->chunks) {
            combine_slice(self, at);
            tddp_shm_publish_step(self->shm, (uint32_t)(at + 2));
        }
        if (at > 0 && receives) {
            copy_back_slices(self, at - 1);
        }
        cursor->index = at + 1;
        cursor->stage = TDDP_SHM_STAGE_COPY;
    }
    return TDDP_OK;
}
