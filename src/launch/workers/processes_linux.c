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
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "launch/workers/processes.h"

enum { PATH_BYTES = 64 };

tddp_status tddp_launch_adopt_orphans(void)
{
    return prctl(PR_SET_CHILD_SUBREAPER, 1L, 0L, 0L, 0L) == 0
               ? TDDP_OK
               : tddp_fail_errno("prctl(PR_SET_CHILD_SUBREAPER)");
}

bool tddp_launch_signal_at_end_of(pid_t parent, int number)
{
    (void)prctl(PR_SET_PDEATHSIG, (long)number, 0L, 0L, 0L);
    /* A parent that died before the call sends nothing any more. */
    return getppid() == parent;
}

void tddp_launch_close_on_exec_from(int first)
{
    /* Before Linux 5.11 they stay open: none of them is ours. */
    (void)close_range((unsigned)first, ~0U, CLOSE_RANGE_CLOEXEC);
}

bool tddp_launch_has_children(void)
{
    siginfo_t info;
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno != ECHILD;
}

char *tddp_launch_list_children(void)
{
    char path[PATH_BYTES];
    char *list = NULL;
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    (void)tddp_scan_file(path, "%m[0-9 ]", &list); /* "12 34 " */
    return list;
}

/* --- all processes --------------------------------------------------------------------------- */

typedef struct process {
    pid_t pid;
    pid_t parent;
    pid_t group; /* its process group */
    bool ended;  /* and not waited for yet */
} process;

typedef struct process_list {
    process *list; /* by pid */
    size_t count;
} process_list;

/* Looks at one process; false if there is no such. */
static bool look(int64_t pid, process *out)
{
    char path[PATH_BYTES];
    char text[1024];
    char state;
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
    *out = (process){.pid = (pid_t)pid};
    if (!bracket || sscanf(bracket + 1, " %c %d %d", &state, &out->parent, &out->group) != 3) {
        return false;
    }
    out->ended = state == 'Z' || state == 'X';
    return true;
}

static int by_pid(const void *a, const void *b)
{
    return ((const process *)a)->pid - ((const process *)b)->pid; /* neither is negative */
}

/* Every process of this machine that can be seen: free(). As many as memory allows. */
static process_list list_all(void)
{
    tddp_bytes all = {0};
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        int64_t pid;
        process one;
        if (tddp_parse_int(entry->d_name, 1, INT32_MAX, &pid) && look(pid, &one)) {
            (void)!tddp_bytes_append(&all, &one, sizeof one);
        }
    }
    if (folder) {
        closedir(folder);
    }
    process_list made = {(process *)(void *)all.data, all.size / sizeof(process)};
    if (made.count > 0) {
        qsort(made.list, made.count, sizeof *made.list, by_pid);
    }
    return made;
}

static const process *find(const process_list *all, pid_t pid)
{
    process key = {.pid = pid};
    return all->count == 0 ? NULL : bsearch(&key, all->list, all->count, sizeof key, by_pid);
}

/* --- descendants ----------------------------------------------------------------------------- */

/* Whether a list as the kernel writes it has this number. */
static bool is_listed(const char *list, pid_t pid)
{
    char *end;
    while (list && *list && strtol(list, &end, 10) != pid) {
        list = end > list ? end : NULL;
    }
    return list && *list;
}

/* Climbs to this process; not for ever, since the list was not made at one moment. */
static bool is_ours(const process_list *all, const process *one, const char *unrelated)
{
    pid_t self = getpid();
    for (size_t i = 0; one && i < all->count; i++) {
        if (one->parent == self) {
            return !is_listed(unrelated, one->pid);
        }
        one = find(all, one->parent);
    }
    return false;
}

/* Whether a process has a signal ignored, as shells have SIGINT for what they run in the
 * background. */
static bool ignores(pid_t pid, int number)
{
    char path[PATH_BYTES];
    unsigned long long mask = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    (void)tddp_scan_file(path, "SigIgn: %llx", &mask);
    return mask >> (number - 1) & 1;
}

/* Sends it to the group that a process leads, or to itself unless it was sent to its group. */
static void send_to(const process_list *all, const process *one, const tddp_launch_exempt *exempt,
                    int number)
{
    const process *leader = find(all, one->group);
    bool led = leader && !leader->ended && is_ours(all, leader, exempt->unrelated);
    if (exempt->unless_ignoring != 0) {
        (void)(ignores(one->pid, exempt->unless_ignoring) && kill(one->pid, number));
    } else if (one == leader) {
        (void)kill(-one->group, number);
    } else if (!led) {
        (void)kill(one->pid, number);
    }
}

size_t tddp_launch_signal_descendants(const tddp_launch_exempt *exempt, int number)
{
    static const tddp_launch_exempt nobody = {0};
    process_list all = list_all();
    size_t found = 0;
    exempt = exempt ? exempt : &nobody;
    for (size_t i = 0; i < all.count; i++) {
        const process *one = &all.list[i];
        if (!one->ended && one->group != exempt->group && is_ours(&all, one, exempt->unrelated)) {
            found++;
            send_to(&all, one, exempt, number);
        }
    }
    free(all.list);
    return found;
}
