/*
 * The coordinator's state, shared by coordinator.c (entries and time), coordinator_nodes.c (nodes
 * come and go), coordinator_round.c (rounds and ranks) and coordinator_texts.c (its texts).
 *
 *                 enough nodes are ready             a failure, or nodes came or went
 *     GATHERING -----------------------> RUNNING ----------------------------------> GATHERING
 *         |  nobody comes, told to end      |  all are done, no restart left
 *         +---------------> ENDED <---------+
 */
#ifndef TDDP_LAUNCH_COORDINATOR_STATE_H
#define TDDP_LAUNCH_COORDINATOR_STATE_H

#include "launch/rendezvous/coordinator.h"

/* A PENDING newcomer has a node in its way that may be lost; a SPARE knows that there is no place;
 * a MEMBER has one of the `max` places and is in the next round, or in the running one; who is OUT
 * has left or was refused, and its entry is still there. */
typedef enum tddp_launch_node_status {
    TDDP_LAUNCH_PENDING,
    TDDP_LAUNCH_SPARE,
    TDDP_LAUNCH_MEMBER,
    TDDP_LAUNCH_OUT,
} tddp_launch_node_status;

typedef struct tddp_launch_participant {
    tddp_launch_entry entry; /* as it was read last */
    tddp_launch_node_status status;
    int rank;           /* in its last round, or of one of its host that went; -1: none */
    int round;          /* its last */
    int64_t probe;      /* PENDING: the one that others must have answered; 0: none yet */
    int64_t missing_ns; /* when its entry was found missing; 0: it is there */
    bool adopted;       /* of another coordinator's document, and not seen yet */
    bool in;            /* the running round */
} tddp_launch_participant;

struct tddp_launch_coordinator {
    tddp_launch_coordinator_opts opts;
    bool elastic; /* nodes come and leave without a restart */
    tddp_launch_state doc;
    bool changed;                   /* the document, in the call under way */
    tddp_launch_participant *nodes; /* in the order in which they came */
    int count;
    bool adopted;         /* none of the document's nodes was seen yet */
    bool finishing;       /* someone is done with the running round */
    int64_t patient_ns;   /* until when a node that is missing has takeover_ms; 0: no node has */
    int64_t gathering_ns; /* since when */
    int64_t enough_ns;    /* since when there are enough for a round; 0: there are not */
    int64_t report_ns;    /* when to report next */
    int64_t ended_ns;
    /* Of the call under way. */
    int64_t now_ns;
    tddp_status status; /* once it is a failure it stays */
};

/* Whether its workers of earlier rounds have ended. */
static inline bool tddp_launch_participant_ready(const tddp_launch_participant *node)
{
    return !node->in && node->entry.ready > node->round;
}

/* Whether its workers of the running round have succeeded. */
static inline bool tddp_launch_participant_done(const tddp_launch_coordinator *coordinator,
                                                const tddp_launch_participant *node)
{
    return node->in && node->entry.done == coordinator->doc.round;
}

/* --- coordinator.c --------------------------------------------------------------------------- */

/* One more node; NULL: short memory, which is noted. */
tddp_launch_participant *tddp_launch_coordinator_add(tddp_launch_coordinator *coordinator,
                                                     const tddp_launch_entry *entry);

/* --- coordinator_round.c -------------------------------------------------------------------------
 */

/* How many nodes have a place, or are ready beside. */
int tddp_launch_coordinator_members(const tddp_launch_coordinator *coordinator);
int tddp_launch_coordinator_ready(const tddp_launch_coordinator *coordinator);

/* How many a round needs. */
int tddp_launch_coordinator_needed(const tddp_launch_coordinator *coordinator);

/* Waits for nodes from now on. */
void tddp_launch_coordinator_gather(tddp_launch_coordinator *coordinator);

/* Starts a round if one may start now. */
void tddp_launch_coordinator_try_start(tddp_launch_coordinator *coordinator);

bool tddp_launch_coordinator_has_restart(const tddp_launch_coordinator *coordinator);

/* Ends the job; nothing but refusals changes after it. */
void tddp_launch_coordinator_end_job(tddp_launch_coordinator *coordinator, tddp_launch_how how,
                                     const char *text);

/* Ends the running round; its nodes are no longer ready. */
void tddp_launch_coordinator_end_round(tddp_launch_coordinator *coordinator, tddp_launch_how how,
                                       const char *text);

/* Ends the round for a reason that costs a restart; `last` is how the job ends without one. */
void tddp_launch_coordinator_charge_restart(tddp_launch_coordinator *coordinator,
                                            tddp_launch_how last, const char *text);

/* Ends the round since a node is not in it any more: that costs a restart unless nodes may come and
 * leave. */
void tddp_launch_coordinator_lose_round(tddp_launch_coordinator *coordinator, tddp_launch_how last,
                                        const char *text);

/* Ends the job if all of the running round are done. */
void tddp_launch_coordinator_check_done(tddp_launch_coordinator *coordinator);

/* --- coordinator_nodes.c -------------------------------------------------------------------------
 */

/* Whether this coordinator, or the one before, has refused a node. */
bool tddp_launch_coordinator_has_refused(const tddp_launch_coordinator *coordinator,
                                         const char *id);

/* A new entry. */
void tddp_launch_coordinator_join(tddp_launch_coordinator *coordinator,
                                  const tddp_launch_entry *entry);

/* Takes out a node whose entry says so, and does what follows; the entry is still there. */
void tddp_launch_coordinator_leave(tddp_launch_coordinator *coordinator,
                                   tddp_launch_participant *node);

/* By when a missing node counts as lost. */
int64_t tddp_launch_coordinator_lost_at(const tddp_launch_coordinator *coordinator,
                                        const tddp_launch_participant *node);

/* Removes the nodes whose entries are missing for too long. */
void tddp_launch_coordinator_remove_lost(tddp_launch_coordinator *coordinator);

/* Decides on those who have no place: spares before newcomers, within both by their coming. */
void tddp_launch_coordinator_place(tddp_launch_coordinator *coordinator);

/* --- coordinator_texts.c --------------------------------------------------------------------- */

enum { TDDP_LAUNCH_LIST_BYTES = 512 };

/* "node 1" or, without a rank, "a node"; with host and pid. Returns `text`. */
const char *tddp_launch_coordinator_name(const tddp_launch_participant *node,
                                         char text[TDDP_LAUNCH_LIST_BYTES]);

/* What is waited for, to all. */
void tddp_launch_coordinator_report_waiting(tddp_launch_coordinator *coordinator);

/* Why waiting is over. */
void tddp_launch_coordinator_describe_missing(const tddp_launch_coordinator *coordinator,
                                              char text[TDDP_LAUNCH_TEXT_BYTES]);

#endif
