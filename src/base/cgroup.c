/*
 * This process's control groups, version 2 and version 1, each with those around it; and the limits
 * of these, of memory and of processor time. Only reads files of the kernel. Any thread.
 */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/scan_file.h"

enum { PATH_BYTES = 4096, LINE_BYTES = 1024 };

/* --- the groups ------------------------------------------------------------------------------ */

/* In a container the group's path may be the host's and lead nowhere; the root of what is mounted,
 * visited last, is the container's group then. `group` is cut. */
static bool climb(const char *mount, char *group, int version, tddp_cgroup_visit *visit, void *data)
{
    for (;;) {
        char folder[PATH_BYTES];
        (void)snprintf(folder, sizeof folder, "%s%s", mount, group);
        if (!visit(version, folder, data)) {
            return false;
        }
        char *slash = strrchr(group, '/');
        if (!slash) {
            return true;
        }
        *slash = '\0';
    }
}

/* Whether a hierarchy of version 1 has the controller among its own ("cpu,cpuacct"). */
static bool has_controller(const char *controllers, const char *wanted)
{
    size_t length = strlen(wanted);
    for (const char *at = controllers; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, wanted, length) == 0 && (at[length] == ',' || at[length] == '\0')) {
            return true;
        }
    }
    return false;
}

/* Lines are NUMBER:CONTROLLERS:GROUP, without controllers for version 2. */
static bool visit_line(const char *root, char *line, const char *controller,
                       tddp_cgroup_visit *visit, void *data)
{
    char mount[PATH_BYTES];
    line[strcspn(line, "\n")] = '\0';
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group) {
        return true;
    }
    *group++ = '\0';
    controllers++;
    if (*controllers == '\0') {
        (void)snprintf(mount, sizeof mount, "%s/sys/fs/cgroup", root);
        return climb(mount, group, 2, visit, data);
    }
    if (!has_controller(controllers, controller)) {
        return true;
    }
    (void)snprintf(mount, sizeof mount, "%s/sys/fs/cgroup/%s", root, controller);
    return climb(mount, group, 1, visit, data);
}

void tddp_cgroup_walk(const char *root, const char *controller, tddp_cgroup_visit *visit,
                      void *data)
{
    char line[PATH_BYTES];
    (void)snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
    FILE *file = fopen(line, "re");
    bool goes_on = true;
    while (file && goes_on && fgets(line, sizeof line, file)) {
        goes_on = visit_line(root, line, controller, visit, data);
    }
    if (file) {
        (void)fclose(file);
    }
}

/* Stands before /proc and /sys. A global because it stands in for the system's root. */
static const char *root_folder = "";

void tddp_cgroup_root(const char *root)
{
    root_folder = root;
}

/* --- memory ---------------------------------------------------------------------------------- */

/* The files of one version; version 1 expresses "no limit" by a number near 2^63. */
typedef struct dialect {
    const char *limit;
    const char *usage;
    const char *swap_limit;
    const char *swap_usage;
    const char *inactive; /* in memory.stat: pages of files, which the kernel takes away first */
    const char *active;
    bool swap_counts_memory; /* the swap files are of memory and swap together */
} dialect;

static const dialect VERSION_2 = {"memory.max",
                                  "memory.current",
                                  "memory.swap.max",
                                  "memory.swap.current",
                                  "inactive_file",
                                  "active_file",
                                  false};
static const dialect VERSION_1 = {"memory.limit_in_bytes",
                                  "memory.usage_in_bytes",
                                  "memory.memsw.limit_in_bytes",
                                  "memory.memsw.usage_in_bytes",
                                  "total_inactive_file",
                                  "total_active_file",
                                  true};

