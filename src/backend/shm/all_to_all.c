/*
 * all_to_all: each rank sends a different part to each other rank. Parts may differ in size. Runs
 * on the operation's thread; exchange.c moves the data.
 */
#include "backend/shm/exchange.h"

static tddp_buffer send_part(const tddp_op *op, int rank, int peer)
{
    (void)rank;
    return op->input_parts[peer];
}

static tddp_buffer recv_part(const tddp_op *op, int rank, int peer)
{
    (void)rank;
    return op->output_parts[peer];
}

tddp_status tddp_shm_all_to_all(tddp_shm *shm, const tddp_op *op)
{
    static const tddp_shm_pattern pattern = {send_part, recv_part, .uniform = false};
    return tddp_shm_exchange(shm, op, &pattern);
}
