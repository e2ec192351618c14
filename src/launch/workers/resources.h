/*
 * What this machine has for workers: cores that this process may use, and GPUs, counted without
 * any GPU library.
 */
#ifndef TDDP_LAUNCH_RESOURCES_H
#define TDDP_LAUNCH_RESOURCES_H

#include <tddp/status.h>

#include "launch/command/options.h"
#include "launch/workers/devices.h"

/* Cores in this process's affinity mask, cut down to the cgroups' CPU limit; at least 1. */
int tddp_launch_cores(void);

/* The number of workers that --nproc-per-node means here, and the GPUs, which are looked for where
 * an option depends on them: tddp_launch_devices_free(), also after an error. Errors:
 * TDDP_INVALID_ARGUMENT ("gpu" where there is none; fewer GPUs than workers with
 * --virtual-local-rank). */
TDDP_NODISCARD tddp_status tddp_launch_count_processes(const tddp_launch_options *options,
                                                       tddp_launch_devices *devices, int *out);

#endif
