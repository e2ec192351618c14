/*
 * The pipeline "sliced" of all_reduce and reduce: of each chunk every rank combines a slice, and
 * the others take it from there. For many ranks that is less work than if all combined everything.
 * On the thread that runs the operation; may be left at any wait and entered again.
 *
 *     copy(0) enter | copy(1) meet combine(0) publish(2) | copy(2) await(2) combine(1) take(0)
 *     publish(3) | ...
 *
 * Who has published s has copied chunks up to s - 1, combined its slice of those up to s - 2 and
 * taken the results up to s - 3. Before copy(k) this rank has waited for k - 1 of all: they have
 * done with chunk k - 4, whose place chunk k takes.
 *
 * The own slice is not copied to staging, as no other rank needs it; the result is put there.
 */
#include "backend/arith/arith.h"
#include "backend/shm/reduction.h"

static size_t chunk_bytes(const tddp_shm_reduction *self, size_t chunk)
{
    size_t left = self->bytes - chunk * self->chunk;
    return left < self->chunk ? left : self->chunk;
}

static char *own_at(const tddp_shm_reduction *self, size_t chunk)
{
    return (char *)self->op->output.data + chunk * self->chunk;
}

void tddp_shm_copy_slices(const tddp_shm_reduction *self, size_t chunk)
{
    size_t bytes = chunk_bytes(self, chunk);
    size_t length;
    size_t from = tddp_shm_slice(self, bytes, self->rank, &length);
    char *place = tddp_shm_own_place(self, chunk);
    const char *own = own_at(self, chunk);
    size_t behind = from + length;
    tddp_arith_copy(place, own, from, false);
    tddp_arith_copy(place + behind, own + behind, bytes - behind, false);
}

static void combine_slice(const tddp_shm_reduction *self, size_t chunk)
{
    size_t length;
    size_t from = tddp_shm_slice(self, chunk_bytes(self, chunk), self->rank, &length);
    const void *sources[TDDP_SHM_MOST_RANKS];
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = tddp_shm_chunk_place(self, rank, chunk) + from;
    }
    char *own = own_at(self, chunk) + from;
    char *place = tddp_shm_own_place(self, chunk) + from;
    sources[self->rank] = own;
    /* A rank that gets no result keeps its memory as it is. */
    void *results[2] = {self->root < 0 || self->root == self->rank ? own : place, place};
    tddp_shm_combine(self, sources, results, self->root < 0 ? 2 : 1, length, false);
}

static void take_slices(const tddp_shm_reduction *self, size_t chunk)
{
    for (int i = 1; i < self->size; i++) {
        /* Each begins with another one. */
        int rank = (self->rank + i) % self->size;
        size_t length;
        size_t from = tddp_shm_slice(self, chunk_bytes(self, chunk), rank, &length);
        tddp_arith_copy(own_at(self, chunk) + from, tddp_shm_chunk_place(self, rank, chunk) + from,
                        length, false);
    }
}

static tddp_status await_slices(const tddp_shm_reduction *self, size_t at)
{
    if (at > 1) {
        return tddp_shm_await_all(self->shm, (uint32_t)at);
    }
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < self->size && status == TDDP_OK; rank++) {
        if (rank != self->rank && tddp_shm_copied_late(self, rank)) {
            status = tddp_shm_await(self->shm, rank, 1);
        }
    }
    return status;
}

tddp_status tddp_shm_pass_slices(const tddp_shm_reduction *self)
{
    tddp_shm_course *course = self->course;
    bool takes = self->root < 0 || self->root == self->rank;
    if (course->at == 0) {
        course->at = 1;
    }
    while (course->at <= self->chunks + 1) {
        size_t at = course->at;
        if (course->stage == TDDP_SHM_COPIES) {
            if (at < self->chunks) {
                tddp_shm_copy_slices(self, at);
            }
            course->stage = TDDP_SHM_AWAITS;
        }
        tddp_status status = await_slices(self, at);
        if (status) {
            return status;
        }
        if (at <= self->chunks) {
            combine_slice(self, at - 1);
        }
        if (at > 1 && takes) {
            take_slices(self, at - 2);
        }
        tddp_shm_publish(self->shm, (uint32_t)(at + 1));
        course->at = at + 1;
        course->stage = TDDP_SHM_COPIES;
    }
    return TDDP_OK;
}
