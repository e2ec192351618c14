/*
 * Broadcast: all others read what the root gives, each at its own pace; where all have registered
 * memory each rank, the root too, carries a slice to all others. On the thread that runs the
 * operation. The ways are in exchange.c.
 */
#include "backend/shm/exchange.h"

static tddp_buffer given(const tddp_op *op, int rank, int peer)
{
    return rank == op->root && peer != rank ? op->input : tddp_shm_nothing(op);
}

static tddp_buffer wanted(const tddp_op *op, int rank, int peer)
{
    return peer == op->root && peer != rank ? op->output : tddp_shm_nothing(op);
}

tddp_status tddp_shm_broadcast(tddp_shm *shm, const tddp_op *op)
{
    static const tddp_shm_pattern pattern = {given, wanted, .whole = true, .spreads = true};
    return tddp_shm_exchange(shm, op, &pattern);
}
