/* What the tests of NCCL's rules share: large sums, a second group, the device's state. */
#ifndef TDDP_TEST_NCCL_RULES_H
#define TDDP_TEST_NCCL_RULES_H

#include <sched.h>

#include <tddp/work.h>

#include "args.h"
#include "nccl/world.h"
#include "standin/standin.h"

enum { COUNT = 100 * 1000, DONE = 0 };

static inline void fill(float *data, float value)
{
    for (int i = 0; i < COUNT; i++) {
        data[i] = value;
    }
}

static inline tddp_work *begin_sum(tddp_group *group, float *data)
{
    tddp_work *work;
    CHECK_OK(
        tddp_all_reduce(group, on_device(data, COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    return work;
}

static inline void end(tddp_work *work)
{
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
}

static inline void await_kernels(int count)
{
    while (standin_kernels(0) != count) {
        (void)sched_yield();
    }
}

static inline tddp_group *second_group(tddp_group *parent, tddp_store *store, int rank,
                                       int world_size)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "nccl";
    opts.store = store;
    opts.name = "second";
    opts.rank = rank;
    opts.world_size = world_size;
    opts.parent = parent;
    opts.timeout_ms = TIMEOUT_MS;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

#endif
