/*
 * A rendezvous backend: the place where nodes and coordinator leave their events and messages for
 * each other (text.h says what these are). c10d keeps them in a store that one of the nodes serves,
 * etcd in a cluster of its own. Each backend is a pair of tables: what a node needs of it, and what
 * the coordinator's host needs.
 */
#ifndef TDDP_LAUNCH_BACKEND_H
#define TDDP_LAUNCH_BACKEND_H

#include "launch/rendezvous/host.h"
#include "launch/rendezvous/member.h"

/* --- a node's side --------------------------------------------------------------------------- */

enum { TDDP_LAUNCH_WHY_BYTES = 320 };

/* One look for the coordinator. */
typedef struct tddp_launch_look {
    int64_t limit_ms;                /* how long it may take */
    tddp_launch_leader leader;       /* out: the coordinator; its `connection` is NULL if none */
    tddp_launch_message *end;        /* out: the last message of a job that has ended */
    bool gone;                       /* out: certainly no coordinator */
    char why[TDDP_LAUNCH_WHY_BYTES]; /* out: why there is none */
} tddp_launch_look;

/* All of it runs on the rendezvous thread. A failure but TDDP_OUT_OF_MEMORY and those that are
 * named means that the connection to the coordinator is of no further use. */
typedef struct tddp_launch_node_backend {
    /* Makes what the node keeps from one coordinator to the next; `close` frees it. */
    tddp_status (*open)(tddp_launch_node *node);
    void (*close)(tddp_launch_node *node);

    /* Fills `leader` or, if the job has ended that this node was in, `end`; with neither there is
     * no coordinator now, and perhaps a failure tells why: TDDP_CANCELED, TDDP_MISMATCH (another
     * kind of job), those of the connection. */
    tddp_status (*look)(tddp_launch_node *node, tddp_launch_look *look);

    /* Takes a slot at node->leader, 1 or more. Messages from `*next_message` on are its own. */
    tddp_status (*take_slot)(tddp_launch_node *node, int *slot, int *next_message);

    /* Sends an event; it may arrive twice. */
    tddp_status (*push)(tddp_launch_node *node, tddp_slice event);

    /* A sign of life; fails if the coordinator is known to lead no more. */
    tddp_status (*beat)(tddp_launch_node *node);

    /* Waits for a message and returns a copy. TDDP_TIMEOUT, TDDP_CANCELED: it did not come. */
    tddp_status (*await_message)(tddp_launch_node *node, int number, const tddp_wait *wait,
                                 tddp_blob *out);

    /* Frees a leader's connection. */
    void (*disconnect)(void *connection);

    /* What a lost coordinator is called, with where it was: "the torchrun that hosts … at H:P". */
    void (*name)(const tddp_launch_node *node, char *text, size_t size);

    /* The job goes on without its coordinator, for which nodes look after the next one. */
    bool survives;

    /* What to check where no coordinator is found: "check that …". */
    const char *remedy;
} tddp_launch_node_backend;

extern const tddp_launch_node_backend tddp_launch_c10d_node;
extern const tddp_launch_node_backend tddp_launch_etcd_node;

/* Fails with TDDP_MISMATCH, and a text, unless a job of this kind is this node's. */
TDDP_NODISCARD tddp_status tddp_launch_check_job(const tddp_launch_node *node, const char *job);

/* --- the coordinator's side ------------------------------------------------------------------ */

/* `start` and `stop` are called by the host's owner, before the coordinator's thread starts and
 * after it has ended; the others by that thread. */
typedef struct tddp_launch_coordinator_backend {
    /* Makes host->state, and this host the only coordinator: sets host->term, which is larger than
     * any before, and host->where. TDDP_ADDRESS_IN_USE: there is another one. `stop` frees what
     * `start` made, also after a failure. */
    tddp_status (*start)(tddp_launch_host *host);
    void (*stop)(tddp_launch_host *host);

    /* Lets nodes in; once more after any other function has failed. */
    tddp_status (*open)(tddp_launch_host *host);

    /* Takes an event, waiting a moment for it with `block`. TDDP_NOT_FOUND: there is none. */
    tddp_status (*take)(tddp_launch_host *host, bool block, tddp_launch_event *event);

    /* Writes the message with this number; once more after a failure. `end`: it is the job's last,
     * and is stored for good before any node can read it. */
    tddp_status (*publish)(tddp_launch_host *host, int64_t number, tddp_slice text, bool end);

    /* No more nodes are let in; `ended`: the last message was written. */
    void (*close)(tddp_launch_host *host, bool ended);

    /* Another coordinator takes over from one that is lost; nodes show by leases that they live. */
    bool survives;
} tddp_launch_coordinator_backend;

extern const tddp_launch_coordinator_backend tddp_launch_c10d_coordinator;
extern const tddp_launch_coordinator_backend tddp_launch_etcd_coordinator;

#endif