static uint64_t least_of(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t difference(uint64_t from, uint64_t what)
{
    return from > what ? from - what : 0;
}

static uint64_t sum_of(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* The number in a file; UINT64_MAX for "max", and where there is no such file. */
static uint64_t read_number(const char *folder, const char *name)
{
    char path[PATH_BYTES];
    uint64_t number = UINT64_MAX;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    bool found = tddp_scan_file(path, "%" SCNu64, &number);
    return found && number <= INT64_MAX / 2 ? number : UINT64_MAX;
}

/* The sum of the numbers behind two names, one a line: "name 12", "name: 12 kB". */
static uint64_t read_named(const char *path, const char *one, const char *other)
{
    char line[LINE_BYTES];
    char name[LINE_BYTES];
    uint64_t all = 0;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        uint64_t number;
        if (sscanf(line, "%1023[^: ]%*[: ]%" SCNu64, name, &number) == 2 &&
            (strcmp(name, one) == 0 || strcmp(name, other) == 0)) {
            all += number;
        }
    }
    if (file) {
        (void)fclose(file);
    }
    return all;
}

static uint64_t file_pages(const dialect *version, const char *folder)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/memory.stat", folder);
    return read_named(path, version->inactive, version->active);
}

static uint64_t free_swap(void)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/proc/meminfo", root_folder);
    return read_named(path, "SwapFree", "SwapFree") * 1024;
}

/* What a group with a limit may still take before the kernel has to end a process. */
static uint64_t left_in(const dialect *version, const char *folder, uint64_t limit)
{
    uint64_t usage = read_number(folder, version->usage);
    if (usage == UINT64_MAX) {
        return UINT64_MAX;
    }
    uint64_t files = file_pages(version, folder);
    uint64_t left = difference(limit, difference(usage, files));
    uint64_t swap_limit = read_number(folder, version->swap_limit);
    uint64_t swap_usage = read_number(folder, version->swap_usage);
    uint64_t swap = difference(swap_limit, swap_usage == UINT64_MAX ? 0 : swap_usage);
    return least_of(sum_of(left, free_swap()),
                    sum_of(version->swap_counts_memory ? files : left, swap));
}

static bool look_at(int number, const char *folder, void *data)
{
    tddp_memory_limit *out = data;
    const dialect *version = number == 2 ? &VERSION_2 : &VERSION_1;
    uint64_t limit = read_number(folder, version->limit);
    uint64_t left = limit == UINT64_MAX ? UINT64_MAX : left_in(version, folder, limit);
    if (left < out->left) {
        out->bytes = limit;
        out->left = left;
        (void)snprintf(out->file, sizeof out->file, "%s/%s", folder + strlen(root_folder),
                       version->limit);
    }
    return true;
}

void tddp_cgroup_memory(tddp_memory_limit *out)
{
    *out = (tddp_memory_limit){.bytes = UINT64_MAX, .left = UINT64_MAX};
    tddp_cgroup_walk(root_folder, "memory", look_at, out);
}

/* --- processor time -------------------------------------------------------------------------- */

/* Whole cores in `quota` microseconds each `period`, rounded up: half a core still runs one. */
static int cores_of(int64_t quota, int64_t period)
{
    if (quota <= 0 || period <= 0 || quota / period >= INT_MAX) {
        return INT_MAX;
    }
    return (int)(quota / period + (quota % period > 0));
}

/* The numbers of one file; 0 where there are none, as in "max 100000" and "-1". */
static void read_time(const char *folder, const char *name, int64_t *quota, int64_t *period)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    (void)tddp_scan_file(path, "%" SCNd64 " %" SCNd64, quota, period);
}

static bool take_cores(int version, const char *folder, void *data)
{
    int *least = data;
    int64_t quota = 0;
    int64_t period = 0;
    int64_t none = 0;
    if (version == 2) {
        read_time(folder, "cpu.max", &quota, &period);
    } else {
        read_time(folder, "cpu.cfs_quota_us", &quota, &none);
        read_time(folder, "cpu.cfs_period_us", &period, &none);
    }
    const int cores = cores_of(quota, period);
    *least = cores < *least ? cores : *least;
    return true;
}

int tddp_core_limit(void)
{
    int least = INT_MAX;
    tddp_cgroup_walk(root_folder, "cpu", take_cores, &least);
    return least;
}
