/*
 * The pipeline "sliced" of all_reduce and reduce: of each chunk every rank combines a slice, and
 * writes the result to where the others' sources lay, in their staging. On the thread that runs the
 * operation; may be left at any wait and entered again.
 *
 *     copy(0) enter meet | copy(1) combine(0) publish(2) | copy(2) await(2) combine(1) publish(3)
 *     take(0) | copy(3) await(3) combine(2) publish(4) take(1) | ... | await take
 *
 * Who has published s has copied chunks up to s - 1 and combined its slice of those up to s - 2.
 * Before copy(k + 1) this rank has waited for k of all others: they have done with k - 2 and what
 * came before, in its place too. It has taken k - 3, whose place chunk k + 1 takes.
 *
 * What takes the time is that cache lines go from core to core: here each goes there and back,
 * which is half of what it takes if each rank reads all of the others' vectors. The own slice is
 * not copied to staging, as no other rank needs it.
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

/* What is not the own slice. */
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
    copy_others(self, chunk, tddp_shm_own_place(self, chunk), own_at(self, chunk));
}

static void take_slices(const tddp_shm_reduction *self, size_t chunk)
{
    copy_others(self, chunk, own_at(self, chunk), tddp_shm_own_place(self, chunk));
}

static void combine_slice(const tddp_shm_reduction *self, size_t chunk)
{
    size_t length;
    size_t from = tddp_shm_slice(self, chunk_bytes(self, chunk), self->rank, &length);
    const void *sources[TDDP_SHM_MOST_RANKS];
    void *results[TDDP_SHM_MOST_RANKS];
    int result_count = 0;
    for (int rank = 0; rank < self->size; rank++) {
        char *place =
            rank == self->rank ? own_at(self, chunk) : tddp_shm_chunk_place(self, rank, chunk);
        sources[rank] = place + from;
        if (tddp_shm_gets_result(self, rank)) {
            results[result_count++] = place + from;
        }
    }
    tddp_shm_combine(self, sources, results, result_count, length, false);
}

tddp_status tddp_shm_pass_slices(const tddp_shm_reduction *self)
{
    tddp_shm_course *course = self->course;
    const bool takes = tddp_shm_gets_result(self, self->rank);
    while (course->at < self->chunks + takes) {
        size_t at = course->at;
        if (course->stage == TDDP_SHM_COPIES) {
            if (at + 1 < self->chunks) {
                tddp_shm_copy_slices(self, at + 1);
            }
            course->stage = TDDP_SHM_AWAITS;
        }
        tddp_status status = tddp_shm_await_chunk(self, at);
        if (status) {
            return status;
        }
        if (at < self->chunks) {
            combine_slice(self, at);
            tddp_shm_publish(self->shm, (uint32_t)(at + 2));
        }
        if (at > 0 && takes) {
            take_slices(self, at - 1);
        }
        course->at = at + 1;
        course->stage = TDDP_SHM_COPIES;
    }
    return TDDP_OK;
}
