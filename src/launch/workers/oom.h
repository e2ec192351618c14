/*
 * Whether the kernel's out-of-memory killer killed a worker, by the counter of this process's
 * memory cgroup.
 */
#ifndef TDDP_LAUNCH_OOM_H
#define TDDP_LAUNCH_OOM_H

#include <stdbool.h>

typedef struct tddp_launch_oom {
    char *counter;     /* the file that counts; owned; NULL: there is none */
    long long counted; /* kills that have been accounted for */
} tddp_launch_oom;

/* Begins to look below `root` ("" for this machine): what was killed before does not count. */
void tddp_launch_oom_open(tddp_launch_oom *out, const char *root);

/* What was killed up to now is not a worker that ends later. */
void tddp_launch_oom_forget(tddp_launch_oom *oom);

/* Of a child that SIGKILL ended, not sent by us: whether the count has grown by one that no other
 * worker accounts for. */
bool tddp_launch_oom_has_killed(tddp_launch_oom *oom);

void tddp_launch_oom_close(tddp_launch_oom *oom);

#endif
