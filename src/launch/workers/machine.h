/*
 * What this machine has for workers: cores, GPUs, counted without any GPU library; and which CPUs
 * each worker may run on. What the system shows stands in machine_linux.c.
 */
#ifndef TDDP_LAUNCH_MACHINE_H
#define TDDP_LAUNCH_MACHINE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include <tddp/status.h>

#include "launch/command/options.h"

/* --- machine_linux.c: CPUs ------------------------------------------------------------------- */

enum {
    TDDP_LAUNCH_WORD_BITS = sizeof(unsigned long) * CHAR_BIT,
    TDDP_LAUNCH_CPU_WORDS = 8192 / TDDP_LAUNCH_WORD_BITS, /* as many as a kernel can have */
};

/* A set of CPUs, as sched_setaffinity(2) takes it. */
typedef struct tddp_launch_cpus {
    unsigned long words[TDDP_LAUNCH_CPU_WORDS];
} tddp_launch_cpus;

/* Those that this process may run on, cgroups' limits of time aside. */
tddp_launch_cpus tddp_launch_cpus_allowed(void);

/* In a forked child: false, with errno, if the kernel refuses. Async-signal-safe. */
bool tddp_launch_cpus_bind(const tddp_launch_cpus *cpus);

int tddp_launch_cpus_count(const tddp_launch_cpus *cpus);

/* How many this process may use: its affinity mask, cut down to the cgroups' limit; at least 1. */
int tddp_launch_cores(void);

/* How many processes the kernel's out-of-memory killer has killed in this process's memory cgroup,
 * as counted below `root` ("" for this machine); -1: nobody counts. */
long long tddp_launch_oom_kills(const char *root);

/* --- machine_linux.c: GPUs ------------------------------------------------------------------- */

enum { TDDP_LAUNCH_DEVICE_BYTES = 96 };

typedef struct tddp_launch_device {
    char name[TDDP_LAUNCH_DEVICE_BYTES]; /* what CUDA_VISIBLE_DEVICES calls it: "2", "GPU-89...";
                                            a number where the variable is not set */
    int place;                           /* among the machine's; -1: known by its name alone */
    int node;                            /* its NUMA node; -1: not known */
} tddp_launch_device;

/* The GPUs that workers will see, found by what the NVIDIA driver shows in files, cut down and
 * ordered by CUDA_VISIBLE_DEVICES as CUDA does it. */
typedef struct tddp_launch_devices {
    tddp_launch_device *list; /* as CUDA numbers them; without a driver, what the variable names */
    int named;                /* in the list */
    int count;                /* that one process may use: of instances of MIG 1; without a driver 0
                               */
} tddp_launch_devices;

/* Looks below `root` ("" for this machine); `visible` is CUDA_VISIBLE_DEVICES or NULL. No GPU is no
 * error. GPUs are in the order of their PCI addresses. */
TDDP_NODISCARD tddp_status tddp_launch_devices_find(const char *root, const char *visible,
                                                    tddp_launch_devices *out);

/* --- machine.c ------------------------------------------------------------------------------- */

/* What to call the GPU of one worker alone: "3". Without any GPU as PyTorch does it: the worker's
 * entry of `visible`, or its local rank. False if there is no such GPU. */
bool tddp_launch_devices_name(const tddp_launch_devices *devices, const char *visible,
                              int local_rank, char name[TDDP_LAUNCH_DEVICE_BYTES]);

void tddp_launch_devices_free(tddp_launch_devices *devices);

/* The number of workers that --nproc-per-node means here, and the GPUs, which are looked for where
 * an option depends on them: tddp_launch_devices_free(), also after an error. Errors:
 * TDDP_INVALID_ARGUMENT ("gpu" where there is none; fewer GPUs than workers with
 * --virtual-local-rank). */
TDDP_NODISCARD tddp_status tddp_launch_count_processes(const tddp_launch_options *options,
                                                       tddp_launch_devices *devices, int *out);

/* --- binding.c: --numa-binding --------------------------------------------------------------- */

/* Plans which CPUs of this process each worker may use: `*out` has a set for each, free(). A GPU
 * that is of no help is logged. Errors: TDDP_INVALID_ARGUMENT (more workers than cores where each
 * is to have its own), TDDP_UNAVAILABLE (no hwloc). */
TDDP_NODISCARD tddp_status tddp_launch_binding_plan(tddp_launch_binding_kind kind,
                                                    const tddp_launch_devices *devices, int workers,
                                                    tddp_launch_cpus **out);

/* A worker's share of its CPUs, which others may be bound to as well; at least 1. */
int tddp_launch_binding_share(const tddp_launch_cpus *sets, int workers, int local_rank);

#endif
