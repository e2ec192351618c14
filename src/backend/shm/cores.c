/*
 * Counts the cores that the ranks of a host may use together, and finds the size of their shared
 * cache. Each rank publishes what it knows in its control block, and all ranks compute the same
 * result.
 */
#include <string.h>
#include <unistd.h>

#include "backend/shm/control.h"

enum { DEFAULT_CACHE_BYTES = 8 * 1024 * 1024 };

void tddp_shm_publish_cores(tddp_shm_control *control)
{
    CPU_ZERO(&control->cores);
    if (sched_getaffinity(0, sizeof control->cores, &control->cores)) {
        /* More cores than the set can hold: enough for all ranks. */
        memset(&control->cores, 0xff, sizeof control->cores);
    }
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    control->cache_bytes = cache > 0 ? (uint64_t)cache : DEFAULT_CACHE_BYTES;
    control->core_limit = tddp_core_limit();
}

void tddp_shm_count_cores(tddp_shm *shm)
{
    cpu_set_t all;
    int limit = 0;
    uint64_t cache = UINT64_MAX;
    CPU_ZERO(&all);
    for (int rank = 0; rank < shm->size; rank++) {
        const tddp_shm_control *each = shm->peers[rank].control;
        CPU_OR(&all, &all, &each->cores);
        limit = each->core_limit > limit ? each->core_limit : limit;
        cache = each->cache_bytes < cache ? each->cache_bytes : cache;
    }
    int cores = CPU_COUNT(&all);
    cores = limit < cores ? limit : cores;
    cores = cores > 0 ? cores : 1;
    shm->ranks_per_core = (shm->size + cores - 1) / cores;
    shm->cache_bytes = (size_t)cache;
}
