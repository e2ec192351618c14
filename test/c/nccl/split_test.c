/*
 * Groups created from a group that is bound to a GPU: their communicators are split from its own.
 * With stand-ins for NCCL and CUDA.
 */
#include "nccl/world.h"
#include "standin/standin.h"

static tddp_group *open_part(tddp_group *parent, tddp_store *store, const char *name, int rank,
                             int world_size)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = tddp_group_backend(parent);
    opts.name = name;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = TIMEOUT_MS;
    opts.device_index = 0;
    opts.device_bound = 1;
    opts.parent = parent;
    opts.split = 1;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

static float sum_of(tddp_group *group, float value)
{
    float data[3] = {value, value, value};
    CHECK_OK(tddp_all_reduce(group, on_device(data, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    CHECK_DOUBLE((double)data[0], (double)data[2], 0);
    return data[1];
}

/* Two subgroups, one after the other, and one of all ranks. */
MULTI_TEST(parts_of_a_group, 4, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    /* NCCL isn't asked for an id. */
    standin_fail_next("ncclGetUniqueId", TDDP_NCCL_SYSTEM_ERROR);
    CHECK_DOUBLE((double)sum_of(group, (float)rank), 6, 0);
    tddp_group *parts[2] = {NULL, NULL};
    for (int part = 0; part < 2; part++) {
        if (rank % 2 == part) {
            parts[part] = open_part(group, store, part ? "odd" : "even", rank / 2, 2);
        } else {
            CHECK_OK(tddp_group_decline(group, NULL));
        }
    }
    tddp_group *all = open_part(group, store, "all", rank, world_size);
    CHECK_DOUBLE((double)sum_of(parts[rank % 2], (float)rank), rank % 2 ? 4 : 2, 0);
    CHECK_DOUBLE((double)sum_of(all, 1), 4, 0);
    CHECK_DOUBLE((double)sum_of(group, (float)rank), 6, 0);
    standin_fail_next(NULL, 0);
    tddp_group_shutdown(parts[rank % 2], 1000);
    tddp_group_release(parts[rank % 2]);
    tddp_group_shutdown(all, 1000);
    tddp_group_release(all);
    leave(group, store);
}

/* The same for a group with both kinds of devices. */
MULTI_TEST(parts_of_a_group_for_host_and_device, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "cpu:shm,cuda:nccl";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.device_index = 0;
    opts.device_bound = 1;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    standin_fail_next("ncclGetUniqueId", TDDP_NCCL_SYSTEM_ERROR);
    tddp_group *all = open_part(group, store, "all", rank, world_size);
    CHECK_DOUBLE((double)sum_of(all, (float)rank), 1, 0);
    standin_fail_next(NULL, 0);
    tddp_group_shutdown(all, 1000);
    tddp_group_release(all);
    leave(group, store);
}

MULTI_TEST(an_unbound_group_is_not_split, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    if (rank == 0) {
        tddp_group *own = open_part(group, store, "own", 0, 1);
        CHECK_DOUBLE((double)sum_of(own, 5), 5, 0);
        tddp_group_shutdown(own, 1000);
        tddp_group_release(own);
    } else {
        CHECK_OK(tddp_group_decline(group, NULL));
    }
    CHECK_DOUBLE((double)sum_of(group, 1), 2, 0);
    leave(group, store);
}

MULTI_TEST(a_split_that_fails, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    standin_fail_next("ncclCommSplit", TDDP_NCCL_INTERNAL_ERROR);
    CHECK_STATUS(tddp_group_decline(group, NULL), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "ncclCommSplit: internal error");
    leave(group, store);
}
