/*
 * Between binding.c, which gives each worker a domain, and binding_parts.c, which gives it its part
 * of that domain.
 */
#ifndef TDDP_LAUNCH_BINDING_SPREAD_H
#define TDDP_LAUNCH_BINDING_SPREAD_H

#include "launch/workers/binding.h"

/* CPUs of which a worker gets some: a NUMA node, a socket, or the whole machine. */
typedef struct tddp_launch_domain {
    int key; /* the number of the node or socket */
    int package;
    int cpus;
    int workers;
} tddp_launch_domain;

typedef struct tddp_launch_spread {
    const tddp_launch_topology *topology;
    tddp_launch_binding_kind kind;
    tddp_launch_cpu *ordered; /* neighbours beside each other */
    tddp_launch_domain *domains;
    int domain_count;
    int *homes; /* of each worker: its domain */
    int workers;
    tddp_launch_binding *out;
} tddp_launch_spread;

/* The key of the domain that a CPU lies in. */
int tddp_launch_spread_key(const tddp_launch_spread *all, const tddp_launch_cpu *cpu);

/* Fills in the set of a worker that has a home. */
TDDP_NODISCARD tddp_status tddp_launch_spread_give(tddp_launch_spread *all, int worker);

/* Once all have their sets: how many CPUs that is for each, those of several divided. */
TDDP_NODISCARD tddp_status tddp_launch_spread_count_shares(tddp_launch_spread *all);

#endif
