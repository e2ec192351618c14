/*
 * Ranks as threads of one process, sharing a hash store: run_ranks(3, body, data) calls
 * body(rank, world_size, store, data) on three threads and waits for them.
 */
#ifndef TDDP_TEST_RANKS_H
#define TDDP_TEST_RANKS_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <tddp.h>
#include <unistd.h>

#include "check.h"
#include "group/group.h"

enum { MAX_RANKS = 8 };

typedef void (*rank_body)(int rank, int world_size, tddp_store *store, void *data);

typedef struct rank_thread {
    int rank;
    int world_size;
    tddp_store *store;
    rank_body body;
    void *data;
} rank_thread;

static inline void *run_rank(void *argument)
{
    rank_thread *self = argument;
    self->body(self->rank, self->world_size, self->store, self->data);
    return NULL;
}

static inline void run_ranks(int world_size, rank_body body, void *data)
{
    pthread_t threads[MAX_RANKS];
    rank_thread selves[MAX_RANKS];
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(20000, &store));
    for (int rank = 0; rank < world_size; rank++) {
        selves[rank] = (rank_thread){rank, world_size, store, body, data};
        CHECK_INT(pthread_create(&threads[rank], NULL, run_rank, &selves[rank]), 0);
    }
    for (int rank = 0; rank < world_size; rank++) {
        CHECK_INT(pthread_join(threads[rank], NULL), 0);
    }
    tddp_store_release(store);
}

/* For tests of messages with a thread each: the backend "fake" over one that tells no events, which
 * is Gloo, where that is. */
static inline void go_over_blocking(void)
{
    static tddp_backend_v1 blocking;
    const tddp_backend_v1 *gloo;
    if (tddp_backend_find("gloo", &gloo)) {
        check_skip(tddp_error_message());
    }
    blocking = *gloo;
    blocking.name = "blocking";
    blocking.traits = 0; /* it does not share hosts */
    blocking.events = NULL;
    CHECK_OK(tddp_backend_register(&blocking));
    setenv("TDDP_FAKE", "over=blocking", 1);
}

/* The time of its operations from now on. */
static inline void limit_to(tddp_group *group, int64_t ms)
{
    CHECK_OK(tddp_group_set_timeout(group, ms));
}

static inline tddp_group *make_group(const char *backend, int rank, int world_size,
                                     tddp_store *store, int64_t timeout_ms)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = backend;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 20000; /* a rank may come late to this */
    tddp_group *group;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    limit_to(group, timeout_ms);
    return group;
}

/* A group of one over the `fake` backend, which gets `faults` as TDDP_FAKE; NULL: what is set. */
static inline tddp_group *lone_group(const char *faults, int64_t timeout_ms, tddp_store **store)
{
    if (faults) {
        setenv("TDDP_FAKE", faults, 1);
    }
    CHECK_OK(tddp_hash_store_create(5000, store));
    return make_group("fake", 0, 1, *store, timeout_ms);
}

static inline void drop(tddp_group *group, tddp_store *store)
{
    tddp_group_release(group);
    tddp_store_release(store);
}

static inline tddp_buffer buffer_of(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){data, count, dtype, TDDP_CPU, 0, NULL};
}

/* A callback that ends only after its group has begun to end. */
static inline void await_ending(void *data)
{
    tddp_group *group = data;
    bool ending = false;
    while (!ending) {
        pthread_mutex_lock(&group->mutex);
        ending = group->state >= TDDP_GROUP_ENDING;
        pthread_mutex_unlock(&group->mutex);
        usleep(200);
    }
}

#endif
