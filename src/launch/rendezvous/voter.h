/*
 * The stores of all endpoints, as an election reaches them: connections that are made when they are
 * needed, given up at the first trouble, and tried again with growing pauses.
 */
#ifndef TDDP_LAUNCH_VOTER_H
#define TDDP_LAUNCH_VOTER_H

#include <tddp/store.h>

#include "launch/rendezvous/election.h"

/* How one endpoint is reached. */
typedef struct tddp_launch_voter {
    char host[TDDP_LAUNCH_HOST_BYTES];
    int port;
    tddp_store *store; /* NULL: not connected */
    int64_t retry_ns;  /* not before */
    int64_t pause_ns;  /* the last one */
} tddp_launch_voter;

/* Used by one thread. */
typedef struct tddp_launch_voters {
    tddp_launch_voter voters[TDDP_LAUNCH_MAX_ENDPOINTS];
    int count;
    const char *run_id;
    int64_t answer_ms; /* what one step at a voter may take */
    tddp_cancel *cancel;
} tddp_launch_voters;

/* `self` is reached at `address` and `port`, the others at their endpoints. `run_id` is borrowed,
 * as is `cancel`, which ends a step under way. */
void tddp_launch_voters_init(tddp_launch_voters *voters, const tddp_launch_endpoint *endpoints,
                             int count, int self, const char *address, int port, const char *run_id,
                             int64_t answer_ms, tddp_cancel *cancel);
void tddp_launch_voters_close(tddp_launch_voters *voters);

/* A tddp_launch_exchange whose context is a tddp_launch_voters. */
tddp_status tddp_launch_voters_exchange(void *context, int voter, const char *key,
                                        const char *expected, const char *desired,
                                        char present[TDDP_LAUNCH_LEASE_BYTES]);

/* Opens the store at an address below a prefix; at most twice `limit_ms`, at once if nobody listens
 * there. Caller: tddp_store_release(). */
TDDP_NODISCARD tddp_status tddp_launch_voter_open(const char *host, int port, const char *prefix,
                                                  int64_t limit_ms, tddp_cancel *cancel,
                                                  tddp_store **out);

#endif
