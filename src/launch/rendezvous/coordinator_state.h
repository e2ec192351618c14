/*
 * The coordinator's state, shared by coordinator.c (events and time), coordinator_round.c (who is
 * in a round, with which rank) and coordinator_messages.c (its messages and texts).
 *
 *                 enough nodes are ready             a failure, or nodes came or went
 *     GATHERING -----------------------> RUNNING ----------------------------------> GATHERING
 *         |  nobody comes, told to end      |  all are done, no restart left
 *         +---------------> ENDED <---------+
 */
#ifndef TDDP_LAUNCH_COORDINATOR_STATE_H
#define TDDP_LAUNCH_COORDINATOR_STATE_H

#include "launch/rendezvous/coordinator.h"

typedef enum tddp_launch_stage {
    TDDP_LAUNCH_STAGE_GATHERING,
    TDDP_LAUNCH_STAGE_RUNNING,
    TDDP_LAUNCH_STAGE_ENDED,
} tddp_launch_stage;

/* Where a node stands. A HELD one has a node in its way that may be lost; a SPARE one knows that
 * there is no place; a MEMBER has one of the `max` places and is in the next round, or in the
 * running one. */
typedef enum tddp_launch_standing {
    TDDP_LAUNCH_HELD,
    TDDP_LAUNCH_SPARE,
    TDDP_LAUNCH_MEMBER,
} tddp_launch_standing;

typedef struct tddp_launch_participant {
    tddp_launch_joiner joiner;
    int slot;
    tddp_launch_standing standing;
    int rank;  /* in its last round, or of one of its host that went; -1: none */
    int round; /* its last */
    int64_t joined_ns;
    int64_t beat_ns; /* when it last said anything */
    bool ready;
    bool in;   /* the running round */
    bool done; /* with the running round */
    bool bye;
} tddp_launch_participant;

/* Where a node was that has gone. */
typedef struct tddp_launch_trace {
    char host[TDDP_LAUNCH_NAME_BYTES];
    int rank;
} tddp_launch_trace;

enum { TDDP_LAUNCH_MOST_TRACES = 256 };

struct tddp_launch_coordinator {
    tddp_launch_coordinator_opts opts;
    tddp_launch_stage stage;
    tddp_launch_participant *nodes; /* in the order in which they came */
    int count;
    int capacity;
    int *gone; /* slots that were given up, left or were refused */
    int gone_count;
    int gone_capacity;
    tddp_launch_trace traces[TDDP_LAUNCH_MOST_TRACES]; /* the latest of them, as a ring */
    int trace_count;
    int round; /* the last one started, by whomever; -1 */
    int restart;
    bool inherited;       /* the last round was another coordinator's */
    bool charged;         /* an inherited round's missing nodes have cost their restart */
    int old_nodes;        /* of that round */
    bool master;          /* of the running round is known */
    bool finishing;       /* someone is done with it */
    int64_t gathering_ns; /* since when */
    int64_t enough_ns;    /* since when there are enough for a first round; 0: there are not */
    int64_t last_join_ns;
    int64_t report_ns; /* when to tell next */
    int64_t gap_ns;    /* how long nobody looked at the events, the last time, and until when */
    int64_t gap_end_ns;
    int64_t tick_ns; /* the last one */
    int64_t ended_ns;
    tddp_launch_how ended_how;
    char ended_text[TDDP_LAUNCH_TEXT_BYTES];
    /* Of the call under way. */
    int64_t now_ns;
    tddp_launch_messages *messages;
    tddp_status status; /* once it is a failure it stays */
};

/* --- coordinator_round.c -------------------------------------------------------------------------
 */

/* How many nodes have a place, or are ready beside. */
int tddp_launch_coordinator_members(const tddp_launch_coordinator *coordinator);
int tddp_launch_coordinator_ready(const tddp_launch_coordinator *coordinator);

/* How many a round needs. */
int tddp_launch_coordinator_needed(const tddp_launch_coordinator *coordinator);

/* How many of an inherited round's nodes are here. */
int tddp_launch_coordinator_returned(const tddp_launch_coordinator *coordinator);

/* Whether a round may start now; starts it. */
bool tddp_launch_coordinator_may_start(tddp_launch_coordinator *coordinator);
void tddp_launch_coordinator_start(tddp_launch_coordinator *coordinator);

bool tddp_launch_coordinator_has_restart(const tddp_launch_coordinator *coordinator);

/* The last message but refusals, and the same again to nodes that missed it. */
void tddp_launch_coordinator_end_job(tddp_launch_coordinator *coordinator, tddp_launch_how how,
                                     const char *text);

/* How the job has ended, once more. */
void tddp_launch_coordinator_tell_end(tddp_launch_coordinator *coordinator);

/* Ends the running round; its nodes are no longer ready. */
void tddp_launch_coordinator_end_round(tddp_launch_coordinator *coordinator, tddp_launch_how how,
                                       const char *text);

/* Ends the round for a reason that costs a restart; `last` is how the job ends without one. */
void tddp_launch_coordinator_charge_restart(tddp_launch_coordinator *coordinator,
                                            tddp_launch_how last, const char *text);

/* Ends the job if all of the running round are done. */
void tddp_launch_coordinator_check_done(tddp_launch_coordinator *coordinator);

/* --- coordinator_nodes.c -------------------------------------------------------------------------
 */

typedef enum tddp_launch_departure {
    TDDP_LAUNCH_LOST,     /* silent for too long */
    TDDP_LAUNCH_LEFT,     /* told to end */
    TDDP_LAUNCH_REPLACED, /* the same process has come again */
} tddp_launch_departure;

/* Takes a node away and does what follows from that. */
void tddp_launch_coordinator_remove(tddp_launch_coordinator *coordinator,
                                    tddp_launch_participant *node, tddp_launch_departure how,
                                    const char *text);

void tddp_launch_coordinator_on_join(tddp_launch_coordinator *coordinator,
                                     const tddp_launch_event *event);

/* Decides on those who have no place: spares before newcomers, within both by their coming. */
void tddp_launch_coordinator_place(tddp_launch_coordinator *coordinator);

/* --- coordinator_messages.c ------------------------------------------------------------------ */

/* Appends a message to the list; NULL if memory is short. The text takes printf's arguments. */
tddp_launch_message *tddp_launch_coordinator_add_message(tddp_launch_coordinator *coordinator,
                                                         tddp_launch_message_kind kind,
                                                         const char *format, ...) TDDP_PRINTF(3, 4);

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
