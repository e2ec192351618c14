/* Barrier: nobody goes on before all have entered, which is what meeting is. On the thread that
 * runs the operation. */
#include "backend/shm/shm.h"

tddp_status tddp_shm_barrier(tddp_shm *shm, const tddp_op *op)
{
    tddp_shm_enter(shm, op, NULL, 0);
    return tddp_shm_meet(shm);
}
