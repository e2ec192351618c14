/*
 * Whether the kernel's out-of-memory killer killed a worker: by the counter of this process's
 * memory cgroup, and by the kernel's log where that is readable.
 */
#ifndef TDDP_LAUNCH_OOM_H
#define TDDP_LAUNCH_OOM_H

#include <stdbool.h>
#include <sys/types.h>

enum { TDDP_LAUNCH_OOM_PIDS = 64 };

typedef struct tddp_launch_oom {
    char *counter;                      /* the file that counts; owned; NULL: there is none */
    long long counted;                  /* kills that have been accounted for */
    int log;                            /* the kernel's log, read up to now; -1: not readable */
    pid_t killed[TDDP_LAUNCH_OOM_PIDS]; /* those that the log named last */
    int killed_count;                   /* of all it named */
} tddp_launch_oom;

/* Begins to look below `root` ("" for this machine): what was killed before does not count. */
void tddp_launch_oom_open(tddp_launch_oom *out, const char *root);

/* What was killed up to now is not a worker that ends later. */
void tddp_launch_oom_forget(tddp_launch_oom *oom);

/* Of a child that SIGKILL ended, not sent by us: whether the log names it, or the count has grown
 * by one that no other worker accounts for. */
bool tddp_launch_oom_has_killed(tddp_launch_oom *oom, pid_t pid);

void tddp_launch_oom_close(tddp_launch_oom *oom);

#endif
