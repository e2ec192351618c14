/*
 * Counts the cores that the ranks of a host may use together, and finds the size of their shared
 * cache. Each rank publishes what it knows in its control block, and all ranks compute the same
 * result.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/shm/control.h"

enum { DEFAULT_CACHE_BYTES = 8 * 1024 * 1024, LINE_BYTES = 4096 };

/* Parses "200000 100000" or "max 100000" to thousandths of a core; 0: no limit, or no such file. */
static uint64_t quota_of(const char *directory)
{
    char path[LINE_BYTES + 64];
    unsigned long long quota = 0;
    unsigned long long period = 0;
    (void)snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", directory);
    FILE *file = fopen(path, "re");
    int found = file ? fscanf(file, "%llu %llu", &quota, &period) : 0;
    if (file) {
        (void)fclose(file);
    }
    return found == 2 && period > 0 ? quota * 1000 / period : 0;
}

/* The smallest quota of this process's control group and its ancestors. */
static uint64_t core_quota(void)
{
    char line[LINE_BYTES] = "";
    uint64_t min_quota = 0;
    FILE *file = fopen("/proc/self/cgroup", "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        found = strncmp(line, "0::/", 4) == 0;
    }
    if (file) {
        (void)fclose(file);
    }
    char *directory = found ? line + 3 : line;
    directory[found ? strcspn(directory, "\n") : 0] = 0;
    for (;;) {
        char *slash = strrchr(directory, '/');
        uint64_t quota = quota_of(slash == directory && !directory[1] ? "" : directory);
        min_quota = quota > 0 && (min_quota == 0 || quota < min_quota) ? quota : min_quota;
        if (!slash) {
            return min_quota;
        }
        *slash = 0;
    }
}

void tddp_shm_publish_cores(tddp_shm_control *control)
{
    CPU_ZERO(&control->cores);
    if (sched_getaffinity(0, sizeof control->cores, &control->cores)) {
        /* More cores than the set can hold: enough for all ranks. */
        memset(&control->cores, 0xff, sizeof control->cores);
    }
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    control->cache_bytes = cache > 0 ? (uint64_t)cache : DEFAULT_CACHE_BYTES;
    control->core_quota = core_quota();
}

void tddp_shm_count_cores(tddp_shm *shm)
{
    cpu_set_t all;
    uint64_t quota = 0;
    uint64_t cache = UINT64_MAX;
    CPU_ZERO(&all);
    for (int rank = 0; rank < shm->size; rank++) {
        const tddp_shm_control *each = shm->peers[rank].control;
        CPU_OR(&all, &all, &each->cores);
        quota = each->core_quota > quota ? each->core_quota : quota;
        cache = each->cache_bytes < cache ? each->cache_bytes : cache;
    }
    int cores = CPU_COUNT(&all);
    if (quota > 0 && (quota + 999) / 1000 < (uint64_t)cores) {
        cores = (int)((quota + 999) / 1000);
    }
    cores = cores > 0 ? cores : 1;
    shm->ranks_per_core = (shm->size + cores - 1) / cores;
    shm->cache_bytes = (size_t)cache;
}
