/*
 * A worker's environment: torchrun's own, with what PyTorch's workers expect.
 */
#ifndef TDDP_LAUNCH_ENVIRONMENT_H
#define TDDP_LAUNCH_ENVIRONMENT_H

#include <tddp/status.h>

#include "launch/command/options.h"
#include "launch/workers/binding.h"
#include "launch/workers/devices.h"
#include "launch/world.h"

/* What is the same for all workers beside the world. */
typedef struct tddp_launch_job {
    const tddp_launch_options *options; /* borrowed */
    const char *run_id;                 /* borrowed; set by the caller */
    const char *timer_file;             /* borrowed; NULL: workers can have no timers */
    int threads;                        /* a worker's share of the cores; at least 1 */
    int most_threads;                   /* what limits of CPU time leave to each, however bound */
    tddp_launch_binding binding;
    const tddp_launch_devices *devices; /* borrowed; tddp_launch_count_processes() found them */
} tddp_launch_job;

/* Looks at the machine for `local_size` workers. Errors: TDDP_INVALID_ARGUMENT (a binding that is
 * not possible), TDDP_UNAVAILABLE (hwloc), TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_job_prepare(const tddp_launch_options *options,
                                                   const tddp_launch_devices *devices,
                                                   int local_size, tddp_launch_job *out);
void tddp_launch_job_free(tddp_launch_job *job);

/* envp for one worker; `error_file` may be NULL. Caller: tddp_launch_list_free() (program.h). NULL
 * if memory is short. */
char **tddp_launch_environment(const tddp_launch_world *world, const tddp_launch_job *job,
                               int local_rank, const char *error_file);

#endif
