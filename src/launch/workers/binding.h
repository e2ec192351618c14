/*
 * --numa-binding: which CPUs each worker may run on. Planned once from the kernel's description of
 * the machine, within the CPUs of this process; applied in each worker before it becomes its
 * program.
 */
#ifndef TDDP_LAUNCH_BINDING_H
#define TDDP_LAUNCH_BINDING_H

#include <stdbool.h>
#include <stddef.h>

#include <tddp/status.h>

#include "launch/command/options.h"

enum { TDDP_LAUNCH_NOTE_BYTES = 256 };

typedef struct tddp_launch_binding {
    int workers;      /* 0: nobody is bound */
    size_t set_bytes; /* of one worker's set, as sched_setaffinity(2) takes it */
    char *sets;
    int *shares; /* of each worker: its CPUs, each divided by the workers that share it; at least 1
                  */
    char note[TDDP_LAUNCH_NOTE_BYTES]; /* for people: what is not as asked; else empty */
} tddp_launch_binding;

/* Errors: TDDP_INVALID_ARGUMENT (more workers than cores where each is to have its own). */
TDDP_NODISCARD tddp_status tddp_launch_binding_plan(const tddp_launch_options *options,
                                                    int local_size, tddp_launch_binding *out);

/* In a forked child: false, with errno, if the kernel refuses. Async-signal-safe. */
bool tddp_launch_binding_apply(const tddp_launch_binding *binding, int local_rank);

/* The CPUs that are a worker's share; `otherwise` if nobody is bound. */
int tddp_launch_binding_share(const tddp_launch_binding *binding, int local_rank, int otherwise);

void tddp_launch_binding_free(tddp_launch_binding *binding);

/* --- between binding.c and binding_linux.c, and for tests ------------------------------------ */

/* A CPU that this process may use, and what it is a part of. */
typedef struct tddp_launch_cpu {
    int id;
    int core;    /* the first CPU of its core */
    int cache;   /* the first CPU of those that share its largest cache */
    int node;    /* of NUMA */
    int package; /* the socket */
} tddp_launch_cpu;

typedef struct tddp_launch_topology {
    tddp_launch_cpu *cpus; /* by id */
    int count;
    char note[TDDP_LAUNCH_NOTE_BYTES]; /* what could not be read; else empty */
} tddp_launch_topology;

/* Looks up the `count` allowed CPUs below `root` ("" for this machine). What is not there is taken
 * to be one: one node, one socket, one cache, and a core for each CPU. */
TDDP_NODISCARD tddp_status tddp_launch_topology_read(const char *root, const int *allowed,
                                                     int count, tddp_launch_topology *out);
void tddp_launch_topology_free(tddp_launch_topology *topology);

/* Worker i belongs to GPU i, whose node is device_nodes[i] (-1: not known); with more workers than
 * GPUs it begins anew. Without GPUs workers are spread over the machine. */
TDDP_NODISCARD tddp_status tddp_launch_binding_spread(const tddp_launch_topology *topology,
                                                      tddp_launch_binding_kind kind,
                                                      const int *device_nodes, int device_count,
                                                      int local_size, tddp_launch_binding *out);

/* Whether a worker may run on a CPU. */
bool tddp_launch_binding_has(const tddp_launch_binding *binding, int local_rank, int cpu);

#endif
