/*
 * all_reduce of large buffers, which those of MPI's own that can be waited for with a deadline do
 * slowly. Around a ring: each rank passes a chunk on to the next rank and adds the one that it
 * receives to its own, until each chunk has been at all ranks; then the sums go around. A chunk is
 * summed once, so results have the same bits on all ranks.
 */
#include <stdlib.h>

#include "backend/mpi/mpi.h"

enum { SEGMENT_BYTES = 256 * 1024 };

/* Chunks move in segments: while one is added, the next is under way. */
typedef struct ring {
    const tddp_mpi_limits *limits;
    const tddp_op *op;
    size_t element;
    size_t segment; /* elements */
    char *received; /* two segments */
} ring;

typedef struct chunk {
    char *data;
    size_t count;
} chunk;

/* Of as many chunks as ranks, which differ by one element at most. */
static chunk chunk_of(const ring *self, int number)
{
    const size_t size = (size_t)self->limits->group->size;
    const size_t i = (size_t)number % size;
    const size_t each = self->op->output.count / size;
    const size_t larger = self->op->output.count % size;
    const size_t first = each * i + (i < larger ? i : larger);
    return (chunk){(char *)self->op->output.data + first * self->element, each + (i < larger)};
}

static chunk segment_of(const ring *self, const chunk *all, size_t at)
{
    const size_t left = at < all->count ? all->count - at : 0;
    return (chunk){all->data + at * self->element, left < self->segment ? left : self->segment};
}

static char *staging_of(const ring *self, size_t at)
{
    return self->received + at / self->segment % 2 * self->segment * self->element;
}

static int start(const ring *self, chunk out, chunk in, MPI_Request *requests)
{
    const tddp_mpi *group = self->limits->group;
    const int next = (group->rank + 1) % group->size;
    const int previous = (group->rank + group->size - 1) % group->size;
    requests[0] = requests[1] = MPI_REQUEST_NULL;
    int code = MPI_SUCCESS;
    if (in.count > 0) {
        code = MPI_Irecv(in.data, (int)(in.count * self->element), MPI_BYTE, previous, 0,
                         group->collectives, &requests[0]);
    }
    if (out.count > 0 && code == MPI_SUCCESS) {
        code = MPI_Isend(out.data, (int)(out.count * self->element), MPI_BYTE, next, 0,
                         group->collectives, &requests[1]);
    }
    return code;
}

static int start_at(const ring *self, const chunk *out, const chunk *in, size_t at, bool adds,
                    MPI_Request *requests)
{
    chunk into = segment_of(self, in, at);
    if (adds) {
        into.data = staging_of(self, at);
    }
    return start(self, segment_of(self, out, at), into, requests);
}

/* Sends one chunk and receives another, in the place of this rank's or to add to it. */
static tddp_status pass(const ring *self, int sent, int received, bool adds)
{
    const chunk out = chunk_of(self, sent);
    const chunk in = chunk_of(self, received);
    const size_t most = out.count > in.count ? out.count : in.count;
    MPI_Request requests[2][2];
    int code = start_at(self, &out, &in, 0, adds, requests[0]);
    tddp_status status = TDDP_OK;
    int turn = 0;
    for (size_t at = 0; at < most && status == TDDP_OK; at += self->segment, turn ^= 1) {
        if (code == MPI_SUCCESS && at + self->segment < most) {
            code = start_at(self, &out, &in, at + self->segment, adds, requests[turn ^ 1]);
        }
        status = tddp_mpi_wait(self->limits, code, requests[turn], 2, "all_reduce");
        if (status == TDDP_OK && adds) {
            const chunk mine = segment_of(self, &in, at);
            tddp_combine(self->op->reduce, self->op->output.dtype, mine.data, staging_of(self, at),
                         mine.count);
        }
    }
    return status;
}

tddp_status tddp_mpi_ring(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    ring all = {.limits = limits, .op = op, .element = tddp_dtype_size(op->output.dtype)};
    all.segment = SEGMENT_BYTES / all.element;
    all.received = malloc(2 * SEGMENT_BYTES);
    if (!all.received) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %d bytes", 2 * SEGMENT_BYTES);
    }
    tddp_status status = TDDP_OK;
    const int rank = self->rank + self->size; /* so that no number is negative */
    for (int step = 0; step < self->size - 1 && status == TDDP_OK; step++) {
        status = pass(&all, rank - step, rank - step - 1, true);
    }
    for (int step = 0; step < self->size - 1 && status == TDDP_OK; step++) {
        status = pass(&all, rank + 1 - step, rank - step, false);
    }
    if (!tddp_mpi_given_up()) {
        free(all.received);
    }
    return status;
}
