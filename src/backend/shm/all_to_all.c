/*
 * All_to_all: each rank gives each other one a piece of its own. Pieces may differ in size. On the
 * thread that runs the operation. The ways are in exchange.c.
 */
#include "backend/shm/exchange.h"

static tddp_buffer given(const tddp_op *op, int rank, int peer)
{
    (void)rank;
    return op->input_parts[peer];
}

static tddp_buffer wanted(const tddp_op *op, int rank, int peer)
{
    (void)rank;
    return op->output_parts[peer];
}

tddp_status tddp_shm_all_to_all(tddp_shm *shm, const tddp_op *op)
{
    static const tddp_shm_pattern pattern = {given, wanted, .whole = false};
    return tddp_shm_exchange(shm, op, &pattern);
}
