/*
 * What the memory cgroup counts on Linux: "oom_kill" in memory.events (version 2, with the groups
 * below it) or memory.oom_control (version 1). It grows before the signal is sent. Main thread.
 */
#include <stdlib.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "launch/workers/oom.h"

/* -1: the file does not tell. */
static long long read_count(const char *path)
{
    long long count;
    return tddp_scan_file(path, "oom_kill %lld", &count) ? count : -1;
}

/* The nearest group that counts. */
static bool find_counter(int version, const char *folder, void *data)
{
    char **counter = data;
    char *path =
        tddp_format("%s/%s", folder, version == 2 ? "memory.events" : "memory.oom_control");
    if (read_count(path) < 0) {
        free(path);
        return true;
    }
    *counter = path;
    return false;
}

void tddp_launch_oom_open(tddp_launch_oom *out, const char *root)
{
    *out = (tddp_launch_oom){0};
    tddp_cgroup_walk(root, "memory", find_counter, &out->counter);
    tddp_launch_oom_forget(out);
}

void tddp_launch_oom_forget(tddp_launch_oom *oom)
{
    oom->counted = read_count(oom->counter);
}

bool tddp_launch_oom_has_killed(tddp_launch_oom *oom)
{
    bool counted = oom->counted >= 0 && read_count(oom->counter) > oom->counted;
    oom->counted += counted;
    return counted;
}

void tddp_launch_oom_close(tddp_launch_oom *oom)
{
    free(oom->counter);
    *oom = (tddp_launch_oom){0};
}
