/*
 * A node's place in the job. Beneath all folders of this room.
 */
#ifndef TDDP_LAUNCH_WORLD_H
#define TDDP_LAUNCH_WORLD_H

#include "launch/command/options.h"

/* Known once all nodes are. */
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
    int64_t generation; /* grows with each round and each coordinator, also over restarts of both */
    char master_addr[TDDP_LAUNCH_HOST_BYTES];
} tddp_launch_world;

#endif
