/*
 * Collectives over Gloo that only move data, beyond what random sequences (test/c/sequences) do:
 * eight ranks, large data, late ranks.
 */
#include <time.h>

#include "moving.h"
#include "world.h"

static mover open_mover(int rank, int world_size, int port, int64_t timeout_ms, tddp_store **store)
{
    *store = open_store(rank, world_size, port);
    return (mover){.group = open_group(*store, rank, world_size, timeout_ms),
                   .rank = rank,
                   .size = world_size,
                   .dtype = TDDP_FLOAT32};
}

MULTI_TEST(eight_ranks, 8, 110)
{
    static const size_t counts[] = {0, 1, 1001, 16385, 100003};
    tddp_store *store;
    mover it = open_mover(rank, world_size, port, 60000, &store);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        moving_all(&it, counts[i], TDDP_FLOAT32);
    }
    leave(it.group, store);
}

/* More than two chunks for each rank that forwards them. */
MULTI_TEST(a_large_broadcast, 4, 60)
{
    tddp_store *store;
    mover it = open_mover(rank, world_size, port, 60000, &store);
    it.dtype = TDDP_UINT8;
    it.count = 5000011;
    for (int root = 0; root < world_size; root++) {
        moving_broadcast(&it, root);
    }
    leave(it.group, store);
}

/* Each rank in turn is late, while the others continue as far as they can. */
MULTI_TEST(late_ranks, 3, 60)
{
    tddp_store *store;
    mover it = open_mover(rank, world_size, port, 20000, &store);
    for (int i = 0; i < 30; i++) {
        if (i % 3 == rank) {
            nanosleep(&(struct timespec){0, 3000000}, NULL);
        }
        it.count = i % 2 ? 100 : 50000;
        moving_scatter(&it, moving_by_receiver, i % 3);
        moving_gather(&it, moving_by_sender, (i + 1) % 3);
        for (int root = 0; root < world_size; root++) {
            moving_broadcast(&it, root);
        }
    }
    leave(it.group, store);
}
