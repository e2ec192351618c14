/*
 * reduce: all_reduce's algorithms with one rank that gets the result; the memory of the others
 * stays as it is. On the thread that runs the operation; may be left at any wait and entered again.
 */
#include "backend/shm/reduction.h"

tddp_status tddp_shm_reduce(tddp_shm *shm, const tddp_op *op)
{
    return tddp_shm_reduce_to(shm, op, op->root);
}
