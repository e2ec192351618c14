/*
 * broadcast: all other ranks read the root's data, each at its own speed. If all ranks have
 * registered memory, each rank, the root included, copies a slice to all others. Runs on the
 * operation's thread; exchange.c moves the data.
 */
#include "backend/shm/exchange.h"

static tddp_buffer send_part(const tddp_op *op, int rank, int peer)
{
    return rank == op->root && peer != rank ? op->input : tddp_shm_empty_buffer(op);
}

static tddp_buffer recv_part(const tddp_op *op, int rank, int peer)
{
    return peer == op->root && peer != rank ? op->output : tddp_shm_empty_buffer(op);
}

tddp_status tddp_shm_broadcast(tddp_shm *shm, const tddp_op *op)
{
    static const tddp_shm_pattern pattern = {send_part, recv_part, .uniform = true,
                                             .root_to_all = true};
    return tddp_shm_exchange(shm, op, &pattern);
}
