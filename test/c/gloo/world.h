/* A rank's group over Gloo, or another backend, and the TCP store that the test's runner hosts. */
#ifndef TDDP_TEST_WORLD_H
#define TDDP_TEST_WORLD_H

#include <string.h>

#include "hosted_store.h"

#ifndef WORLD_BACKEND
#define WORLD_BACKEND "gloo"
#endif

/* What is only so with Gloo itself: how an interface is chosen, and that even a small send waits
 * for its receive. */
static inline void for_gloo_alone(void)
{
    if (strcmp(WORLD_BACKEND, "gloo") != 0) {
        check_skip("only so with Gloo");
    }
}

/* Sets the timeout of later operations. Call it after the ranks have synchronised, since a rank
 * may be late to that. */
static inline void limit_to(tddp_group *group, int64_t ms)
{
    CHECK_OK(tddp_group_set_timeout(group, ms));
}

static inline tddp_group *open_group(tddp_store *store, int rank, int world_size,
                                     int64_t timeout_ms)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = WORLD_BACKEND;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = timeout_ms;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

/* With all others: a rank that has finished may still have data to forward. */
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
