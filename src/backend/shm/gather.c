/*
 * gather: each rank sends a part to the root. Parts may differ in size. Runs on the operation's
 * thread; exchange.c moves the data.
 */
#include "backend/shm/exchange.h"

static tddp_buffer send_part(const tddp_op *op, int rank, int peer)
{
    (void)rank;
    return peer == op->root ? op->input : tddp_shm_empty_buffer(op);
}

static tddp_buffer recv_part(const tddp_op *op, int rank, int peer)
{
    return rank == op->root ? op->output_parts[peer] : tddp_shm_empty_buffer(op);
}

tddp_status tddp_shm_gather(tddp_shm *shm, const tddp_op *op)
{
    static const tddp_shm_pattern pattern = {send_part, recv_part, .uniform = true};
    return tddp_shm_exchange(shm, op, &pattern);
}
