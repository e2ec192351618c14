/*
 * The host: what a torchrun runs that is the job's coordinator, on a thread of its own. With c10d
 * (and static) it is the one at the endpoint, which serves the store there too; with etcd whichever
 * torchrun wrote the key `coordinator` first. Keys and messages: text.h.
 */
#ifndef TDDP_LAUNCH_HOST_H
#define TDDP_LAUNCH_HOST_H

#include "launch/command/options.h"
#include "launch/rendezvous/text.h"
#include "launch/rendezvous/times.h"

typedef struct tddp_launch_host tddp_launch_host;

/* The settings that have to be the same at all nodes: "--nnodes=2:4 --max-restarts=3
 * --rdzv-conf=heartbeat_timeout=5". Leases and silence are measured by the last of them. */
enum { TDDP_LAUNCH_JOB_BYTES = 128 };
void tddp_launch_job_text(const tddp_launch_options *options, char text[TDDP_LAUNCH_JOB_BYTES]);

typedef struct tddp_launch_host_opts {
    const tddp_launch_options *options; /* borrowed until the stop */
    tddp_launch_times times;
    const char *run_id;   /* borrowed until the stop */
    int64_t (*now)(void); /* NULL: tddp_now_ns(); tests let time pass */
} tddp_launch_host_opts;

/*
 * Becomes the coordinator and starts its thread. c10d: listens at the endpoint. etcd: writes the
 * key `coordinator`, and may wait for etcd's answer. Caller: tddp_launch_host_stop(). Errors:
 * TDDP_ADDRESS_IN_USE (the port is taken; etcd: there is a coordinator), TDDP_NETWORK,
 * TDDP_TIMEOUT, TDDP_SYSTEM, TDDP_STORE, TDDP_OUT_OF_MEMORY, TDDP_CANCELED.
 */
TDDP_NODISCARD tddp_status tddp_launch_host_start(const tddp_launch_host_opts *opts,
                                                  tddp_launch_host **out);

/* Of a c10d host: where this process reaches the store, its numeric address and the port. */
const char *tddp_launch_host_address(const tddp_launch_host *host);
int tddp_launch_host_port(const tddp_launch_host *host);

/* The coordinator's generation: larger than any before it. */
int64_t tddp_launch_host_term(const tddp_launch_host *host);

/* Whether nobody needs this host any more: it does not lead, or the job has ended and all have read
 * that (or had close_ms to). Any thread. */
bool tddp_launch_host_over(const tddp_launch_host *host);

/*
 * Ends the thread and the leadership, which another torchrun may take over at once with etcd. Takes
 * two seconds at most, mostly milliseconds. NULL is fine.
 */
void tddp_launch_host_stop(tddp_launch_host *host);

#endif
