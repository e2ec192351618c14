/*
 * The coordinator decides which nodes are in a round, with which ranks, and when a round or the job
 * is over. It is a state machine alone: it has no store, no clock and no thread. It takes events
 * with the time at which they were read, and returns messages in a list; text.h says what they
 * mean.
 *
 * Rules:
 *
 *   - The first round starts once `max` nodes are ready, or once `min` are and last_call_ns have
 *     passed since. A later round starts as soon as all live nodes are ready and there are `min`. A
 *     coordinator that continues another one's job (its nodes report earlier rounds) waits until
 *     the nodes of the last round have joined, or until nobody has joined for settle_ns.
 *   - A worker's failure ends the round and costs a restart; beyond max_restarts it ends the job.
 *   - A node that is silent for node_timeout_ns is lost. In an elastic job (min < max) lost nodes,
 *     nodes that leave and ready newcomers change the round, which costs nothing. In other jobs the
 *     loss of a node costs a restart, and the others wait for a replacement; with no restart left
 *     the job ends.
 *   - Before the first round another node may replace one that leaves; but a fixed job without
 *     restarts ends when a node leaves.
 *   - Waiting for nodes ends the job after join_timeout_ns.
 *   - Once some nodes are done with a round, newcomers wait, and a done node that leaves is not
 *     missed.
 *   - A newcomer that conflicts with a node (the same --node-rank, or no free place) waits until
 *     that node has shown that it lives, and is then refused or becomes a spare; or until that node
 *     is lost.
 *   - Ranks: --node-rank, else the last rank, else that of a node of the same host that has left,
 *     else the lowest free one, in the order of joining; the hosting node first.
 */
#ifndef TDDP_LAUNCH_COORDINATOR_H
#define TDDP_LAUNCH_COORDINATOR_H

#include "launch/rendezvous/text.h"

typedef struct tddp_launch_coordinator tddp_launch_coordinator;

typedef struct tddp_launch_coordinator_opts {
    int min_nodes;
    int max_nodes;
    int max_restarts;
    bool elastic;       /* false also for min < max: such a job is of max nodes */
    bool fixed;         /* its nodes are known beforehand: no other comes for one that leaves */
    bool hands_over;    /* another torchrun coordinates on when the hosting node leaves */
    const char *run_id; /* borrowed, as is `where` */
    const char *where;  /* "10.0.0.1:29400": what messages call the meeting place */
    int64_t node_timeout_ns; /* of silence before a node is lost */
    int64_t join_timeout_ns;
    int64_t last_call_ns;
    int64_t settle_ns;
    int64_t report_every_ns;
    int64_t goodbye_ns; /* for all to read the end */
} tddp_launch_coordinator_opts;

/* Messages to write, oldest first. All zero is an empty list. */
typedef struct tddp_launch_messages {
    tddp_launch_message *messages;
    size_t count;
    size_t capacity;
} tddp_launch_messages;

/* Frees the messages and empties the list. */
void tddp_launch_messages_free(tddp_launch_messages *messages);

/* Errors: TDDP_OUT_OF_MEMORY. Caller: tddp_launch_coordinator_free(). */
TDDP_NODISCARD tddp_status tddp_launch_coordinator_create(const tddp_launch_coordinator_opts *opts,
                                                          int64_t now_ns,
                                                          tddp_launch_coordinator **out);
void tddp_launch_coordinator_free(tddp_launch_coordinator *coordinator);

/* Takes an event, appends the messages that follow from it. Senseless events are without effect.
 * Errors: TDDP_OUT_OF_MEMORY: the coordinator is of no further use. */
TDDP_NODISCARD tddp_status tddp_launch_coordinator_take(tddp_launch_coordinator *coordinator,
                                                        const tddp_launch_event *event,
                                                        int64_t now_ns,
                                                        tddp_launch_messages *messages);

/* What follows from time alone; to be called several times a second, after all waiting events were
 * taken. A caller that was held up (stopped, say) may come late: silence in that time is not
 * counted against nodes. Errors as above. */
TDDP_NODISCARD tddp_status tddp_launch_coordinator_tick(tddp_launch_coordinator *coordinator,
                                                        int64_t now_ns,
                                                        tddp_launch_messages *messages);

/* Whether the end was said; and whether all have read it too, or had time to. */
bool tddp_launch_coordinator_ended(const tddp_launch_coordinator *coordinator);
bool tddp_launch_coordinator_over(const tddp_launch_coordinator *coordinator, int64_t now_ns);

/* The last round started, or -1; restarts used. */
int tddp_launch_coordinator_round(const tddp_launch_coordinator *coordinator);
int tddp_launch_coordinator_restart(const tddp_launch_coordinator *coordinator);

#endif
