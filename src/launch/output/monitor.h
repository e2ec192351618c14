/*
 * --monitor: a look at the job while it runs. On a terminal a block of lines below the output,
 * drawn anew once a second and when something happens; elsewhere a line every ten seconds.
 */
#ifndef TDDP_LAUNCH_MONITOR_H
#define TDDP_LAUNCH_MONITOR_H

#include <stdint.h>
#include <sys/types.h>

#include "launch/output/console.h"

typedef struct tddp_launch_monitor tddp_launch_monitor;

/* A worker as it is shown; texts are borrowed for the call. */
typedef struct tddp_launch_view_worker {
    int rank;
    pid_t pid;         /* 0: not started */
    bool alive;        /* so that its processes can be looked at */
    const char *state; /* "running", "exit code 1" */
    const char *last_line;
    double cpu;      /* filled in: cores in use; below 0: not known yet */
    uint64_t memory; /* filled in: bytes */
} tddp_launch_view_worker;

/* The job as it is shown. */
typedef struct tddp_launch_view {
    const char *run_id;
    const char *state;     /* "running" */
    const char *waits_for; /* a line, or "" */
    int64_t seconds;       /* filled in: since the monitor was made */
    int nodes;             /* in this round; 0: not known yet */
    int min_nodes;
    int max_nodes;
    int node_rank;
    int world_size;
    int round;
    int restart;
    int max_restarts;
    tddp_launch_view_worker *workers;
    int count;
} tddp_launch_view;

/* Shows nothing yet; takes the console's hook. `console` is borrowed until the monitor is freed. */
TDDP_NODISCARD tddp_status tddp_launch_monitor_create(tddp_launch_console *console,
                                                      tddp_launch_monitor **out);

/* Takes the block away and gives the hook back. NULL is fine. */
void tddp_launch_monitor_free(tddp_launch_monitor *monitor);

/* When the next look is due; INT64_MAX for NULL. */
int64_t tddp_launch_monitor_deadline(const tddp_launch_monitor *monitor);

/* Something has happened that people should see soon. NULL is fine. */
void tddp_launch_monitor_wake(tddp_launch_monitor *monitor);

/* Shows the job; for when the deadline has come. Short memory costs this look, nothing else. */
void tddp_launch_monitor_show(tddp_launch_monitor *monitor, tddp_launch_view *view);

#endif
