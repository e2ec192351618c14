/*
 * What a node does to join the others and to watch them, step by step; driven by rendezvous.c, on
 * its thread. State among nodes is text below torchrun/RUN_ID/ in the store where they meet.
 */
#ifndef TDDP_LAUNCH_NODES_H
#define TDDP_LAUNCH_NODES_H

#include <tddp/store.h>

#include "base/base.h"
#include "launch/rendezvous/rendezvous.h"

/* How long a store that is there may take to answer. */
enum { TDDP_LAUNCH_ANSWER_MS = 5000 };

/* What the agent wants of the thread; taken with tddp_launch_orders_take(). */
typedef struct tddp_launch_orders {
    tddp_launch_news tell; /* NONE, DONE, FAILED or STOPPED */
    bool again;
    bool quit;
    char text[TDDP_LAUNCH_NEWS_BYTES];
} tddp_launch_orders;

/* This node among the others. Used by the thread alone, but for `cancel`. */
typedef struct tddp_launch_nodes {
    const tddp_launch_options *options;
    const char *run_id;
    int local_size;
    tddp_launch_rendezvous *mailbox; /* for tddp_launch_orders_take() */
    tddp_cancel *cancel;             /* triggered with every order */
    tddp_store_server *server;       /* on the host: where nodes meet */
    tddp_store_server *workers;      /* on the host: the workers' store, if it is another */
    tddp_store *store;
    char host[TDDP_LAUNCH_HOST_BYTES];
    int port;
    int rank; /* -1 until claimed */
    bool hosting;
} tddp_launch_nodes;

/* Takes the orders that came since the last time, and calms the cancel token. */
tddp_launch_orders tddp_launch_orders_take(tddp_launch_rendezvous *rendezvous);

/* Hosts or finds the meeting place, checks that the nodes are of one mind, claims a rank. */
TDDP_NODISCARD tddp_status tddp_launch_nodes_meet(tddp_launch_nodes *nodes);

/* Waits for all nodes of a round and works out the world. News: JOINED, STOPPED or ERROR. */
tddp_launch_news tddp_launch_nodes_join(tddp_launch_nodes *nodes, int round,
                                        tddp_launch_world *world, char *text);

/* Carries news between this node and the others until the round is over; follows orders. */
tddp_launch_news tddp_launch_nodes_watch(tddp_launch_nodes *nodes, int round, char *text);

/* Says goodbye; the host waits a moment for the others, who still read its store. */
void tddp_launch_nodes_leave(tddp_launch_nodes *nodes);
void tddp_launch_nodes_close(tddp_launch_nodes *nodes);

/* --- meet.c, for join.c and watch.c ---------------------------------------------------------- */

tddp_slice tddp_launch_slice(const char *text);

/* A wait that orders of the agent end. */
tddp_wait tddp_launch_wait(const tddp_launch_nodes *nodes, int64_t timeout_ms);

/* A wait that orders do not end: for steps that are short and must not be lost. */
tddp_wait tddp_launch_short_wait(void);

/* --- watch.c, for join.c and meet.c ----------------------------------------------------------- */

/* Counts this node among those that the host waits for at the end. */
TDDP_NODISCARD tddp_status tddp_launch_nodes_arrive(const tddp_launch_nodes *nodes);

/* Takes the agent's orders and passes on what they tell; false if the thread is to end. */
bool tddp_launch_nodes_obey(tddp_launch_nodes *nodes, int round);

/* Reads how a round ended, if it has: NONE if not. */
tddp_launch_news tddp_launch_nodes_ended(tddp_launch_nodes *nodes, int round, char *text);

#endif
