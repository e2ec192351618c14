/*
 * This node among the others: what the rendezvous thread does. member.c goes through a job with
 * the others: it waits for a change, coordinates if this node leads (leader.c), and does what the
 * document says (member_round.c). find.c connects to where the nodes meet, and serves it if that is
 * this node's part. What is said to be of both sides is under a lock, the rest the thread's alone.
 */
#ifndef TDDP_LAUNCH_MEMBER_H
#define TDDP_LAUNCH_MEMBER_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include <tddp/store.h>

#include "base/base.h"
#include "launch/rendezvous/backend.h"
#include "launch/rendezvous/coordinator.h"

enum { TDDP_LAUNCH_WHERE_BYTES = 2 * TDDP_LAUNCH_HOST_BYTES, TDDP_LAUNCH_WHY_BYTES = 320 };

typedef enum tddp_launch_part {
    TDDP_LAUNCH_AWAITING, /* no round: one is waited for */
    TDDP_LAUNCH_ENTERING, /* in a round, whose workers' store is not known or not reached yet */
    TDDP_LAUNCH_WORKING,  /* the agent was told to start its workers */
} tddp_launch_part;

/* With where the nodes meet. */
typedef enum tddp_launch_contact {
    TDDP_LAUNCH_SEARCHING,
    TDDP_LAUNCH_CONNECTED,
    TDDP_LAUNCH_SILENT, /* nobody answers any more, and the agent knows */
    TDDP_LAUNCH_LOST,   /* nobody is there any more, and the agent knows */
} tddp_launch_contact;

typedef struct tddp_launch_rendezvous {
    /* Of both sides, under `lock`. Each has a token that wakes it, triggered and calmed under the
     * lock, so that nothing is missed: the thread's is link.cancel. */
    pthread_t thread;
    pthread_mutex_t lock;
    tddp_cancel *notified; /* the agent's: notifications are queued, or the thread has ended */
    bool asked[TDDP_LAUNCH_REQUESTS]; /* by the agent, until the thread takes it */
    char asked_texts[TDDP_LAUNCH_REQUESTS][TDDP_LAUNCH_TEXT_BYTES];
    STAILQ_HEAD(, tddp_launch_queued) queue; /* notifications */
    atomic_bool thread_over;
    /* The thread's own from here on. */
    const char *meets;                   /* "etcd", say, for texts */
    char where[TDDP_LAUNCH_WHERE_BYTES]; /* the endpoints, for texts */
    tddp_launch_link link;
    tddp_launch_contact contact;
    tddp_launch_view view; /* what was read last */
    bool viewed;           /* since the connection was made, and since the last entry was put */
    bool followed;         /* the document of this connection: it may be of another job */
    int64_t heard_ns;      /* when a sign of life of this node was answered last */
    int64_t alone_ns;      /* since when nobody is known to lead */
    int64_t report_ns;     /* when to report that next */
    /* Of the node that leads. */
    bool candidate;                       /* it may */
    tddp_launch_coordinator *coordinator; /* NULL: it does not */
    /* This node. */
    tddp_launch_entry entry; /* as it is to be written */
    tddp_bytes put;          /* as it is written; empty: it is not */
    tddp_launch_part part;
    bool cleared;       /* the agent has no workers of a round any more that is not over yet */
    bool over;          /* nothing more is to be done but to take leave */
    bool quit;          /* and not to wait for anything */
    int64_t close_ns;   /* until when, if the node leads; INT64_MAX: it has not said so */
    int64_t failure_ns; /* when a worker's failure is told, of which others may know more;
                                  INT64_MAX: none is to be */
    int64_t started;    /* the last job that was seen under way; 0: none */
    int64_t reported;   /* its last status line */
    char spare_text[TDDP_LAUNCH_NODE_NOTE_BYTES]; /* what this node was told as a spare */
    tddp_launch_world world;
    int64_t reach_until_ns;     /* ENTERING: when not to try the workers' store any more */
    tddp_store_server *workers; /* rank 0's node: the workers' store */
} tddp_launch_node;

/* --- rendezvous.c ----------------------------------------------------------------------------- */

/* News for the agent; the node's world goes along. After DONE, ENDED, STOPPED and ERROR the node is
 * over. */
void tddp_launch_node_notify(tddp_launch_node *node, tddp_launch_notification notification,
                             const char *format, ...) TDDP_PRINTF(3, 4);

/* --- member.c -------------------------------------------------------------------------------- */

/* The thread: takes part until the job is over for this node; the agent has all notifications then.
 */
void *tddp_launch_node_run(void *node);

/* --- leader.c -------------------------------------------------------------------------------- */

/* If this node leads, or may: decides on what was read, and writes the document. */
TDDP_NODISCARD tddp_status tddp_launch_node_lead(tddp_launch_node *node);

/* Decides no more: another node leads, or the connection is lost. */
void tddp_launch_node_step_down(tddp_launch_node *node);

/* --- member_round.c -------------------------------------------------------------------------- */

/* Does what the document says that was read; may try once to reach the workers' store. */
TDDP_NODISCARD tddp_status tddp_launch_node_follow(tddp_launch_node *node);

/* Whatever round this node is in is over: FAILED or CHANGED. NULL: the others have gone on without
 * it. */
void tddp_launch_node_round_over(tddp_launch_node *node, tddp_launch_notification notification,
                                 const char *text);

/* --- find.c ---------------------------------------------------------------------------------- */

/* Tries once to connect to where the nodes meet, which this node may be the one to serve; after an
 * attempt in vain there is a pause, or the node is over, and the agent knows why. TDDP_CANCELED:
 * there is a request. */
TDDP_NODISCARD tddp_status tddp_launch_node_search(tddp_launch_node *node);

/* From now on nobody is known to lead. */
void tddp_launch_node_begin_search(tddp_launch_node *node);

/* Nobody is known to lead: tells so now and then, and gives up in the end. */
void tddp_launch_node_await_leader(tddp_launch_node *node, const char *why);

/* Who served the store has ended, and took the job along. An elastic one begins again, with this
 * node as a newcomer, if another host comes in a moment. */
void tddp_launch_node_lose_job(tddp_launch_node *node, const char *why);

/* --- address.c: which of its addresses a node tells the others ------------------------------- */

/* Whether this is a numeric loopback address. */
bool tddp_launch_address_is_loopback(const char *address);

/* The numeric address of a host, or (`towards`) of this host on the way to it; a name is looked up.
 * Short (at most ten seconds), ended early by `cancel`. */
TDDP_NODISCARD tddp_status tddp_launch_address_of(const char *host, bool towards,
                                                  tddp_cancel *cancel,
                                                  char out[TDDP_LAUNCH_ADDR_BYTES]);

/* Under which address the others find what listens here. `own` is how this node sees itself; a
 * loopback address will do only if all `others` have one too, since then all are on this host: else
 * it becomes the address on the way to the first of them that has another. */
void tddp_launch_address_choose(const char *own, const tddp_launch_member *others, int count,
                                tddp_cancel *cancel, char out[TDDP_LAUNCH_ADDR_BYTES]);

/* Connects once, within `limit_ms`, to the workers' store of `master`. `own` is this node's
 * address; a failure's text says what to do about a wrong interface. */
TDDP_NODISCARD tddp_status tddp_launch_address_check(const char *address, int port,
                                                     const char *master, const char *own,
                                                     int64_t limit_ms, tddp_cancel *cancel);

#endif
