/*
 * What workers use of the machine, with all that descends from them.
 */
#ifndef TDDP_LAUNCH_MONITOR_USAGE_H
#define TDDP_LAUNCH_MONITOR_USAGE_H

#include "launch/output/monitor.h"
#include "launch/workers/processes.h"

/* What a worker used, as told last. */
typedef struct tddp_launch_used {
    pid_t pid;
    double cpu;
    uint64_t memory;
} tddp_launch_used;

/* What was seen last; all zero: nothing. */
typedef struct tddp_launch_usage {
    tddp_launch_process_list seen; /* the workers' own: `owner` is the worker's index */
    int64_t at;                    /* when */
    int64_t found;                 /* when descendants were last looked for */
    tddp_launch_used *told;        /* of each worker */
    int workers;
} tddp_launch_usage;

/* Fills in the workers' CPU and memory: those told last if that was less than `least_ns` ago and
 * the workers are the same. Descendants are looked for every few seconds only. Errors:
 * TDDP_SYSTEM, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_usage_look(tddp_launch_usage *usage,
                                                  tddp_launch_view_worker *workers, int count,
                                                  int64_t least_ns);
void tddp_launch_usage_free(tddp_launch_usage *usage);

#endif
