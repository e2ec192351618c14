/* A rank's store and group, for tests in which ranks leave or die. */
#ifndef TDDP_TEST_FIXTURE_H
#define TDDP_TEST_FIXTURE_H

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "events.h"
#include "world.h"

typedef struct world {
    tddp_store *store;
    tddp_group *group;
} world;

/* Returns when all ranks have arrived. */
static inline world open_world(int rank, int world_size, int port, int64_t timeout_ms)
{
    tddp_store *store = open_store(rank, world_size, port);
    return (world){store, open_group(store, rank, world_size, timeout_ms)};
}

/* Waits for all others. */
static inline void close_world(world it)
{
    leave(it.group, it.store);
}

/* For failed groups, and for ranks that leave before the others. */
static inline void abandon_world(world it)
{
    tddp_group_release(it.group);
    tddp_store_release(it.store);
}

/* Ends this process at once, like a kill, but successfully for the test's runner. _exit would
 * let a sanitizer run, with the connections open. */
static inline void die(void)
{
    syscall(SYS_exit_group, 0);
}

static inline double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static inline tddp_buffer bytes_of(void *data, size_t bytes)
{
    return buffer_of(data, bytes, TDDP_UINT8);
}

static inline tddp_work *post_send(tddp_group *group, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_send(group, buffer, peer, tag, &work));
    return work;
}

static inline tddp_work *post_recv(tddp_group *group, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_recv(group, buffer, peer, tag, &work));
    return work;
}

/* Waits for a work, releases it and returns its outcome. */
static inline tddp_status end(tddp_work *work)
{
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

static inline int wait_for_source(tddp_work *work)
{
    CHECK_OK(tddp_work_wait(work, NULL));
    int source = tddp_work_source(work);
    tddp_work_release(work);
    return source;
}

#endif
