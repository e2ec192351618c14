/* Several operations in flight at once, and several groups. */
#include "world.h"

MULTI_TEST(many_operations_under_way, 2, 30)
{
    enum { COUNT = 60, SIZE = 30000 };
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    static float data[COUNT][SIZE];
    tddp_work *works[COUNT];
    for (int k = 0; k < COUNT; k++) {
        size_t count = k % 2 ? SIZE : 100;
        for (size_t i = 0; i < count; i++) {
            data[k][i] = (float)(k + rank);
        }
        CHECK_OK(tddp_all_reduce(group, buffer_of(data[k], count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                                 &works[k]));
    }
    for (int k = 0; k < COUNT; k++) {
        CHECK_OK(tddp_work_wait(works[k], NULL));
        CHECK_DOUBLE(data[k][99], 2 * k + 1, 0);
        tddp_work_release(works[k]);
    }
    leave(group, store);
}

MULTI_TEST(groups_one_after_the_other_and_side_by_side, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    for (int i = 0; i < 2; i++) {
        tddp_group *group = open_group(store, rank, world_size, 20000);
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        opts.backend = WORLD_BACKEND;
        opts.store = store;
        opts.name = "second";
        opts.rank = 1 - rank;
        opts.world_size = world_size;
        tddp_group *other;
        CHECK_OK(tddp_group_create(&opts, NULL, &other));
        int32_t x = rank;
        CHECK_OK(tddp_broadcast(other, buffer_of(&x, 1, TDDP_INT32), 0, NULL));
        CHECK_INT(x, 1);
        CHECK_OK(tddp_barrier(group, NULL));
        tddp_group_release(group);
        tddp_group_release(other);
        /* The store outlives this round on both ranks. */
        tddp_group *last = NULL;
        opts.name = i ? "end" : "middle";
        CHECK_OK(tddp_group_create(&opts, NULL, &last));
        CHECK_OK(tddp_barrier(last, NULL));
        tddp_group_release(last);
    }
    tddp_store_release(store);
}
