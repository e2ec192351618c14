/*
 * Ranks as processes: the TCP store that the test's runner hosts, and groups over it. Ranks
 * exchange facts through the store.
 */
#ifndef TDDP_TEST_PROCESSES_H
#define TDDP_TEST_PROCESSES_H

#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "group/group.h"
#include "hosted_store.h"
#include "ranks.h"

static inline double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Ends this process at once, as a kill would, but well for the test's runner. */
static inline void die(void)
{
    syscall(SYS_exit_group, 0);
}

static inline tddp_group *open_group(const char *backend, const char *name, tddp_store *store,
                                     int rank, int world_size, int64_t timeout_ms,
                                     tddp_group *parent)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = backend;
    opts.name = name;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = timeout_ms;
    opts.parent = parent;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

/* "rank 2 (host b12, pid 4711)". */
static inline const char *name_of(tddp_group *group, int rank, char text[128])
{
    tddp_peer peer;
    CHECK_OK(tddp_group_peer(group, rank, &peer));
    CHECK_INT(snprintf(text, 128, "rank %d (host %s, pid %lld)", rank, peer.host,
                       (long long)peer.pid) < 128,
              1);
    return text;
}

/* Whether it is known here that the group has failed, on whatever rank. */
static inline int has_failed(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    int failed = group->failure != TDDP_OK;
    pthread_mutex_unlock(&group->mutex);
    return failed;
}

/* All ranks are there. */
static inline void meet(tddp_store *store, const char *what, int ranks)
{
    int64_t there;
    tddp_slice key = {what, strlen(what)};
    char done[64];
    snprintf(done, sizeof done, "%s done", what);
    CHECK_OK(tddp_store_add(store, key, 1, NULL, &there));
    if (there == ranks) {
        CHECK_OK(
            tddp_store_set(store, (tddp_slice){done, strlen(done)}, (tddp_slice){"1", 1}, NULL));
    }
    tddp_slice all = {done, strlen(done)};
    CHECK_OK(tddp_store_wait(store, &all, 1, NULL));
}

static inline void leave(tddp_group *group, tddp_store *store, int ranks)
{
    meet(store, "leave", ranks);
    tddp_group_release(group);
    tddp_store_release(store);
}

#endif
