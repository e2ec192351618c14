/*
 * The out-of-memory killer's traces on Linux. The count is of the memory cgroup: "oom_kill" in
 * memory.events (version 2, with the groups below it) or memory.oom_control (version 1); it grows
 * before the signal is sent. The log, /dev/kmsg, names the process by its number in the first pid
 * namespace, so it says nothing to a container. Main thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/workers/oom.h"

enum { PATH_BYTES = 4096, RECORD_BYTES = 8192, MOST_RECORDS = 100000 };

/* --- the count ------------------------------------------------------------------------------- */

/* -1: the file does not tell. */
static long long read_count(const char *path)
{
    char line[256];
    long long count = -1;
    FILE *file = path ? fopen(path, "re") : NULL;
    while (file && count < 0 && fgets(line, sizeof line, file)) {
        if (sscanf(line, "oom_kill %lld", &count) != 1) {
            count = -1;
        }
    }
    if (file) {
        fclose(file);
    }
    return count;
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

static char *choose_counter(const char *root)
{
    char *counter = NULL;
    tddp_cgroup_walk(root, "memory", find_counter, &counter);
    return counter;
}

/* --- the log --------------------------------------------------------------------------------- */

/* Whether numbers of processes here are those of the kernel's log. */
static bool is_first_pid_namespace(const char *root)
{
    static const char first[] = "pid:[4026531836]";
    char path[PATH_BYTES];
    char target[64];
    (void)snprintf(path, sizeof path, "%s/proc/self/ns/pid", root);
    ssize_t length = readlink(path, target, sizeof target);
    return length == sizeof first - 1 && memcmp(target, first, sizeof first - 1) == 0;
}

static int open_log(const char *root)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/dev/kmsg", root);
    if (!is_first_pid_namespace(root)) {
        return -1;
    }
    int log = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (log >= 0 && lseek(log, 0, SEEK_END) < 0) {
        tddp_close(log);
        return -1;
    }
    return log;
}

/* Who was killed according to "Out of memory: Killed process 12 (ruby)..." or
 * "oom-kill:constraint=...,task=ruby,pid=12,uid=0"; 0: no such line. */
static pid_t killed_by_line(const char *line)
{
    static const char task[] = ",pid=";
    int pid = 0;
    const char *at = strstr(line, "Killed process ");
    if (at) {
        (void)sscanf(at, "Killed process %d", &pid);
    } else if ((at = strstr(line, "oom-kill:")) && (at = strstr(at, task))) {
        (void)sscanf(at, ",pid=%d", &pid);
    }
    return pid;
}

static void take_record(tddp_launch_oom *oom, char *record)
{
    char *rest = NULL;
    for (char *line = strtok_r(record, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        pid_t pid = killed_by_line(line);
        if (pid > 0) {
            oom->killed[oom->killed_count++ % TDDP_LAUNCH_OOM_PIDS] = pid;
        }
    }
}

/* Each read gives one record; EPIPE tells of some that were lost. */
static void read_log(tddp_launch_oom *oom)
{
    char record[RECORD_BYTES];
    for (int i = 0; oom->log >= 0 && i < MOST_RECORDS; i++) {
        ssize_t got = read(oom->log, record, sizeof record - 1);
        if (got > 0) {
            record[got] = '\0';
            take_record(oom, record);
        } else if (got == 0 || (errno != EPIPE && errno != EINTR)) {
            return;
        }
    }
}

static bool is_named(const tddp_launch_oom *oom, pid_t pid)
{
    for (int i = 0; i < oom->killed_count && i < TDDP_LAUNCH_OOM_PIDS; i++) {
        if (oom->killed[i] == pid) {
            return true;
        }
    }
    return false;
}

/* --- both ------------------------------------------------------------------------------------ */

void tddp_launch_oom_open(tddp_launch_oom *out, const char *root)
{
    *out = (tddp_launch_oom){.counter = choose_counter(root), .log = open_log(root)};
    out->counted = read_count(out->counter);
}

void tddp_launch_oom_forget(tddp_launch_oom *oom)
{
    read_log(oom);
    oom->killed_count = 0;
    oom->counted = read_count(oom->counter);
}

bool tddp_launch_oom_has_killed(tddp_launch_oom *oom, pid_t pid)
{
    read_log(oom);
    bool counted = oom->counted >= 0 && read_count(oom->counter) > oom->counted;
    bool named = is_named(oom, pid);
    oom->counted += counted;
    return counted || named;
}

void tddp_launch_oom_close(tddp_launch_oom *oom)
{
    free(oom->counter);
    tddp_close(oom->log);
    *oom = (tddp_launch_oom){.log = -1};
}
