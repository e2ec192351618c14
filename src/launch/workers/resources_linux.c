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

static int limit_v2(const char *root, const char *group)
{
    char path[PATH_BYTES];
    char line[128];
    long long quota;
    long long period;
    (void)snprintf(path, sizeof path, "%s/sys/fs/cgroup%s/cpu.max", root, group);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2) {
        return quota_cores(quota, period);
    }
    return INT_MAX; /* "max", or no such file: no limit here */
}

static int limit_v1(const char *root, const char *group)
{
    char path[PATH_BYTES];
    char quota[64];
    char period[64];
    (void)snprintf(path, sizeof path, "%s/sys/fs/cgroup/cpu%s/cpu.cfs_quota_us", root, group);
    if (!read_line(path, quota, sizeof quota)) {
        return INT_MAX;
    }
    (void)snprintf(path, sizeof path, "%s/sys/fs/cgroup/cpu%s/cpu.cfs_period_us", root, group);
    if (!read_line(path, period, sizeof period)) {
        return INT_MAX;
    }
    return quota_cores(atoll(quota), atoll(period));
}

/* The smallest limit of a group and those around it. In a container the path may be the host's
 * and lead nowhere; the root of what is mounted, tried last, then holds the container's limit. */
static int tightest(const char *root, char *group,
                    int (*limit)(const char *root, const char *group))
{
    int least = INT_MAX;
    for (;;) {
        int cores = limit(root, group);
        least = cores < least ? cores : least;
        char *slash = strrchr(group, '/');
        if (!slash) {
            return least;
        }
        *slash = '\0';
    }
}

/* Whether "cpu" is one of the controllers of a version 1 hierarchy, such as "cpu,cpuacct". */
static bool has_cpu(const char *controllers)
{
    for (const char *at = controllers; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, "cpu", 3) == 0 && (at[3] == ',' || at[3] == '\0')) {
            return true;
        }
    }
    return false;
}

int tddp_launch_cpu_limit(const char *root)
{
    int least = INT_MAX;
    char line[PATH_BYTES - 128];
    (void)snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
    FILE *file = fopen(line, "re");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) {
            continue;
        }
        *group++ = '\0';
        controllers++;
        int cores = INT_MAX;
        if (*controllers == '\0') {
            cores = tightest(root, group, limit_v2);
        } else if (has_cpu(controllers)) {
            cores = tightest(root, group, limit_v1);
        }
        least = cores < least ? cores : least;
    }
    if (file) {
        fclose(file);
    }
    return least;
}

int tddp_launch_cores(void)
{
    int cores = 1;
    free(tddp_launch_allowed_cpus(&cores)); /* where the system does not tell, one it is */
    int limit = tddp_launch_cpu_limit("");
    return limit < cores ? limit : cores;
}
