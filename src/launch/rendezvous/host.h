/*
 * The host: what a torchrun does that one of the endpoints names. It serves the store there and, on
 * threads of its own, votes (election.h), stands for leader, and while it leads runs the
 * coordinator (coordinator.h). With one endpoint it leads from the start. Keys and messages:
 * text.h.
 */
#ifndef TDDP_LAUNCH_HOST_H
#define TDDP_LAUNCH_HOST_H

#include "launch/command/options.h"
#include "launch/rendezvous/text.h"
#include "launch/rendezvous/times.h"

typedef struct tddp_launch_host tddp_launch_host;

/* What has to be the same at all nodes, as `open` says it: "--nnodes=2:4 --max-restarts=3
 * --rdzv-conf=heartbeat_timeout=5". Leases and silence are measured by the last of them. */
enum { TDDP_LAUNCH_JOB_BYTES = 128 };
void tddp_launch_job_text(const tddp_launch_options *options, char text[TDDP_LAUNCH_JOB_BYTES]);

typedef struct tddp_launch_host_opts {
    const tddp_launch_options *options; /* borrowed until the stop */
    tddp_launch_times times;
    const char *run_id; /* borrowed until the stop */
    int endpoint_index; /* which of `endpoints` this is, from 0 */
    int endpoint_count;
    const tddp_launch_endpoint *endpoints; /* with their ports; borrowed until the stop */
    int64_t (*now)(void);                  /* NULL: tddp_now_ns(); tests let time pass */
} tddp_launch_host_opts;

/*
 * Listens at its endpoint and starts the threads; does not wait for an election. Caller:
 * tddp_launch_host_stop(). Errors: TDDP_ADDRESS_IN_USE (the text names who holds the port, where
 * that can be found out), TDDP_NETWORK, TDDP_SYSTEM, TDDP_OUT_OF_MEMORY, TDDP_INVALID_ARGUMENT.
 */
TDDP_NODISCARD tddp_status tddp_launch_host_start(const tddp_launch_host_opts *opts,
                                                  tddp_launch_host **out);

/* Where this process reaches the store: its numeric address, and the port. The host's. */
const char *tddp_launch_host_address(const tddp_launch_host *host);
int tddp_launch_host_port(const tddp_launch_host *host);

/* Whether nobody needs this host any more: it does not lead, or the job has ended and all have read
 * that (or had close_ms to). Any thread. */
bool tddp_launch_host_over(const tddp_launch_host *host);

/*
 * Ends threads and store. `graceful`: a leader hands over first, so that another endpoint may lead
 * at once (with one endpoint, or after the end of the job, there is nothing to hand over). Takes
 * two seconds at most, mostly milliseconds. NULL is fine.
 */
void tddp_launch_host_stop(tddp_launch_host *host, bool graceful);

#endif
