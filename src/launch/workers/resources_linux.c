/*
 * Counts cores by what Linux shows: the affinity mask, and the cgroups' CPU limits (version 2, each
 * level up to the root, and version 1). Only reads; one thread.
 */
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/resources.h"

enum { PATH_BYTES = 4096, MOST_CORES = 65536 };

int *tddp_launch_allowed_cpus(int *count)
{
    /* The kernel refuses a set smaller than its own, so larger ones are tried. */
    for (size_t bits = 1024; bits <= MOST_CORES; bits *= 4) {
        cpu_set_t *set = CPU_ALLOC(bits);
        size_t bytes = CPU_ALLOC_SIZE(bits);
        int *list = tddp_alloc_array(bits, sizeof *list);
        int found = 0;
        if (set && list && sched_getaffinity(0, bytes, set) == 0) {
            for (size_t cpu = 0; cpu < bits; cpu++) {
                if (CPU_ISSET_S(cpu, bytes, set)) {
                    list[found++] = (int)cpu;
                }
            }
        }
        CPU_FREE(set);
        if (found > 0) {
            *count = found;
            return list;
        }
        free(list);
    }
    (void)tddp_fail_errno("sched_getaffinity");
    return NULL;
}

/* The first line of a file without its newline; false if it cannot be read. */
static bool read_line(const char *path, char *line, int bytes)
{
    FILE *file = fopen(path, "re");
    bool got = file && fgets(line, bytes, file);
    if (got) {
        line[strcspn(line, "\n")] = '\0';
    }
    if (file) {
        fclose(file);
    }
    return got;
}

/* Whole cores in `quota` microseconds each `period`, rounded up: half a core still runs one. */
static int quota_cores(long long quota, long long period)
{
    if (quota <= 0 || period <= 0 || quota / period >= INT_MAX) {
        return INT_MAX;
    }
    return (int)((quota + period - 1) / period);
}

static int limit_v2(const char *folder)
{
    char path[PATH_BYTES];
    char line[128];
    long long quota;
    long long period;
    (void)snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2) {
        return quota_cores(quota, period);
    }
    return INT_MAX; /* "max", or no such file: no limit here */
}

static int limit_v1(const char *folder)
{
    char path[PATH_BYTES];
    char quota[64];
    char period[64];
    (void)snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (!read_line(path, quota, sizeof quota)) {
        return INT_MAX;
    }
    (void)snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (!read_line(path, period, sizeof period)) {
        return INT_MAX;
    }
    return quota_cores(atoll(quota), atoll(period));
}

static bool take_limit(int version, const char *folder, void *data)
{
    int *least = data;
    int cores = version == 2 ? limit_v2(folder) : limit_v1(folder);
    *least = cores < *least ? cores : *least;
    return true;
}

int tddp_launch_cpu_limit(const char *root)
{
    int least = INT_MAX;
    tddp_cgroup_walk(root, "cpu", take_limit, &least);
    return least;
}

int tddp_launch_cores(void)
{
    int cores = 1;
    free(tddp_launch_allowed_cpus(&cores)); /* where the system does not tell, one it is */
    int limit = tddp_launch_cpu_limit("");
    return limit < cores ? limit : cores;
}
