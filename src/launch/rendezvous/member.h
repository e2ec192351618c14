/*
 * This node among the others: what the rendezvous thread does. member.c goes through a job's rounds
 * with the coordinator (text.h has the protocol), member_messages.c does what the coordinator says,
 * member_place.c works out this node's place in a round, member_leader.c takes a slot at a
 * coordinator and goes to the next one. find.c finds the coordinator, find_host.c has this node be
 * it. backend.h is how any of it reaches the others. The thread alone uses all of it.
 */
#ifndef TDDP_LAUNCH_MEMBER_H
#define TDDP_LAUNCH_MEMBER_H

#include <tddp/store.h>

#include "base/base.h"
#include "launch/rendezvous/address.h"
#include "launch/rendezvous/host.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/rendezvous/text.h"
#include "launch/rendezvous/times.h"

/* What the agent wants of the thread. */
typedef struct tddp_launch_orders {
    bool done;
    bool failed;
    bool after_peer; /* with `failed`: others know more, so they have the message first */
    bool leave;
    bool again;
    bool quit;
    char failure[TDDP_LAUNCH_NOTIFICATION_BYTES];
    char leave_text[256];
} tddp_launch_orders;

/* --- rendezvous.c: the mailbox --------------------------------------------------------------- */

/* Takes the orders that came since the last time, and calms the cancel token; `quit` stays. */
tddp_launch_orders tddp_launch_rendezvous_orders(tddp_launch_rendezvous *rendezvous);

/* News for the agent; `world` only for JOINED. */
void tddp_launch_rendezvous_send_notification(tddp_launch_rendezvous *rendezvous,
                                              tddp_launch_notification notification,
                                              const tddp_launch_world *world, const char *text);

/* --- the node -------------------------------------------------------------------------------- */

typedef enum tddp_launch_stage {
    TDDP_LAUNCH_AWAITING, /* no round: one is waited for */
    TDDP_LAUNCH_ENTERING, /* in a round, whose workers' store is not known yet */
    TDDP_LAUNCH_WORKING,  /* the agent was told to start its workers */
} tddp_launch_stage;

/* The coordinator, and the way to it. All zero: none is known. */
typedef struct tddp_launch_leader {
    int64_t term;     /* its generation */
    bool own;         /* it runs in this process */
    void *connection; /* the backend's */
} tddp_launch_leader;

typedef struct tddp_launch_node_backend tddp_launch_node_backend; /* backend.h */

typedef struct tddp_launch_node {
    const tddp_launch_options *options;
    tddp_launch_times times;
    const char *run_id;
    int local_size;
    tddp_launch_rendezvous *mailbox;
    tddp_cancel *cancel; /* triggered with every order */
    const tddp_launch_node_backend *backend;
    void *backend_state;
    tddp_launch_host *host; /* NULL: this node does not coordinate */
    tddp_launch_leader leader;
    int64_t last_term; /* of the last leader that took this node; 0: none */
    tddp_launch_joiner self;
    int slot;         /* at the leader; 0: none yet */
    int next_message; /* at the leader */
    tddp_launch_stage stage;
    int round;       /* the last one this node was in, or -1 */
    bool clear;      /* no worker of it is left */
    bool ready_told; /* at the leader, for the next round */
    bool was_in;     /* the job took this node once, at some leader */
    bool ended;      /* the coordinator has ended the job */
    bool over;       /* nothing more is to be done but to say goodbye */
    tddp_launch_orders orders;
    int64_t report_failure_at; /* when a failure that others may know more of is told; INT64_MAX:
                                  none */
    int64_t beat_at;
    int64_t heard_ns; /* when the leader answered a beat last */
    tddp_launch_world world;
    char master_host[TDDP_LAUNCH_NAME_BYTES];
    tddp_store_server *workers; /* rank 0's node: the workers' store */
} tddp_launch_node;

/* Errors: TDDP_OUT_OF_MEMORY, TDDP_SYSTEM. Caller: tddp_launch_node_free(). */
TDDP_NODISCARD tddp_status tddp_launch_node_create(const tddp_launch_options *options,
                                                   const tddp_launch_times *times,
                                                   const char *run_id, int local_size,
                                                   tddp_launch_rendezvous *mailbox,
                                                   tddp_cancel *cancel, tddp_launch_node **out);
void tddp_launch_node_free(tddp_launch_node *node);

/* Takes part until the job is over for this node; the agent has all notifications then. */
void tddp_launch_node_run(tddp_launch_node *node);

/* --- member.c, for the others ---------------------------------------------------------------- */

tddp_slice tddp_launch_slice(const char *text);

