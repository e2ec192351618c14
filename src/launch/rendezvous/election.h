/*
 * How one of several endpoints comes to lead, and never two at a time. Every endpoint's torchrun
 * runs an election beside the store that it hosts: it keeps that store's vote, and it stands for
 * leader.
 *
 * A vote is the key `lease` in an endpoint's store:
 *
 *   - "": nobody has looked after it yet, no vote
 *   - "young": free, but the store began less than a lease ago. It may have voted before it was
 *     started again, which it cannot know
 *   - "free"
 *   - "ENDPOINT TERM COUNT": given; COUNT grows with every renewal
 *
 * To lead, a candidate takes leases, its own first: those of a majority that were "free", or those
 * of all endpoints if some were "young" (at the job's start, say). Else it gives them back and
 * tries again later. A leader renews all it can get, five times in a lease, and leads as long as a
 * majority was renewed, by its own clock from before each renewal was sent. An endpoint's own
 * election alone takes away a lease: one that its own clock has not seen renewed for a whole lease.
 * So a majority can only go to another once the leader has counted itself deposed.
 *
 * The lease's length (--rdzv-conf heartbeat_timeout) has to be the same at all endpoints. Nodes
 * compare it with the leader's (host.h), and those of another mind go, with the store they host.
 *
 * TERM is one more than any that the candidate has seen, in `lease` or `term`; a lease that goes
 * leaves its TERM in `term`. So an endpoint never leads twice with the same TERM while its store
 * lives.
 *
 * The clock and the stores are the caller's, so that tests may have their own.
 */
#ifndef TDDP_LAUNCH_ELECTION_H
#define TDDP_LAUNCH_ELECTION_H

#include <stdbool.h>
#include <stdint.h>

#include "launch/command/options.h"

enum { TDDP_LAUNCH_LEASE_BYTES = 64 };

/* One step at a voter's store: puts `desired` in `key` if it holds `expected` (absent: "").
 * `present` is what it holds then, cut to its size. A failure: it is not known whether it was done.
 * With `desired` NULL it only looks. Bounded in time. */
typedef tddp_status (*tddp_launch_exchange)(void *context, int voter, const char *key,
                                            const char *expected, const char *desired,
                                            char present[TDDP_LAUNCH_LEASE_BYTES]);

typedef struct tddp_launch_election_opts {
    int self;         /* index of this endpoint */
    int count;        /* of endpoints */
    int64_t lease_ns; /* how long a vote lasts without renewal */
    uint64_t seed;    /* of the pauses after a lost vote */
    void *context;
    tddp_launch_exchange exchange;
    int64_t (*now)(void *context);
} tddp_launch_election_opts;

/* What is known of a voter. */
typedef struct tddp_launch_vote {
    char lease[TDDP_LAUNCH_LEASE_BYTES]; /* as last seen */
    bool answers;
    bool ended;      /* it knows that the job is over, or has been told by us */
    int64_t held_ns; /* when our last renewal was sent that succeeded; 0: none */
} tddp_launch_vote;

/* Fields are for reading; made by tddp_launch_election_init(), nothing to free. */
typedef struct tddp_launch_election {
    tddp_launch_election_opts opts;
    tddp_launch_vote votes[TDDP_LAUNCH_MAX_ENDPOINTS];
    uint64_t random;
    int64_t begin_ns;
    char seen[TDDP_LAUNCH_LEASE_BYTES]; /* our own vote, and since when it is that */
    int64_t seen_ns;
    int64_t try_ns;   /* when to stand; 0: there is no vacancy */
    int64_t pause_ns; /* not before */
    int64_t renew_ns;
    int64_t until_ns; /* how long we lead without another renewal */
    int64_t renewals;
    int term; /* ours, or the highest seen */
    bool leads;
} tddp_launch_election;

void tddp_launch_election_init(tddp_launch_election *election,
                               const tddp_launch_election_opts *opts);

/* Does what is due. To be called every tddp_launch_election_pause() or more often. */
void tddp_launch_election_step(tddp_launch_election *election);
int64_t tddp_launch_election_pause_ns(const tddp_launch_election *election);

/* Whether this endpoint leads at this moment. */
bool tddp_launch_election_leads(const tddp_launch_election *election);

/* Gives back all leases, so that another may lead at once. The caller must have ceased to act as
 * leader. */
void tddp_launch_election_resign(tddp_launch_election *election);

/* Leaves `message`, the end of the job, with every voter that has none yet and answers; nobody
 * stands there any more. Returns whether all have it. */
bool tddp_launch_election_end(tddp_launch_election *election, const char *message);

#endif
