/*
 * The durations of the rendezvous, in one place: made of --rdzv-conf, so that tests can have
 * shorter ones. Milliseconds.
 */
#ifndef TDDP_LAUNCH_TIMES_H
#define TDDP_LAUNCH_TIMES_H

#include "launch/command/options.h"

typedef struct tddp_launch_times {
    int64_t beat_ms;    /* between two heartbeats of a node */
    int64_t silence_ms; /* without a heartbeat, or an answer, until a node, or the host, is lost */
    int64_t margin_ms;  /* what the coordinator, and twice the nodes, take off silence_ms: a node
                           that is cut off ends its workers before the others begin without it */
    int64_t read_ms;    /* for one answer of a store; then the connection is made anew */
    int64_t join_ms;    /* for the nodes to come together */
    int64_t last_call_ms; /* for more than the least number of nodes */
    int64_t close_ms;     /* at the end, for all nodes to read it */
    int64_t return_ms;    /* for another host at the endpoint, where the last one has ended */
    int64_t settle_ms;    /* without a newcomer, after a change of leaders */
    int64_t report_ms;    /* between two lines about what is waited for */
} tddp_launch_times;

/* Larger than any that was made before, as long as nobody sets back the clock: microseconds since
 * 1970. */
int64_t tddp_launch_new_generation(void);

/* How long leases in etcd last that nobody renews, in seconds. A node's is half of silence_ms, and
 * the coordinator waits for the other half after it. The coordinator's is all of it, so that a node
 * that was cut off with it has ended its workers before another coordinator begins. */
int64_t tddp_launch_node_lease_s(const tddp_launch_times *times);
int64_t tddp_launch_coordinator_lease_s(const tddp_launch_times *times);

tddp_launch_times tddp_launch_times_of(const tddp_launch_conf *conf);

#endif
