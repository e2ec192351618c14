/* Groups of a test's ranks, over the store that the ranks' parent hosts. */
#ifndef TDDP_TEST_HOSTED_GROUP_H
#define TDDP_TEST_HOSTED_GROUP_H

#include "hosted_store.h"

/* Group `name` (NULL: the default one), in which this rank is `rank`. */
static inline tddp_group *join_as(const char *backend, const char *name, int rank, int world_size,
                                  int port)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = NULL;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = backend;
    opts.name = name;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 20000;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    tddp_store_release(store);
    return group;
}

/* All ranks of the test. */
static inline tddp_group *join(const char *backend, int rank, int world_size, int port)
{
    return join_as(backend, NULL, rank, world_size, port);
}

/* Shuts the group down after a barrier. */
static inline void leave(tddp_group *group)
{
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_shutdown(group, 5000);
    tddp_group_release(group);
}

#endif
