/* Operations on copies of a device's memory that nobody waits for: the end of the copies is an
 * event for the thread that goes on with them, which looks at nothing by itself here. With CUDA's
 * stand-in.
 */
#include <tddp/cuda.h>

#include "events.h"
#include "ranks.h"
#include "standin/standin.h"

enum { COUNT = 5000 };

static atomic_bool may_go_on;

/* Stands for a program's work before the operation. */
static void hold_stream(void *data)
{
    (void)data;
    CHECK_UNTIL(atomic_load(&may_go_on));
}

static void reduce_unawaited(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    const tddp_cuda *cuda;
    tddp_cuda_stream stream;
    static float values[MAX_RANKS][COUNT];
    tddp_work *work;
    CHECK_OK(tddp_cuda_get(&cuda));
    CHECK_INT(cuda->cudaStreamCreateWithPriority(&stream, TDDP_CUDA_NON_BLOCKING, 0), 0);
    tddp_group *group = make_group("shm", rank, world_size, store, 20000);
    for (int i = 0; i < COUNT; i++) {
        values[rank][i] = (float)(rank + i);
    }
    standin_put(stream, hold_stream, NULL);
    const tddp_buffer buffer = {values[rank], COUNT, TDDP_FLOAT32, TDDP_CUDA, 0, stream};
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, &work));
    CHECK_INT(tddp_work_completed(work), 0);
    if (rank == 0) {
        atomic_store(&may_go_on, true);
    }
    CHECK_UNTIL(tddp_work_completed(work));
    CHECK_OK(tddp_work_status(work));
    for (int i = 0; i < COUNT; i++) {
        CHECK_DOUBLE((double)values[rank][i], 2 * i + 1, 0);
    }
    tddp_work_release(work);
    tddp_group_shutdown(group, 20000);
    tddp_group_release(group);
    CHECK_INT(cuda->cudaStreamDestroy(stream), 0);
}

MULTI_TEST(nobody_waits_for_copies, 1, 60)
{
    tddp_engine_look_ns = 3600 * TDDP_NS_PER_S;
    for (int turn = 0; turn < 5; turn++) {
        atomic_store(&may_go_on, false);
        run_ranks(2, reduce_unawaited, NULL);
    }
}
