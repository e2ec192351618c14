/*
 * The coordinator's state, shared by coordinator.c (nodes and their entries), coordinator_round.c
 * (rounds and ranks) and coordinator_texts.c (its texts). `c` is the coordinator in all of them.
 *
 *                 enough nodes are ready             a failure, or nodes came or went
 *     GATHERING -----------------------> RUNNING ----------------------------------> GATHERING
 *         |  nobody comes, told to end      |  all are done, no restart left
 *         +---------------> ENDED <---------+
 */
#ifndef TDDP_LAUNCH_COORDINATOR_STATE_H
#define TDDP_LAUNCH_COORDINATOR_STATE_H

#include "launch/rendezvous/coordinator.h"

/* A WAITING node has no place: a node that may be lost is in its way, or it is a spare, and was
 * told so. A MEMBER has one of the `max` places, and is in the running round, or else in the next
 * one. A node that is OUT has left or was refused, and its entry is still there. */
typedef enum tddp_launch_node_status {
    TDDP_LAUNCH_WAITING,
    TDDP_LAUNCH_MEMBER,
    TDDP_LAUNCH_OUT,
} tddp_launch_node_status;

typedef struct tddp_launch_participant {
    tddp_launch_entry entry; /* as it was read last */
    tddp_launch_node_status status;
    int rank;              /* in its last round, or of one of its host that went; -1: none */
    int round;             /* its last */
    int64_t probe;         /* the one that others must have answered; 0: none yet */
    int64_t missing_ns;    /* when its entry was found missing; 0: it is there */
    tddp_launch_note note; /* what it alone is told; no text: nothing */
} tddp_launch_participant;

struct tddp_launch_coordinator {
    tddp_launch_coordinator_opts opts;
    bool elastic; /* nodes come and leave without a restart */
    int needed;   /* nodes, for a round */
    tddp_launch_state doc;
    tddp_launch_participant *nodes; /* in the order in which they came */
    int count;
    bool adopted;       /* the document is another's, and none of its nodes was seen yet */
    int64_t patient_ns; /* nodes that went missing before this moment have takeover_ms */
    int64_t stage_ns;   /* since when it gathers, or has ended */
    int64_t enough_ns;  /* since when there are enough for a round; 0: there are not */
    int64_t report_ns;  /* of the last report, or of the start of waiting */
    int64_t due_ns;     /* when the entries have to be taken again */
    /* Of the call under way. */
    int64_t now_ns;
    tddp_status status; /* once it is a failure it stays */
};

/* Whether its workers of earlier rounds have ended; of a node that is in no running round. */
static inline bool tddp_launch_participant_ready(const tddp_launch_participant *node)
{
    return node->entry.ready > node->round;
}

/* --- coordinator_round.c --------------------------------------------------------------------- */

/* Of the nodes with a place: all, those whose entries are there, those of them that are ready, and
 * those that have not succeeded in this round. */
typedef struct tddp_launch_counts {
    int members;
    int here;
    int ready;
    int undone;
} tddp_launch_counts;

tddp_launch_counts tddp_launch_coordinator_count(const tddp_launch_coordinator *c);

/* Whether a member wants this rank; -1: whether one has no wish. */
bool tddp_launch_coordinator_has_rank(const tddp_launch_coordinator *c, int rank);

/* Whether so much time has passed; if not, the entries have to be taken again then. */
bool tddp_launch_coordinator_passed(tddp_launch_coordinator *c, int64_t since_ns, int64_t ms);

/* Starts a round if one may start now, gives up if none has for too long, and reports. */
void tddp_launch_coordinator_gather(tddp_launch_coordinator *c);

/* Whether no other node can replace one: nodes may not come and leave, and no restart is left. */
bool tddp_launch_coordinator_is_final(const tddp_launch_coordinator *c);

/* Ends the running round: FAILED, if a restart is left for it, or CHANGED, which costs one too
 * where nodes may not come and leave. Otherwise, and if none runs, the job ends. */
void tddp_launch_coordinator_end(tddp_launch_coordinator *c, tddp_launch_how how,
                                 const char *format, ...) TDDP_PRINTF(3, 4);

/* --- coordinator_texts.c --------------------------------------------------------------------- */

enum { TDDP_LAUNCH_LIST_BYTES = 512 };

/* "node 1" or, without a rank, "a node"; with host and pid. Returns `text`. */
const char *tddp_launch_coordinator_name(const tddp_launch_participant *node,
                                         char text[TDDP_LAUNCH_LIST_BYTES]);

/* What is waited for; `in_vain`: why the job ends after join_ms. */
void tddp_launch_coordinator_describe_waiting(const tddp_launch_coordinator *c, bool in_vain,
                                              char text[TDDP_LAUNCH_STATUS_BYTES]);

#endif
