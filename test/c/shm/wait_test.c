/* Entering operations, waiting for all ranks, and steps. */
#include "ranks.h"

static void syncs(shm_rank *it)
{
    for (int i = 0; i < 1000; i++) {
        tddp_op op = shm_op(it, TDDP_OP_BARRIER);
        int64_t mine = it->rank * 1000 + i;
        op.awaited = i % 3 != 0;
        tddp_shm_enter(it->shm, &op, &mine, sizeof mine);
        CHECK_OK(tddp_shm_sync(it->shm));
        for (int rank = 0; rank < it->size; rank++) {
            int64_t theirs;
            memcpy(&theirs, tddp_shm_payload(it->shm, rank), sizeof theirs);
            CHECK_INT(theirs, rank * 1000 + i);
        }
    }
}

SHM_TEST(payload_travels_with_the_call, syncs)

/* What is staged before the sync is visible after it, and what is published after it once the
 * step was awaited. */
static void steps(shm_rank *it)
{
    for (int i = 0; i < 200; i++) {
        tddp_op op = shm_op(it, TDDP_OP_BARRIER);
        tddp_shm_enter(it->shm, &op, NULL, 0);
        int32_t *mine = tddp_shm_staging(it->shm, it->rank);
        mine[0] = it->rank + i;
        mine[1000] = 0;
        tddp_shm_publish_step(it->shm, 1);
        CHECK_OK(tddp_shm_sync(it->shm));
        CHECK_OK(tddp_shm_wait_step_all(it->shm, 1));
        int32_t sum = 0;
        for (int rank = 0; rank < it->size; rank++) {
            sum += *(int32_t *)tddp_shm_staging(it->shm, rank);
        }
        CHECK_INT(sum, it->size * (it->size - 1) / 2 + it->size * i);
        mine[1000] = sum;
        tddp_shm_publish_step(it->shm, 7);
        for (int rank = it->size - 1; rank >= 0; rank--) {
            CHECK_OK(tddp_shm_wait_step(it->shm, rank, 7));
            CHECK_INT(((int32_t *)tddp_shm_staging(it->shm, rank))[1000], sum);
        }
    }
}

SHM_TEST(steps_are_awaited, steps)
