/*
 * What this machine has for workers: cores that this process may use, and GPUs, counted without
 * any GPU library.
 */
#ifndef TDDP_LAUNCH_RESOURCES_H
#define TDDP_LAUNCH_RESOURCES_H

#include <tddp/status.h>

#include "launch/command/options.h"

/* Cores in this process's affinity mask, cut down to the cgroups' CPU limit; at least 1. */
int tddp_launch_cores(void);

/* Entries of a CUDA_VISIBLE_DEVICES text up to the first that CUDA would refuse. */
int tddp_launch_visible_devices(const char *text);

/* The number of workers that --nproc-per-node means here. Errors: TDDP_INVALID_ARGUMENT ("gpu"
 * where there is none). */
TDDP_NODISCARD tddp_status tddp_launch_count_processes(tddp_launch_process_count asked, int *out);

#endif
