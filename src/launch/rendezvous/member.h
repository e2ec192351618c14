/*
 * This node among the others: what the rendezvous thread does. member.c goes through a job with
 * the others: it waits for a change, coordinates if this node leads (leader.c), and does what the
 * document says (member_round.c). find.c connects to where the nodes meet, hosting.c has this node
 * serve it. What is said to be of both sides is under a lock, the rest the thread's alone.
 */
#ifndef TDDP_LAUNCH_MEMBER_H
#define TDDP_LAUNCH_MEMBER_H

#include <pthread.h>

#include <tddp/store.h>

#include "base/base.h"
#include "launch/rendezvous/address.h"
#include "launch/rendezvous/backend.h"
#include "launch/rendezvous/coordinator.h"
#include "launch/rendezvous/rendezvous.h"

/* What the agent has told, until the thread takes it. */
typedef struct tddp_launch_requests {
    bool flags[TDDP_LAUNCH_REQUESTS];
    char failure[TDDP_LAUNCH_TEXT_BYTES];
    char leave_text[TDDP_LAUNCH_NAME_BYTES];
} tddp_launch_requests;

typedef enum tddp_launch_part {
    TDDP_LAUNCH_AWAITING, /* no round: one is waited for */
    TDDP_LAUNCH_ENTERING, /* in a round, whose workers' store is not known or not reached yet */
    TDDP_LAUNCH_WORKING,  /* the agent was told to start its workers */
} tddp_launch_part;

typedef struct tddp_launch_rendezvous {
    /* Of both sides, under `lock`. Each has a token that wakes it, triggered and calmed under the
     * lock, so that nothing is missed. */
    pthread_t thread;
    pthread_mutex_t lock;
    tddp_cancel *cancel;   /* the thread's: triggered with every request */
    tddp_cancel *notified; /* the agent's: notifications are queued, or the thread has ended */
    tddp_launch_requests asked;
    struct tddp_launch_queued *first; /* notifications */
    struct tddp_launch_queued **last_link;
    bool thread_over;
    /* The thread's own from here on. */
    const tddp_launch_options *options;
    tddp_launch_times times;
    const char *run_id;
    char job[TDDP_LAUNCH_JOB_BYTES];         /* the settings that all nodes share */
    char where[TDDP_LAUNCH_HOST_BYTES + 32]; /* the endpoint, for texts */
    char meets[TDDP_LAUNCH_HOST_BYTES + 96]; /* "etcd at HOST:PORT", for texts */
    int local_size;
    tddp_launch_link link;
    tddp_store_server *host; /* NULL: this node does not serve the endpoint's store */
    bool candidate;          /* it may lead */
    tddp_launch_view view;   /* what was read last */
    bool viewed;             /* since the connection was made */
    /* Of the node that leads. */
    int64_t lead_at; /* when one that does not serve the store may try to; 0: not asked yet */
    bool leads;
    tddp_launch_coordinator *coordinator; /* NULL: it does not lead, or decides nothing yet */
    /* This node. */
    tddp_launch_entry entry; /* as it is to be written */
    bool entry_changed;      /* and was not yet */
    tddp_launch_part part;
    bool clear;                /* no worker of it is left */
    bool was_in;               /* a job was seen under way */
    bool refused;              /* the job has not taken it, or not again */
    bool ended;                /* the job has ended */
    bool over;                 /* nothing more is to be done but to take leave */
    bool leave;                /* it was told to */
    bool quit;                 /* and not to wait for anything */
    int64_t report_failure_at; /* when a worker's failure is told, of which others may know more;
                                  INT64_MAX: none is to be */
    int64_t beat_at;
    int64_t heard_ns;  /* when a sign of life of this node was answered last */
    int64_t began_ns;  /* since when a round, or a leader, is waited for */
    int64_t report_at; /* when to report what is waited for */
    int64_t started;   /* the last job that was seen under way; 0: none */
    int64_t reported;  /* its last status line */
    char spare_text[TDDP_LAUNCH_NODE_NOTE_BYTES]; /* what this node was told as a spare */
    tddp_launch_world world;
    char master_host[TDDP_LAUNCH_NAME_BYTES];
    int64_t reach_began_ns;     /* ENTERING: when the store was tried first; 0: not yet */
    tddp_store_server *workers; /* rank 0's node: the workers' store */
} tddp_launch_node;

/* --- rendezvous.c ----------------------------------------------------------------------------- */

/* News for the agent; the node's world goes along. After DONE, ENDED, STOPPED and ERROR the node is
 * over. */
void tddp_launch_node_notify(tddp_launch_node *node, tddp_launch_notification notification,
                             const char *format, ...) TDDP_PRINTF(3, 4);

/* --- member.c, for the others ---------------------------------------------------------------- */

/* Takes part until the job is over for this node; the agent has all notifications then. */
void tddp_launch_node_run(tddp_launch_node *node);

/* Takes new requests in; false if the node is to go. */
bool tddp_launch_node_take_requests(tddp_launch_node *node);

/* --- leader.c -------------------------------------------------------------------------------- */

/* If this node leads, or may: decides on what was read, and writes the document. */
TDDP_NODISCARD tddp_status tddp_launch_node_lead(tddp_launch_node *node);

/* Decides no more: another node leads, or the connection is lost. */
void tddp_launch_node_step_down(tddp_launch_node *node);

/* By when tddp_launch_node_lead() is due, changed or not; INT64_MAX: time does not count. */
int64_t tddp_launch_node_lead_due(const tddp_launch_node *node);

/* --- member_round.c -------------------------------------------------------------------------- */

/* Does what the document says. */
TDDP_NODISCARD tddp_status tddp_launch_node_follow(tddp_launch_node *node,
                                                   const tddp_launch_state *doc);

/* Whatever round this node is in is over: FAILED or CHANGED. */
void tddp_launch_node_round_over(tddp_launch_node *node, tddp_launch_notification notification,
                                 const char *text);

/* Tries to reach the workers' store, once. */
void tddp_launch_node_reach_master(tddp_launch_node *node);

/* --- find.c ---------------------------------------------------------------------------------- */

/* Connects to where the nodes meet. False: the node is over, and the agent knows why. */
bool tddp_launch_node_connect(tddp_launch_node *node);

/* While nobody leads: tells so now and then, and gives up in the end. */
void tddp_launch_node_await_leader(tddp_launch_node *node);

/* --- hosting.c ------------------------------------------------------------------------------- */

/* Serves the endpoint's store if this node is the one to, or may. Not `first`: nobody was found
 * there, and what held the port may be gone by now. */
TDDP_NODISCARD tddp_status tddp_launch_node_host(tddp_launch_node *node, bool first);

#endif
