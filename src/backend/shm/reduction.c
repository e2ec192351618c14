/*
 * The frame of reductions: how they begin, how pieces of all ranks are combined, and the pipeline
 * "staged". On the thread that runs the operation; may be left at any wait and entered again.
 *
 * The pipeline. While chunk k is combined, chunk k + 1 lies in staging already, so that ranks of
 * about one speed seldom wait for each other:
 *
 *     copy(0) enter meet | copy(1) publish(2) combine(0) | copy(2) publish(3) await(2) combine(1) |
 *
 * Who has published s has copied all chunks up to s - 1 and combined all up to s - 3. Before
 * copy(k + 1) this rank has waited for k of all others: they have done with k - 3, so the place of
 * chunk k + 1 may be that of chunk k - 3: four places are enough, without a wait for room.
 *
 * A rank's own source is its own memory, not its staging. What others read of the last chunks
 * stays: the next operation uses the other half of staging.
 */
#include "backend/shm/reduction.h"

#include "backend/arith/arith.h"

void tddp_shm_combine(const tddp_shm_reduction *self, const void *const *sources,
                      void *const *results, int result_count, size_t bytes, bool streaming)
{
    const tddp_op *op = self->op;
    tddp_dtype dtype = op->output.dtype;
    double factors[TDDP_SHM_MOST_RANKS];
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

char *tddp_shm_chunk_place(const tddp_shm_reduction *self, int rank, size_t chunk)
{
    return (char *)tddp_shm_staging(self->shm, rank) + chunk % TDDP_SHM_DEPTH * TDDP_SHM_CHUNK_MOST;
}

char *tddp_shm_own_place(const tddp_shm_reduction *self, size_t chunk)
{
    return self->staging + chunk % TDDP_SHM_DEPTH * TDDP_SHM_CHUNK_MOST;
}

bool tddp_shm_copied_late(const tddp_shm_reduction *self, int rank)
{
    if (!self->waits_for_direct) {
        return false;
    }
    return self->op->kind == TDDP_OP_REDUCE_SCATTER ? tddp_shm_input(self->shm, rank)
                                                    : tddp_shm_output(self->shm, rank);
}

tddp_status tddp_shm_begin(tddp_shm_reduction *self, const void *payload, const tddp_buffer *own,
                           bool (*registered)(const tddp_shm *shm), tddp_shm_algorithm *algorithm)
{
    tddp_shm_course *course = self->course;
    tddp_op_kind kind = self->op->kind;
    tddp_shm_algorithm first = tddp_shm_choose(self->shm, kind, self->bytes, false);
    if (first == TDDP_SHM_INLINE) {
        *algorithm = first;
        tddp_shm_enter(self->shm, self->op, payload, self->bytes);
        return tddp_shm_meet(self->shm);
    }
    self->waits_for_direct = tddp_shm_choose(self->shm, kind, self->bytes, true) == TDDP_SHM_DIRECT;
    bool entered = tddp_shm_entered(self->shm, self->op);
    if (!entered) {
        bool late = self->waits_for_direct &&
                    tddp_shm_locate(self->shm, own->data, self->bytes) != TDDP_SHM_NOWHERE;
        self->staging = tddp_shm_staging_ahead(self->shm);
        if (!late) {
            self->copy(self, 0);
        }
    }
    tddp_shm_enter(self->shm, self->op, NULL, 0);
    self->staging = tddp_shm_staging(self->shm, self->rank);
    if (course->stage == TDDP_SHM_BEGINS) {
        course->stage = TDDP_SHM_ENTERED;
    }
    if (course->stage == TDDP_SHM_ENTERED) {
        tddp_status status = tddp_shm_meet(self->shm);
        if (status) {
            return status;
        }
        course->stage = TDDP_SHM_MET;
    }
    *algorithm = self->waits_for_direct && registered(self->shm) ? TDDP_SHM_DIRECT : first;
    if (course->stage == TDDP_SHM_MET && *algorithm != TDDP_SHM_DIRECT) {
        if (tddp_shm_copied_late(self, self->rank)) {
            self->copy(self, 0);
            tddp_shm_publish(self->shm, 1);
        }
        course->stage = TDDP_SHM_COPIES;
    }
    return TDDP_OK;
}

tddp_status tddp_shm_await_chunk(const tddp_shm_reduction *self, size_t at)
{
    if (at > 0) {
        return tddp_shm_await_all(self->shm, (uint32_t)(at + 1));
    }
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < self->size && status == TDDP_OK; rank++) {
        if (rank != self->rank && tddp_shm_copied_late(self, rank)) {
            status = tddp_shm_await(self->shm, rank, 1);
        }
    }
    return status;
}

/* Who takes nothing waits until the root alone has room for more. */
static tddp_status await_chunk(const tddp_shm_reduction *self, size_t at)
{
    if (tddp_shm_gets_result(self, self->rank)) {
        return tddp_shm_await_chunk(self, at);
    }
    return at > 0 ? tddp_shm_await(self->shm, self->root, (uint32_t)(at + 1)) : TDDP_OK;
}

tddp_status tddp_shm_pass_chunks(const tddp_shm_reduction *self)
{
    tddp_shm_course *course = self->course;
    while (course->at < self->chunks) {
        if (course->stage == TDDP_SHM_COPIES) {
            if (course->at + 1 < self->chunks) {
                self->copy(self, course->at + 1);
                tddp_shm_publish(self->shm, (uint32_t)(course->at + 2));
            }
            course->stage = TDDP_SHM_AWAITS;
        }
        tddp_status status = await_chunk(self, course->at);
        if (status) {
            return status;
        }
        self->combine(self, course->at);
        course->at++;
        course->stage = TDDP_SHM_COPIES;
    }
    return TDDP_OK;
}
