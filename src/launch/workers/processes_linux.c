/*
 * Linux's own means to lose no process: the child subreaper, the parent-death signal, close_range,
 * and /proc to see who descends from whom. Main thread: the parent-death signal follows the thread
 * that forked.
 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/workers/processes.h"

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

enum { FALLBACK_DESCRIPTORS = 4096 };

typedef struct process {
    pid_t pid;
    pid_t parent;
    bool stranger;
    bool ours;
} process;

typedef struct process_list {
    process *list;
    size_t count;
    size_t capacity;
} process_list;

tddp_status tddp_launch_adopt_orphans(void)
{
    return prctl(PR_SET_CHILD_SUBREAPER, 1L, 0L, 0L, 0L) == 0
               ? TDDP_OK
               : tddp_fail_errno("prctl(PR_SET_CHILD_SUBREAPER)");
}

bool tddp_launch_hear_of_end(pid_t parent, int number)
{
    (void)prctl(PR_SET_PDEATHSIG, (long)number, 0L, 0L, 0L);
    /* A parent that died before the call sends nothing any more. */
    return getppid() == parent;
}

bool tddp_launch_die_with(pid_t parent)
{
    return tddp_launch_hear_of_end(parent, SIGKILL);
}

void tddp_launch_name_process(const char *name)
{
    (void)prctl(PR_SET_NAME, name, 0L, 0L, 0L);
}

void tddp_launch_close_on_exec_from(int first)
{
    if (syscall(SYS_close_range, (unsigned)first, ~0U, CLOSE_RANGE_CLOEXEC) == 0) {
        return;
    }
    for (int fd = first; fd < FALLBACK_DESCRIPTORS; fd++) { /* before Linux 5.11 */
        (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
}

/* The parent in /proc/PID/stat, behind the name in brackets, which may hold anything. */
static bool read_parent(pid_t pid, pid_t *out)
{
    char path[64];
    char text[512];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t got = read(fd, text, sizeof text - 1);
    tddp_close(fd);
    text[got > 0 ? got : 0] = '\0';
    const char *bracket = strrchr(text, ')');
    int parent;
    if (!bracket || sscanf(bracket + 1, " %*c %d", &parent) != 1) {
        return false;
    }
    *out = parent;
    return true;
}

static tddp_status add_process(process_list *all, pid_t pid, pid_t parent)
{
    if (all->count == all->capacity) {
        size_t capacity = all->capacity ? all->capacity * 2 : 256;
        process *list = tddp_resize(all->list, capacity * sizeof *list);
        if (!list) {
            return TDDP_OUT_OF_MEMORY;
        }
        all->list = list;
        all->capacity = capacity;
    }
    all->list[all->count++] = (process){.pid = pid, .parent = parent};
    return TDDP_OK;
}

static tddp_status list_processes(process_list *all)
{
    DIR *directory = opendir("/proc");
    if (!directory) {
        return tddp_fail_errno("/proc");
    }
    tddp_status status = TDDP_OK;
    struct dirent *entry;
    while (status == TDDP_OK && (entry = readdir(directory))) {
        int64_t pid;
        pid_t parent;
        if (tddp_parse_int(entry->d_name, 1, INT32_MAX, &pid) && read_parent((pid_t)pid, &parent)) {
            status = add_process(all, (pid_t)pid, parent);
        }
    }
    closedir(directory);
    return status;
}

/* Whether `pid` is this process or known as a descendant of it. */
static bool is_ours(const process_list *all, pid_t pid)
{
    if (pid == getpid()) {
        return true;
    }
    for (size_t i = 0; i < all->count; i++) {
        if (all->list[i].pid == pid) {
            return all->list[i].ours;
        }
    }
    return false;
}

/* Marks descendants generation by generation until nothing is added. */
static void mark_ours(process_list *all, const tddp_launch_strangers *strangers)
{
    for (size_t i = 0; strangers && i < all->count; i++) {
        for (size_t k = 0; k < strangers->count; k++) {
            all->list[i].stranger |= all->list[i].pid == strangers->list[k];
        }
    }
    for (bool added = true; added;) {
        added = false;
        for (size_t i = 0; i < all->count; i++) {
            process *one = &all->list[i];
            if (!one->ours && !one->stranger && is_ours(all, one->parent)) {
                one->ours = added = true;
            }
        }
    }
}

size_t tddp_launch_signal_descendants(const tddp_launch_strangers *strangers, pid_t spared,
                                      int number)
{
    process_list all = {0};
    size_t found = 0;
    if (list_processes(&all) == TDDP_OK) {
        mark_ours(&all, strangers);
        for (size_t i = 0; i < all.count; i++) {
            if (all.list[i].ours && all.list[i].pid != spared) {
                found++;
                (void)kill(all.list[i].pid, number);
            }
        }
    }
    free(all.list);
    return found;
}

tddp_status tddp_launch_strangers_find(tddp_launch_strangers *out)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(path, "re");
    tddp_launch_strangers found = {0};
    int pid;
    while (file && fscanf(file, "%d", &pid) == 1) {
        pid_t *list = tddp_resize(found.list, (found.count + 1) * sizeof *list);
        if (!list) {
            fclose(file);
            free(found.list);
            return TDDP_OUT_OF_MEMORY;
        }
        found.list = list;
        found.list[found.count++] = pid;
    }
    if (file) {
        fclose(file);
    }
    *out = found;
    return TDDP_OK;
}

void tddp_launch_strangers_free(tddp_launch_strangers *strangers)
{
    free(strangers->list);
    *strangers = (tddp_launch_strangers){0};
}
