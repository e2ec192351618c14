/*
 * A worker's environment: torchrun's own, with what PyTorch's workers expect.
 */
#ifndef TDDP_LAUNCH_ENVIRONMENT_H
#define TDDP_LAUNCH_ENVIRONMENT_H

#include <tddp/status.h>

#include "launch/command/options.h"

/* This node's place in the job, once all nodes are known. */
typedef struct tddp_launch_world {
    int node_rank;
    int nodes;
    int base_rank; /* rank of this node's first worker */
    int size;
    int local_size;
    int role_base_rank;
    int role_size;
    int round;   /* 0 for the first start, one more with each later one */
    int restart; /* failures so far */
    int max_restarts;
    int master_port;
    char master_addr[TDDP_LAUNCH_HOST_BYTES];
} tddp_launch_world;

/* What is the same for all workers beside the world. */
typedef struct tddp_launch_job {
    const char *run_id;
    const char *role;
    int threads; /* OMP_NUM_THREADS where it is unset */
} tddp_launch_job;

/* envp for one worker; `error_file` may be NULL. Caller: tddp_launch_list_free() (program.h). NULL
 * if memory is short. */
char **tddp_launch_environment(const tddp_launch_world *world, const tddp_launch_job *job,
                               int local_rank, const char *error_file);

#endif
