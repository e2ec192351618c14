/*
 * Linux's own means to lose no process: the child subreaper, the parent-death signal, close_range,
 * and /proc to see who descends from whom. Main thread: the parent-death signal follows the thread
 * that forked.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/workers/processes.h"

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

enum { FALLBACK_DESCRIPTORS = 4096 };

/* What a process is to this one. */
enum { OURS = 1, UNRELATED = 2 };

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

bool tddp_launch_has_children(void)
{
    siginfo_t info;
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno != ECHILD;
}

/* --- what the kernel tells of them ----------------------------------------------------------- */

bool tddp_launch_process_look(pid_t pid, tddp_launch_process *out)
{
    char path[64];
    char text[1024];
    char state;
    unsigned long long user;
    unsigned long long system;
    long long pages;
    tddp_launch_process made = {.pid = pid, .owner = -1};
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t got = read(fd, text, sizeof text - 1);
    tddp_close(fd);
    text[got > 0 ? got : 0] = '\0';
    /* The name in brackets may hold anything. */
    const char *bracket = strrchr(text, ')');
    if (!bracket ||
        sscanf(bracket + 1,
               " %c %d %d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d "
               "%*d %*d %llu %*u %lld",
               &state, &made.parent, &made.group, &user, &system, &made.started, &pages) != 7) {
        return false;
    }
    made.ended = state == 'Z' || state == 'X';
    made.ticks = user + system;
    made.memory = pages > 0 ? (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
    *out = made;
    return true;
}

tddp_status tddp_launch_process_add(tddp_launch_process_list *all, const tddp_launch_process *one)
{
    if (all->count == all->capacity) {
        size_t capacity = all->capacity ? all->capacity * 2 : 256;
        tddp_launch_process *list = tddp_resize(all->list, capacity * sizeof *list);
        if (!list) {
            return TDDP_OUT_OF_MEMORY;
        }
        all->list = list;
        all->capacity = capacity;
    }
    all->list[all->count++] = *one;
    return TDDP_OK;
}

static int by_pid(const void *a, const void *b)
{
    const tddp_launch_process *x = a;
    const tddp_launch_process *y = b;
    return (x->pid > y->pid) - (x->pid < y->pid);
}

tddp_status tddp_launch_process_list_all(tddp_launch_process_list *all)
{
    DIR *folder = opendir("/proc");
    if (!folder) {
        return tddp_fail_errno("/proc");
    }
    tddp_status status = TDDP_OK;
    struct dirent *entry;
    while (status == TDDP_OK && (entry = readdir(folder))) {
        int64_t pid;
        tddp_launch_process one;
        if (tddp_parse_int(entry->d_name, 1, INT32_MAX, &pid) &&
            tddp_launch_process_look((pid_t)pid, &one)) {
            status = tddp_launch_process_add(all, &one);
        }
    }
    closedir(folder);
    if (all->count > 0) {
        qsort(all->list, all->count, sizeof *all->list, by_pid);
    }
    return status;
}

tddp_launch_process *tddp_launch_process_find(const tddp_launch_process_list *all, pid_t pid)
{
    tddp_launch_process key = {.pid = pid};
    return all->count == 0 ? NULL : bsearch(&key, all->list, all->count, sizeof key, by_pid);
}

/* --- descendants ----------------------------------------------------------------------------- */

/* Marks descendants generation by generation until nothing is added. */
static void mark_ours(tddp_launch_process_list *all, const tddp_launch_unrelated *unrelated)
{
    pid_t self = getpid();
    for (size_t i = 0; unrelated && i < unrelated->count; i++) {
        tddp_launch_process *found = tddp_launch_process_find(all, unrelated->list[i]);
        if (found) {
            found->owner = UNRELATED;
        }
    }
    for (bool added = true; added;) {
        added = false;
        for (size_t i = 0; i < all->count; i++) {
            tddp_launch_process *one = &all->list[i];
            if (one->owner >= 0) {
                continue;
            }
            const tddp_launch_process *parent = tddp_launch_process_find(all, one->parent);
            if (one->parent == self || (parent && parent->owner == OURS)) {
                one->owner = OURS;
                added = true;
            }
        }
    }
}

/* Whether a process has a signal ignored, as shells have SIGINT for what they run in the
 * background.
 */
static bool ignores(pid_t pid, int number)
{
    char path[64];
    char line[256];
    unsigned long long mask = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "SigIgn: %llx", &mask) != 1) {
    }
    if (file) {
        fclose(file);
    }
    return mask >> (number - 1) & 1;
}

static bool is_exempt(const tddp_launch_exempt *exempt, const tddp_launch_process *one)
{
    for (size_t i = 0; i < exempt->group_count; i++) {
        if (one->group == exempt->groups[i]) {
            return true;
        }
    }
    return one->pid == exempt->process ||
           (exempt->unless_ignoring != 0 && !ignores(one->pid, exempt->unless_ignoring));
}

size_t tddp_launch_signal_descendants(const tddp_launch_exempt *exempt, int number)
{
    static const tddp_launch_exempt nobody = {0};
    tddp_launch_process_list all = {0};
    size_t found = 0;
    exempt = exempt ? exempt : &nobody;
    if (tddp_launch_process_list_all(&all) == TDDP_OK) {
        mark_ours(&all, exempt->unrelated);
        for (size_t i = 0; i < all.count; i++) {
            const tddp_launch_process *one = &all.list[i];
            if (one->owner == OURS && !one->ended && !is_exempt(exempt, one)) {
                found++;
                (void)kill(one->pid, number);
            }
        }
    }
    free(all.list);
    return found;
}

tddp_status tddp_launch_unrelated_find(tddp_launch_unrelated *out)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(path, "re");
    tddp_launch_unrelated found = {0};
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

void tddp_launch_unrelated_free(tddp_launch_unrelated *unrelated)
{
    free(unrelated->list);
    *unrelated = (tddp_launch_unrelated){0};
}
