/*
 * all_reduce, and reduce with it, which differs in who gets the result. On the thread that runs the
 * operation; may be left at any wait and entered again.
 *
 *     inline    the vector comes with the call, and who gets the result combines all
 *     staged    reduction.c: who gets the result combines all, chunk by chunk
 *     sliced    sliced.c: each rank combines a slice of each chunk
 *     direct    each rank combines its slice of everybody's memory, where it lies, and writes it to
 *               everybody's; nobody returns before all have done
 *
 * All combine the same sources in the same order, so the result's bits are those of any other way.
 */
#include "backend/shm/reduction.h"

#include "backend/arith/arith.h"

enum { PIECES = 4, CHUNK_LEAST = 64 * 1024 };

/* A few, so that copying and combining overlap; but one, if the vector fits, where ranks share
 * cores: there each wait costs more than its work. */
static size_t size_of_chunk(const tddp_shm *shm, size_t bytes)
{
    if (tddp_shm_ranks_per_core(shm) > 1 && bytes <= TDDP_SHM_STAGING_BYTES) {
        return TDDP_SHM_STAGING_BYTES;
    }
    size_t chunk = bytes / PIECES / TDDP_SHM_SLICE_LINE * TDDP_SHM_SLICE_LINE;
    return chunk < CHUNK_LEAST           ? CHUNK_LEAST
           : chunk > TDDP_SHM_CHUNK_MOST ? TDDP_SHM_CHUNK_MOST
                                         : chunk;
}

static char *own_at(const tddp_shm_reduction *self, size_t chunk, size_t *bytes)
{
    size_t from = chunk * self->chunk;
    size_t left = self->bytes - from;
    *bytes = left < self->chunk ? left : self->chunk;
    return (char *)self->op->output.data + from;
}

static void copy_chunk(const tddp_shm_reduction *self, size_t chunk)
{
    size_t bytes;
    const char *own = own_at(self, chunk, &bytes);
    if (self->root != self->rank) {
        tddp_arith_copy(tddp_shm_own_place(self, chunk), own, bytes, false);
    }
}

static void combine_chunk(const tddp_shm_reduction *self, size_t chunk)
{
    const void *sources[TDDP_SHM_MOST_RANKS];
    if (!tddp_shm_gets_result(self, self->rank)) {
        return;
    }
    size_t bytes;
    void *own = own_at(self, chunk, &bytes);
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = tddp_shm_chunk_place(self, rank, chunk);
    }
    sources[self->rank] = own;
    tddp_shm_combine(self, sources, &own, 1, bytes, false);
}

static void combine_inline(const tddp_shm_reduction *self)
{
    const void *sources[TDDP_SHM_MOST_RANKS];
    if (!tddp_shm_gets_result(self, self->rank)) {
        return;
    }
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = tddp_shm_payload(self->shm, rank);
    }
    void *own = self->op->output.data;
    tddp_shm_combine(self, sources, &own, 1, self->bytes, false);
}

static tddp_status reduce_direct(const tddp_shm_reduction *self)
{
    if (self->course->stage == TDDP_SHM_MET) {
        const void *sources[TDDP_SHM_MOST_RANKS];
        void *results[TDDP_SHM_MOST_RANKS];
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
        tddp_shm_publish(self->shm, 1);
        self->course->stage = TDDP_SHM_LEAVES;
    }
    return tddp_shm_await_all(self->shm, 1);
}

/* The one rank has the result, but for its factor. */
static tddp_status reduce_alone(const tddp_shm_reduction *self)
{
    tddp_shm_enter(self->shm, self->op, NULL, 0);
    tddp_status status = tddp_shm_meet(self->shm);
    if (status == TDDP_OK && self->op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        void *own = self->op->output.data;
        tddp_shm_combine(self, (const void *const *)&own, &own, 1, self->bytes, false);
    }
    return status;
}

tddp_status tddp_shm_reduce_to(tddp_shm *shm, const tddp_op *op, int root)
{
    tddp_shm_reduction self = {.shm = shm,
                               .op = op,
                               .course = tddp_shm_course_of(shm),
                               .rank = tddp_shm_rank(shm),
                               .size = tddp_shm_size(shm),
                               .root = root,
                               .bytes = op->output.count * tddp_dtype_size(op->output.dtype),
                               .combine = combine_chunk};
    if (self.size == 1) {
        return reduce_alone(&self);
    }
    self.chunk = size_of_chunk(shm, self.bytes);
    self.chunks = (self.bytes + self.chunk - 1) / self.chunk;
    tddp_shm_algorithm algorithm = tddp_shm_choose(shm, op->kind, self.bytes, false);
    self.copy = algorithm == TDDP_SHM_SLICED ? tddp_shm_copy_slices : copy_chunk;
    tddp_status status =
        tddp_shm_begin(&self, op->output.data, &op->output, tddp_shm_all_outputs, &algorithm);
    if (status) {
        return status;
    }
    tddp_shm_chose(shm, op->kind, self.bytes, algorithm);
    switch (algorithm) {
    case TDDP_SHM_INLINE:
        combine_inline(&self);
        return TDDP_OK;
    case TDDP_SHM_SLICED:
        return tddp_shm_pass_slices(&self);
    case TDDP_SHM_DIRECT:
        return reduce_direct(&self);
    default:
        return tddp_shm_pass_chunks(&self);
    }
}

tddp_status tddp_shm_all_reduce(tddp_shm *shm, const tddp_op *op)
{
    return tddp_shm_reduce_to(shm, op, -1);
}
