/*
 * --numa-binding: which CPUs each worker may run on. Planned once, within the CPUs of this process;
 * applied in each worker before it becomes its program.
 */
#ifndef TDDP_LAUNCH_BINDING_H
#define TDDP_LAUNCH_BINDING_H

#include <stdbool.h>
#include <stddef.h>

#include <tddp/status.h>

#include "launch/command/options.h"
#include "launch/workers/devices.h"
#include "launch/workers/hwloc.h"

enum { TDDP_LAUNCH_NOTE_BYTES = 256 };

typedef struct tddp_launch_binding {
    int workers;         /* 0: none is bound */
    size_t words;        /* of one worker's set */
    unsigned long *sets; /* as sched_setaffinity(2) takes them */
    int *shares; /* of each worker: its CPUs, each divided by the workers that share it; at least 1
                  */
    char note[TDDP_LAUNCH_NOTE_BYTES]; /* for people: what is not as requested; else empty */
} tddp_launch_binding;

/* Errors: TDDP_INVALID_ARGUMENT (more workers than cores where each is to have its own),
 * TDDP_UNAVAILABLE (no hwloc). */
TDDP_NODISCARD tddp_status tddp_launch_binding_plan(tddp_launch_binding_kind kind,
                                                    const tddp_launch_devices *devices,
                                                    int local_size, tddp_launch_binding *out);

/* The same for a topology that hwloc has loaded. Worker i belongs to GPU i; with more workers than
 * GPUs it begins anew. Without GPUs workers are spread over the machine. */
TDDP_NODISCARD tddp_status tddp_launch_binding_spread(const tddp_hwloc *hwloc, void *topology,
                                                      tddp_launch_binding_kind kind,
                                                      const tddp_launch_devices *devices,
                                                      int local_size, tddp_launch_binding *out);

/* In a forked child: false, with errno, if the kernel refuses. Async-signal-safe. */
bool tddp_launch_binding_apply(const tddp_launch_binding *binding, int local_rank);

/* The CPUs that are a worker's share; `otherwise` if none is bound. */
int tddp_launch_binding_share(const tddp_launch_binding *binding, int local_rank, int otherwise);

void tddp_launch_binding_free(tddp_launch_binding *binding);

#endif
