/*
 * scatter: the root sends a different part to each rank. Parts may differ in size. Runs on the
 * operation's thread; exchange.c moves the data.
 */
#include "backend/shm/exchange.h"

static tddp_buffer send_part(const tddp_op *op, int rank, int peer)
{
    return rank == op->root ? op->input_parts[peer] : tddp_shm_empty_buffer(op);
}

static tddp_buffer recv_part(const tddp_op *op, int rank, int peer)
{
    (void)rank;
    return peer == op->root ? op->output : tddp_shm_empty_buffer(op);
}

tddp_status tddp_shm_scatter(tddp_shm *shm, const tddp_op *op)
{
    static const tddp_shm_pattern pattern = {send_part, recv_part, .uniform = false};
    return tddp_shm_exchange(shm, op, &pattern);
}
