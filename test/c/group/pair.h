/*
 * Two ranks of one group, both in the hands of one thread: it sends on one end and receives on the
 * other.
 */
#ifndef TDDP_TEST_PAIR_H
#define TDDP_TEST_PAIR_H

#include "ranks.h"

typedef struct pair {
    tddp_store *store;
    tddp_group *groups[2];
    int64_t timeout_ms;
} pair;

static inline void *make_one(void *data)
{
    pair *self = data;
    self->groups[1] = make_group("fake", 1, 2, self->store, self->timeout_ms);
    return NULL;
}

static inline pair make_pair(int64_t timeout_ms)
{
    pair self = {.timeout_ms = timeout_ms};
    pthread_t thread;
    CHECK_OK(tddp_hash_store_create(20000, &self.store));
    CHECK_INT(pthread_create(&thread, NULL, make_one, &self), 0);
    self.groups[0] = make_group("fake", 0, 2, self.store, timeout_ms);
    CHECK_INT(pthread_join(thread, NULL), 0);
    return self;
}

static inline void drop_pair(pair *self)
{
    tddp_group_release(self->groups[0]);
    tddp_group_release(self->groups[1]);
    tddp_store_release(self->store);
}

#endif
