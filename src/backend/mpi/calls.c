/*
 * Before an operation all ranks compare what they call. Three numbers, reduced over all ranks, show
 * whether all digests are equal; if not, or if ranks may differ in the sizes of parts, each
 * exchanges its calls with each.
 */
#include "backend/mpi/mpi.h"

/* Whether a rank's calls to all others are the same, so that one digest says all. */
static bool is_uniform(const tddp_op *op)
{
    return !op->part_of && (op->kind == TDDP_OP_ALL_REDUCE || op->kind == TDDP_OP_REDUCE ||
                            op->kind == TDDP_OP_BROADCAST || op->kind == TDDP_OP_BARRIER);
}

static uint64_t digest_of(const tddp_mpi *self, const tddp_op *op)
{
    tddp_call call = tddp_call_of(op, self->rank, self->rank);
    call.premul = 0;
    return tddp_digest(TDDP_DIGEST_START, &call, sizeof call);
}

static tddp_status exchange(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    const size_t size = (size_t)self->size;
    tddp_call *mine;
    void *memory = NULL;
    if (MPI_Alloc_mem((MPI_Aint)(2 * size * sizeof *mine), MPI_INFO_NULL, &memory)) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    mine = memory;
    tddp_call *theirs = mine + size;
    for (int peer = 0; peer < self->size; peer++) {
        mine[peer] = tddp_call_of(op, self->rank, peer);
    }
    MPI_Request request;
    const int bytes = (int)sizeof *mine;
    int code =
        MPI_Ialltoall(mine, bytes, MPI_BYTE, theirs, bytes, MPI_BYTE, self->collectives, &request);
    tddp_status status = tddp_mpi_wait(limits, code, &request, 1, tddp_op_name(op->kind));
    for (int peer = 0; peer < self->size && status == TDDP_OK; peer++) {
        const tddp_calls before = self->calls[peer];
        self->calls[peer] = (tddp_calls){mine[peer], theirs[peer]};
        if (!tddp_calls_agree(&mine[peer], &theirs[peer])) {
            status = tddp_calls_mismatch(self->rank, peer, &self->calls[peer], &before);
        }
    }
    /* What MPI has not ended may still be written. */
    if (!tddp_mpi_given_up()) {
        (void)MPI_Free_mem(memory);
    }
    return status;
}

tddp_status tddp_mpi_compare(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    if (self->size == 1) {
        return TDDP_OK;
    }
    const uint64_t digest = digest_of(self, op);
    uint64_t *mine = self->digests;
    uint64_t *greatest = self->digests + 3;
    mine[0] = digest;
    mine[1] = ~digest;
    mine[2] = !is_uniform(op);
    MPI_Request request;
    int code =
        MPI_Iallreduce(mine, greatest, 3, MPI_UINT64_T, MPI_MAX, self->collectives, &request);
    tddp_status status = tddp_mpi_wait(limits, code, &request, 1, tddp_op_name(op->kind));
    if (status || (greatest[0] == ~greatest[1] && !greatest[2])) {
        return status;
    }
    return exchange(self, op, limits);
}
