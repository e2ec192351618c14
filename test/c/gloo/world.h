/* A rank's group over Gloo and the TCP store that rank 0 hosts. */
#ifndef TDDP_TEST_WORLD_H
#define TDDP_TEST_WORLD_H

#include "hosted_store.h"

static inline tddp_group *open_group(tddp_store *store, int rank, int world_size,
                                     int64_t timeout_ms)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "gloo";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = timeout_ms;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

/* Rank 0 hosts the store: it leaves last. */
static inline void leave(tddp_group *group, tddp_store *store)
{
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
    tddp_store_release(store);
}

static inline tddp_buffer buffer_of(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){data, count, dtype, TDDP_CPU, 0, NULL};
}

#endif