/* How long a store may take to answer before its connection is made anew; orders do not end it. */
tddp_wait tddp_launch_answer_wait(const tddp_launch_node *node);

/* Takes new orders in; false if the node is to go. */
bool tddp_launch_node_take_orders(tddp_launch_node *node);

/* Tell the coordinator; the latter with few messages of its own. */
TDDP_NODISCARD tddp_status tddp_launch_node_push(tddp_launch_node *node,
                                                 const tddp_launch_event *event);
TDDP_NODISCARD tddp_status tddp_launch_node_push_kind(tddp_launch_node *node,
                                                      tddp_launch_event_kind kind, int round,
                                                      const char *text);

/* If one is due: a sign of life, and a look whether the leader still leads. */
TDDP_NODISCARD tddp_status tddp_launch_node_beat(tddp_launch_node *node);

/* Tell the agent. */
void tddp_launch_node_send_notification(tddp_launch_node *node,
                                        tddp_launch_notification notification, const char *text);

/* Tells it why nothing more can be done here. */
void tddp_launch_node_give_up(tddp_launch_node *node, const char *text);

/* Whatever round this node is in is over: FAILED or CHANGED. */
void tddp_launch_node_round_over(tddp_launch_node *node, tddp_launch_notification notification,
                                 const char *text);

/* --- member_leader.c ------------------------------------------------------------------------- */

/* Finds out under which address --local-addr is to be known. */
TDDP_NODISCARD tddp_status tddp_launch_node_find_address(tddp_launch_node *node);

/* Finds a leader: the first one (`reason` is NULL) or, since the connection to one was lost for
 * `reason`, it or the next one. False if there is none for this node: the agent has been told. */
bool tddp_launch_node_seek(tddp_launch_node *node, const char *reason);

/* Takes a new slot at the leader. */
TDDP_NODISCARD tddp_status tddp_launch_node_join(tddp_launch_node *node);

/* --- member_messages.c --------------------------------------------------------------------------
 */

/* Does what a message says. After a failure, which is one of the way to the leader, the same
 * message may be given once more. */
TDDP_NODISCARD tddp_status tddp_launch_node_take_message(tddp_launch_node *node,
                                                         const tddp_launch_message *message);

/* The last message: no other follows. */
void tddp_launch_node_take_end(tddp_launch_node *node, const tddp_launch_message *message);

/* --- find_host.c ------------------------------------------------------------------------------ */

/* c10d and static: hosts the rendezvous if the endpoint is here and this node is to. */
TDDP_NODISCARD tddp_status tddp_launch_host_if_chosen(tddp_launch_node *node);

/* The same for a node that has not found its job yet, c10d only: whether a port is free by now. */
TDDP_NODISCARD tddp_status tddp_launch_host_late(tddp_launch_node *node);

/* etcd: becomes the coordinator, unless there is one or this node is not to. */
TDDP_NODISCARD tddp_status tddp_launch_host_campaign(tddp_launch_node *node);

/* --- find.c ---------------------------------------------------------------------------------- */

/* How long to look for a leader. */
typedef struct tddp_launch_search {
    int64_t limit_ms;
    bool exact;       /* no attempt lasts longer than the limit */
    bool lost;        /* a leader was there, and its connection is lost */
    int64_t gone_ms;  /* the limit once its host answers that nobody listens, or leads, there */
    const char *line; /* reported as soon as it is known to be silent; or NULL */
    bool gone;        /* out: its host has answered so */
    bool reported;    /* out: the line */
} tddp_launch_search;

/*
 * Looks for the leader until it is found or the time is up (at least once at all endpoints);
 * reports now and then what was tried. Errors: TDDP_CANCELED (the node is to go), TDDP_NOT_FOUND
 * (the job has ended: `*end` is its last message), TDDP_TIMEOUT (none was found), TDDP_MISMATCH (it
 * leads another kind of job), TDDP_OUT_OF_MEMORY. `*end` must be clear before.
 */
TDDP_NODISCARD tddp_status tddp_launch_find_leader(tddp_launch_node *node,
                                                   tddp_launch_search *search,
                                                   tddp_launch_leader *out,
                                                   tddp_launch_message *end);
void tddp_launch_leader_forget(const tddp_launch_node *node, tddp_launch_leader *leader);

/* --- member_place.c --------------------------------------------------------------------------- */

/* This node's place in a round, but for the workers' store; false if it is not in it. */
bool tddp_launch_place_take(tddp_launch_node *node, const tddp_launch_message *round);

/* On rank 0's node: opens the store for the workers of the round, unless it is open, and tells
 * where it is. */
TDDP_NODISCARD tddp_status tddp_launch_place_open_store(tddp_launch_node *node,
                                                        const tddp_launch_message *round);

#endif
