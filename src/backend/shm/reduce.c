/*
 * reduce: the algorithms of all_reduce, with one rank that receives the result; the memory of the
 * others doesn't change. Runs on the operation's thread; can be left at any wait and resumed.
 */
#include "backend/shm/reduction.h"

tddp_status tddp_shm_reduce(tddp_shm *shm, const tddp_op *op)
{
    return tddp_shm_reduce_to(shm, op, op->root);
}
