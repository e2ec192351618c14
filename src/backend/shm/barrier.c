/* barrier: returns when all ranks have entered. Runs on the operation's thread. */
#include "backend/shm/shm.h"

tddp_status tddp_shm_barrier(tddp_shm *shm, const tddp_op *op)
{
    tddp_shm_enter(shm, op, NULL, 0);
    return tddp_shm_sync(shm);
}
