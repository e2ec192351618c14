/*
 * A worker's environment: torchrun's own, with what PyTorch's workers expect.
 */
#ifndef TDDP_LAUNCH_ENVIRONMENT_H
#define TDDP_LAUNCH_ENVIRONMENT_H

#include "launch/workers/machine.h"
#include "launch/world.h"

/* What is the same for all workers beside the world. */
typedef struct tddp_launch_job {
    const tddp_launch_options *options; /* borrowed */
    const char *run_id;                 /* borrowed; set by the caller */
    const char *timer_file;             /* borrowed; NULL: workers can have no timers */
    const tddp_launch_devices *devices; /* borrowed; tddp_launch_count_processes() found them */
    tddp_launch_binding binding;        /* free() its sets */
    int threads;                        /* a worker's share of the cores; at least 1 */
} tddp_launch_job;

/* Looks at the machine for `local_size` workers. Errors: TDDP_INVALID_ARGUMENT (a binding that is
 * not possible), TDDP_UNAVAILABLE (hwloc), TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_job_prepare(const tddp_launch_options *options,
                                                   const tddp_launch_devices *devices,
                                                   int local_size, tddp_launch_job *out);

/* envp for one worker: free(), which frees its texts too. `error_file` may be NULL. NULL if memory
 * is short. */
char **tddp_launch_environment(const tddp_launch_world *world, const tddp_launch_job *job,
                               int local_rank, const char *error_file);

#endif
