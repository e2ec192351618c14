/*
 * Before an operation all ranks compare what they call. Three numbers, reduced over all ranks, show
 * whether all digests are equal; if not, or if the parts of some rank differ in size, each
 * exchanges its calls with each. Small data are reduced along with them.
 */
#include "backend/mpi/mpi.h"

/* Whether one digest says all of a rank's calls to the others: each of its parts has as many
 * elements. */
static bool is_uniform(const tddp_mpi *self, const tddp_op *op)
{
    size_t count;
    return !op->part_of && !op->bundled && tddp_op_is_uniform(op, self->size, &count);
}

/* The call to each other rank of an operation that is uniform. */
static tddp_call uniform_call(const tddp_mpi *self, const tddp_op *op)
{
    size_t count;
    tddp_call call = tddp_call_of(op, self->rank, self->rank);
    (void)tddp_op_is_uniform(op, self->size, &count);
    call.sends = call.expects = count;
    call.premul = 0;
    return call;
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
        if (!tddp_calls_agree(&mine[peer], &theirs[peer])) {
            const tddp_calls now = {mine[peer], theirs[peer]};
            const tddp_calls before = {self->before, self->before};
            status = tddp_calls_mismatch(self->rank, peer, &now, &before);
        }
    }
    /* What MPI has not ended may still be written. */
    if (!tddp_mpi_given_up()) {
        (void)MPI_Free_mem(memory);
    }
    return status;
}

static tddp_status start_comparison(tddp_mpi *self, const tddp_op *op)
{
    const tddp_mpi_reduction how = tddp_mpi_comparing();
    tddp_mpi_comparison *mine = &self->mine;
    self->call = uniform_call(self, op);
    mine->digest = tddp_digest(TDDP_DIGEST_START, &self->call, sizeof self->call);
    mine->inverse = ~mine->digest;
    mine->differing = !is_uniform(self, op);
    tddp_mpi_carry(self, op, mine);
    return tddp_mpi_check(
        MPI_Iallreduce(mine, &self->all, 1, how.type, how.op, self->collectives, &self->request),
        tddp_op_name(op->kind));
}

/* What it waits for is that all ranks come. If one does not, MPI uses no memory but this group's:
 * only this group is lost. */
static tddp_status wait_for_all(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    tddp_mpi_limits until = *limits;
    until.cancel = op->cancel;
    if (!self->comparing) {
        tddp_status status = start_comparison(self, op);
        if (status) {
            tddp_mpi_give_up();
            return status;
        }
        self->comparing = true;
        self->deadline_ns = limits->deadline_ns;
    }
    until.deadline_ns = self->deadline_ns;
    tddp_status status = tddp_mpi_wait_one(&until, &self->request, MPI_STATUS_IGNORE);
    if (status != TDDP_CANCELED) {
        self->comparing = false;
        self->lost = status != TDDP_OK;
    }
    if (status == TDDP_NETWORK) {
        tddp_mpi_give_up();
    }
    return status;
}

static bool digests_are_equal(const tddp_mpi *self)
{
    return self->all.digest == ~self->all.inverse;
}

bool tddp_mpi_has_carried(const tddp_mpi *self)
{
    return self->size > 1 && self->mine.carried > 0 && digests_are_equal(self);
}

tddp_status tddp_mpi_compare(tddp_mpi *self, const tddp_op *op, tddp_mpi_limits *limits)
{
    if (self->size == 1) {
        return TDDP_OK;
    }
    tddp_status status = wait_for_all(self, op, limits);
    if (status) {
        return status;
    }
    limits->arrived = true;
    if (!digests_are_equal(self) || self->all.differing) {
        status = exchange(self, op, limits);
    }
    if (status == TDDP_OK) {
        self->before = self->call;
    }
    return status;
}
