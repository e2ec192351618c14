/*
 * The council: decides who is in a round, with which rank, when a round is over and when the job
 * is. A state machine alone: it has no store, no clock and no thread. Events go in with the time at
 * which they were taken, words come out in a list. text.h says what they mean.
 *
 * Rules:
 *
 *   - The first round starts once `max` nodes are ready, or `min` are and the last call
 *     (last_call_ns since then) is over. A later one as soon as all nodes that live are ready and
 *     there are `min`. A council that goes on with another one's job (its nodes tell of earlier
 *     rounds) waits until the nodes of the last round have come, or until it is quiet (settle_ns).
 *   - A worker's failure ends the round and costs a restart; beyond max_restarts it ends the job.
 *   - A node that is silent for patience_ns is lost. Elastic (min < max): lost nodes, leaving ones
 *     and new ones that are ready change the round, which costs nothing. Else a node less costs a
 *     restart, the others wait for another in its place; with no restart left the job ends.
 *   - Before the first round another may come for a node that goes; but a fixed job without
 * restarts ends when a node leaves.
 *   - Waiting for nodes ends the job after join_timeout_ns.
 *   - Once some nodes are done with a round, new ones wait, and a done one that goes is not missed.
 *   - A newcomer in whose way a node stands (the same --node-rank, or no place free) waits until
 *     that node has shown that it lives, then is refused or becomes a spare; or until that one is
 *     lost.
 *   - Ranks: --node-rank, else the last rank, else that of a node of the same host that went, else
 *     the lowest one free, in the order of coming; the hosting node first.
 */
#ifndef TDDP_LAUNCH_COUNCIL_H
#define TDDP_LAUNCH_COUNCIL_H

#include "launch/rendezvous/text.h"

typedef struct tddp_launch_council tddp_launch_council;

typedef struct tddp_launch_council_opts {
    int min_nodes;
    int max_nodes;
    int max_restarts;
    bool elastic;        /* false also for min < max: such a job is of max nodes */
    bool fixed;          /* its nodes are known beforehand: no other comes for one that leaves */
    bool hands_over;     /* another endpoint may go on when the hosting node leaves */
    const char *run_id;  /* borrowed, as is `where` */
    const char *where;   /* "10.0.0.1:29400": what messages call the meeting place */
    int64_t patience_ns; /* of silence before a node is lost */
    int64_t join_timeout_ns;
    int64_t last_call_ns;
    int64_t settle_ns;
    int64_t tell_every_ns;
    int64_t goodbye_ns; /* for all to read the end */
} tddp_launch_council_opts;

/* Words to write, oldest first. All zero is an empty list. */
typedef struct tddp_launch_words {
    tddp_launch_word *words;
    size_t count;
    size_t capacity;
} tddp_launch_words;

/* Frees the words and empties the list. */
void tddp_launch_words_free(tddp_launch_words *words);

/* Errors: TDDP_OUT_OF_MEMORY. Caller: tddp_launch_council_free(). */
TDDP_NODISCARD tddp_status tddp_launch_council_create(const tddp_launch_council_opts *opts,
                                                      int64_t now_ns, tddp_launch_council **out);
void tddp_launch_council_free(tddp_launch_council *council);

/* Takes an event, appends the words that follow from it. Senseless events are without effect.
 * Errors: TDDP_OUT_OF_MEMORY: the council is of no further use. */
TDDP_NODISCARD tddp_status tddp_launch_council_take(tddp_launch_council *council,
                                                    const tddp_launch_event *event, int64_t now_ns,
                                                    tddp_launch_words *words);

/* What follows from time alone; to be called several times a second, after all waiting events were
 * taken. A caller that was held up (stopped, say) may come late: silence in that time is not
 * counted against nodes. Errors as above. */
TDDP_NODISCARD tddp_status tddp_launch_council_tick(tddp_launch_council *council, int64_t now_ns,
                                                    tddp_launch_words *words);

/* Whether the end was said; and whether all have read it too, or had time to. */
bool tddp_launch_council_ended(const tddp_launch_council *council);
bool tddp_launch_council_over(const tddp_launch_council *council, int64_t now_ns);

/* The last round started, or -1; restarts used. */
int tddp_launch_council_round(const tddp_launch_council *council);
int tddp_launch_council_restart(const tddp_launch_council *council);

#endif
