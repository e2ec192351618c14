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
#include "base/scan_file.h"
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

typedef struct process {
    pid_t pid;
    pid_t parent;
    pid_t group; /* its process group */
    bool ended;  /* and not waited for yet */
    int kin;     /* what it is to this one; 0: not known */
} process;

typedef struct process_list {
    process *list; /* by pid */
    size_t count;
    size_t capacity;
} process_list;

/* Looks at one process; false if there is no such. */
static bool look(pid_t pid, process *out)
{
    char path[64];
    char text[1024];
    char state;
    process made = {.pid = pid};
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
    if (!bracket || sscanf(bracket + 1, " %c %d %d", &state, &made.parent, &made.group) != 3) {
        return false;
    }
    made.ended = state == 'Z' || state == 'X';
    *out = made;
    return true;
}

static tddp_status add(process_list *all, const process *one)
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
    all->list[all->count++] = *one;
    return TDDP_OK;
}

static int by_pid(const void *a, const void *b)
{
    const process *x = a;
    const process *y = b;
    return (x->pid > y->pid) - (x->pid < y->pid);
}

/* Adds every process of this machine that can be seen to an empty list, which has to be freed in
 * any case. */
static tddp_status list_all(process_list *all)
{
    DIR *folder = opendir("/proc");
    if (!folder) {
        return tddp_fail_errno("/proc");
    }
    tddp_status status = TDDP_OK;
    struct dirent *entry;
    while (status == TDDP_OK && (entry = readdir(folder))) {
        int64_t pid;
        process one;
        if (tddp_parse_int(entry->d_name, 1, INT32_MAX, &pid) && look((pid_t)pid, &one)) {
            status = add(all, &one);
        }
    }
    closedir(folder);
    if (all->count > 0) {
        qsort(all->list, all->count, sizeof *all->list, by_pid);
    }
    return status;
}

static process *find(const process_list *all, pid_t pid)
{
    process key = {.pid = pid};
    return all->count == 0 ? NULL : bsearch(&key, all->list, all->count, sizeof key, by_pid);
}

/* --- descendants ----------------------------------------------------------------------------- */

/* Marks descendants generation by generation until nothing is added. */
static void mark_ours(process_list *all, const tddp_launch_unrelated *unrelated)
{
    pid_t self = getpid();
    for (size_t i = 0; unrelated && i < unrelated->count; i++) {
        process *found = find(all, unrelated->list[i]);
        if (found) {
            found->kin = UNRELATED;
        }
    }
    for (bool added = true; added;) {
        added = false;
        for (size_t i = 0; i < all->count; i++) {
            process *one = &all->list[i];
            if (one->kin != 0) {
                continue;
            }
            const process *parent = find(all, one->parent);
            if (one->parent == self || (parent && parent->kin == OURS)) {
                one->kin = OURS;
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
    unsigned long long mask = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    (void)tddp_scan_file(path, "SigIgn: %llx", &mask);
    return mask >> (number - 1) & 1;
}

static bool is_exempt(const tddp_launch_exempt *exempt, const process *one)
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
    process_list all = {0};
    size_t found = 0;
    exempt = exempt ? exempt : &nobody;
    if (list_all(&all) == TDDP_OK) {
        mark_ours(&all, exempt->unrelated);
        for (size_t i = 0; i < all.count; i++) {
            const process *one = &all.list[i];
            if (one->kin == OURS && !one->ended && !is_exempt(exempt, one)) {
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
