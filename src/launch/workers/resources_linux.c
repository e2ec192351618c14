/*
 * Counts cores and GPUs by what Linux shows: the affinity mask, the cgroups' CPU limits (version 2,
 * each level up to the root, and version 1), and the NVIDIA driver's files. Only reads; one thread.
 */
#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/resources.h"

enum { PATH_BYTES = 4096, MOST_CORES = 65536 };

static int affinity_cores(void)
{
    /* The kernel refuses a set smaller than its own, so larger ones are tried. */
    for (size_t bits = 1024; bits <= MOST_CORES; bits *= 4) {
        cpu_set_t *set = CPU_ALLOC(bits);
        if (!set) {
            break;
        }
        size_t bytes = CPU_ALLOC_SIZE(bits);
        int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (count > 0) {
            return count;
        }
    }
    return 1;
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
    if (quota <= 0 || period <= 0 || quota / period >= MOST_CORES) {
        return MOST_CORES;
    }
    return (int)((quota + period - 1) / period);
}

static int limit_v2(const char *group)
{
    char path[PATH_BYTES];
    char line[128];
    long long quota;
    long long period;
    (void)snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2) {
        return quota_cores(quota, period);
    }
    return MOST_CORES; /* "max", or no such file: no limit here */
}

static int limit_v1(const char *group)
{
    char path[PATH_BYTES];
    char quota[64];
    char period[64];
    (void)snprintf(path, sizeof path, "/sys/fs/cgroup/cpu%s/cpu.cfs_quota_us", group);
    if (!read_line(path, quota, sizeof quota)) {
        return MOST_CORES;
    }
    (void)snprintf(path, sizeof path, "/sys/fs/cgroup/cpu%s/cpu.cfs_period_us", group);
    if (!read_line(path, period, sizeof period)) {
        return MOST_CORES;
    }
    return quota_cores(atoll(quota), atoll(period));
}

/* The smallest limit of a group and those around it. In a container the path may be the host's
 * and lead nowhere; the root of what is mounted, tried last, then holds the container's limit. */
static int tightest(char *group, int (*limit)(const char *group))
{
    int least = MOST_CORES;
    for (;;) {
        int cores = limit(group);
        least = cores < least ? cores : least;
        char *slash = strrchr(group, '/');
        if (!slash) {
            return least;
        }
        *slash = '\0';
    }
}

static int cgroup_cores(void)
{
    int least = MOST_CORES;
    char line[PATH_BYTES - 128];
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) {
            continue;
        }
        *group++ = '\0';
        controllers++;
        int cores = MOST_CORES;
        if (*controllers == '\0') {
            cores = tightest(group, limit_v2);
        } else if (strcmp(controllers, "cpu") == 0 || strncmp(controllers, "cpu,", 4) == 0) {
            cores = tightest(group, limit_v1);
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
    int cores = affinity_cores();
    int limit = cgroup_cores();
    return limit < cores ? limit : cores;
}

static bool is_device_number(const char *name)
{
    size_t digits = strspn(name, "0123456789");
    return digits > 0 && name[digits] == '\0';
}

static int count_entries(const char *folder, const char *prefix)
{
    int count = 0;
    size_t length = strlen(prefix);
    DIR *directory = opendir(folder);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        if (strncmp(entry->d_name, prefix, length) == 0 && entry->d_name[0] != '.') {
            count += length == 0 || is_device_number(entry->d_name + length);
        }
    }
    if (directory) {
        closedir(directory);
    }
    return count;
}

int tddp_launch_visible_devices(const char *text)
{
    int count = 0;
    for (const char *at = text; *at != '\0';) {
        at += strspn(at, " ");
        size_t length = strcspn(at, ",");
        /* CUDA takes indices and identifiers ("GPU-...", "MIG-...") and stops at anything else. */
        bool valid = (*at >= '0' && *at <= '9') || strncmp(at, "GPU-", 4) == 0 ||
                     strncmp(at, "MIG-", 4) == 0;
        if (!valid) {
            break;
        }
        count++;
        at += length + (at[length] == ',');
    }
    return count;
}

/* The entries of CUDA_VISIBLE_DEVICES where it is set, else the NVIDIA driver's devices. */
static int count_gpus(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible) {
        return tddp_launch_visible_devices(visible);
    }
    /* A container has device files for its own GPUs only, while the driver's folder shows all; but
     * device files may not have been made yet. */
    int devices = count_entries("/dev", "nvidia");
    return devices > 0 ? devices : count_entries("/proc/driver/nvidia/gpus", "");
}

tddp_status tddp_launch_count_processes(tddp_launch_process_count asked, int *out)
{
    int gpus = asked.kind == TDDP_LAUNCH_PROCESSES_GPU || asked.kind == TDDP_LAUNCH_PROCESSES_AUTO
                   ? count_gpus()
                   : 0;
    switch (asked.kind) {
    case TDDP_LAUNCH_PROCESSES_NUMBER:
        *out = asked.number;
        return TDDP_OK;
    case TDDP_LAUNCH_PROCESSES_CPU:
        *out = tddp_launch_cores();
        return TDDP_OK;
    case TDDP_LAUNCH_PROCESSES_AUTO:
        *out = gpus > 0 ? gpus : tddp_launch_cores();
        return TDDP_OK;
    case TDDP_LAUNCH_PROCESSES_XPU:
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nproc-per-node=xpu: GPUs of Intel are not supported; expected gpu, "
                         "cpu, auto or a number");
    case TDDP_LAUNCH_PROCESSES_GPU:
        break;
    }
    if (gpus == 0) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nproc-per-node=gpu: no GPU here (%s%s%s); expected at least one, or "
                         "--nproc-per-node=auto, cpu or a number",
                         visible ? "CUDA_VISIBLE_DEVICES=\"" : "no NVIDIA driver's devices found",
                         visible ? visible : "", visible ? "\"" : "");
    }
    *out = gpus;
    return TDDP_OK;
}
