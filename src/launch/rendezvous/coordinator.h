/*
 * The coordinator decides which nodes are in a round, with which ranks, and when a round or the job
 * is over. It is a state machine alone: it has no store, no clock and no thread. It is shown all
 * nodes' entries with the time at which they were read, and keeps the document that follows.
 *
 * Rules:
 *
 *   1. A round starts once `max` nodes are ready, or once all that are here are, at least `min`,
 *      and last_call_ms have passed since there are enough.
 *   2. A worker's failure ends the round and costs a restart; beyond max_restarts it ends the job.
 *   3. A node whose entry is missing for reconnect_ms is lost (takeover_ms, if that begins just
 *      after the coordinator was held up). In an elastic job (min < max, not static) lost nodes,
 *      nodes that leave and ready newcomers change the round, which costs nothing. In other jobs
 *      the loss of a node costs a restart, and the others wait for a replacement; with no restart
 *      left the job ends.
 *   4. Before the first round another node may replace one that leaves; but a static job without
 *      restarts ends when a node leaves.
 *   5. Waiting for nodes ends the job after join_ms.
 *   6. Once some nodes are done with a round, newcomers wait, and a done node that leaves is not
 *      missed.
 *   7. A newcomer that conflicts with a node (the same --node-rank, or no free place) waits until
 *      that node has answered a probe, and is then refused or becomes a spare; or until that node
 *      is lost.
 *   8. Ranks: --node-rank, else the last rank, else that of a node of the same host that has gone,
 *      else the lowest free one, in the order of joining; the hosting node first.
 *   9. A coordinator that takes over goes on with the document: its nodes have takeover_ms to show
 *      themselves. If none of them does, that job is dead, and another one begins.
 */
#ifndef TDDP_LAUNCH_COORDINATOR_H
#define TDDP_LAUNCH_COORDINATOR_H

#include "launch/command/options.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/rendezvous/state.h"

typedef struct tddp_launch_coordinator tddp_launch_coordinator;

/* All borrowed. */
typedef struct tddp_launch_coordinator_opts {
    const tddp_launch_options *options;
    const tddp_launch_times *times;
    const char *run_id;
    const char *where; /* "10.0.0.1:29400": what messages call the meeting place */
    const char *job;   /* the settings that all nodes share */
    int64_t started;   /* the new job's; microseconds since 1970, say */
} tddp_launch_coordinator_opts;

/* Errors: TDDP_OUT_OF_MEMORY. Caller: tddp_launch_coordinator_free(). */
TDDP_NODISCARD tddp_status tddp_launch_coordinator_create(const tddp_launch_coordinator_opts *opts,
                                                          int64_t now_ns,
                                                          tddp_launch_coordinator **out);
void tddp_launch_coordinator_free(tddp_launch_coordinator *coordinator);

/* Goes on with another coordinator's document, which is taken over and cleared. Before anything
 * else was taken. Errors: TDDP_OUT_OF_MEMORY: the coordinator is of no further use. */
TDDP_NODISCARD tddp_status tddp_launch_coordinator_adopt(tddp_launch_coordinator *coordinator,
                                                         tddp_launch_state *state, int64_t now_ns);

/* Takes all entries that there are (no two with the same id), and what follows from time. To be
 * called whenever they have changed, and by tddp_launch_coordinator_due(). Senseless entries are
 * without effect. Errors as above. */
TDDP_NODISCARD tddp_status tddp_launch_coordinator_take(tddp_launch_coordinator *coordinator,
                                                        const tddp_launch_entry *entries, int count,
                                                        int64_t now_ns);

/* The caller was held up (stopped, say), and nodes may have given up their connections for that:
 * they have takeover_ms to make them again. */
void tddp_launch_coordinator_forgive(tddp_launch_coordinator *coordinator, int64_t now_ns);

/* The document. Borrowed until the next call. */
const tddp_launch_state *tddp_launch_coordinator_state(const tddp_launch_coordinator *coordinator);

/* By when the entries have to be taken again, changed or not; INT64_MAX: no time counts. */
int64_t tddp_launch_coordinator_due(const tddp_launch_coordinator *coordinator);

/* Whether the job has ended and all have read it, or had time to. */
bool tddp_launch_coordinator_over(const tddp_launch_coordinator *coordinator, int64_t now_ns);

#endif
