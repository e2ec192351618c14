/*
 * The memory limits of this process's control groups: version 2 and version 1, each group and those
 * around it. Only reads files of the kernel. Any thread.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

enum { PATH_BYTES = 4096, LINE_BYTES = 1024 };

/* What the files of one version are called; version 1 says "no limit" with a number near 2^63. */
typedef struct dialect {
    const char *folder;
    const char *limit;
    const char *usage;
    const char *swap_limit;
    const char *swap_usage;
    const char *inactive; /* in memory.stat: pages of files, which the kernel takes away first */
    const char *active;
    bool swap_counts_memory; /* the swap files are of memory and swap together */
} dialect;

static const dialect VERSION_2 = {
    "/sys/fs/cgroup",      "memory.max",    "memory.current", "memory.swap.max",
    "memory.swap.current", "inactive_file", "active_file",    false};
static const dialect VERSION_1 = {"/sys/fs/cgroup/memory",       "memory.limit_in_bytes",
                                  "memory.usage_in_bytes",       "memory.memsw.limit_in_bytes",
                                  "memory.memsw.usage_in_bytes", "total_inactive_file",
                                  "total_active_file",           true};

/* Stands before /proc and /sys. A global because it stands in for the system's root. */
static const char *root_folder = "";

void tddp_cgroup_root(const char *root)
{
    root_folder = root;
}

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
static uint64_t read_number(const dialect *version, const char *group, const char *name)
{
    char path[PATH_BYTES];
    uint64_t number = UINT64_MAX;
    (void)snprintf(path, sizeof path, "%s%s%s/%s", root_folder, version->folder, group, name);
    FILE *file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%" SCNu64, &number) != 1 || number > INT64_MAX / 2) {
            number = UINT64_MAX;
        }
        (void)fclose(file);
    }
    return number;
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

static uint64_t file_pages(const dialect *version, const char *group)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s%s%s/memory.stat", root_folder, version->folder, group);
    return read_named(path, version->inactive, version->active);
}

static uint64_t free_swap(void)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/proc/meminfo", root_folder);
    return read_named(path, "SwapFree", "SwapFree") * 1024;
}

/* What a group with a limit may still take before the kernel has to end a process. */
static uint64_t left_in(const dialect *version, const char *group, uint64_t limit)
{
    uint64_t usage = read_number(version, group, version->usage);
    if (usage == UINT64_MAX) {
        return UINT64_MAX;
    }
    uint64_t files = file_pages(version, group);
    uint64_t left = difference(limit, difference(usage, files));
    uint64_t swap_limit = read_number(version, group, version->swap_limit);
    uint64_t swap_usage = read_number(version, group, version->swap_usage);
    uint64_t swap = difference(swap_limit, swap_usage == UINT64_MAX ? 0 : swap_usage);
    return least_of(sum_of(left, free_swap()),
                    sum_of(version->swap_counts_memory ? files : left, swap));
}

/* In a container the group's path may be the host's and lead nowhere; the root of what is mounted,
 * looked at last, has the container's limit then. `group` is cut. */
static void look_at(const dialect *version, char *group, tddp_memory_limit *out)
{
    for (;;) {
        uint64_t limit = read_number(version, group, version->limit);
        uint64_t left = limit == UINT64_MAX ? UINT64_MAX : left_in(version, group, limit);
        if (left < out->left) {
            out->bytes = limit;
            out->left = left;
            (void)snprintf(out->file, sizeof out->file, "%s%s/%s", version->folder, group,
                           version->limit);
        }
        char *slash = strrchr(group, '/');
        if (!slash) {
            return;
        }
        *slash = '\0';
    }
}

/* Whether a hierarchy of version 1 with these controllers ("cpu,cpuacct") is the memory's. */
static bool has_memory(const char *controllers)
{
    const char *at = strstr(controllers, "memory");
    return at && (at == controllers || at[-1] == ',') && (at[6] == ',' || at[6] == '\0');
}

void tddp_cgroup_memory(tddp_memory_limit *out)
{
    char line[PATH_BYTES - 256]; /* leaves room for names of files */
    *out = (tddp_memory_limit){.bytes = UINT64_MAX, .left = UINT64_MAX};
    (void)snprintf(line, sizeof line, "%s/proc/self/cgroup", root_folder);
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
        if (*controllers == '\0') {
            look_at(&VERSION_2, group, out);
        } else if (has_memory(controllers)) {
            look_at(&VERSION_1, group, out);
        }
    }
    if (file) {
        (void)fclose(file);
    }
}
