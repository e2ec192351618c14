/*
 * The ranks of a group: their hosts and processes, as each published them when it joined. Counted
 * by reference, since error texts and dumps may outlive the group. Never changes once all ranks
 * have joined, so that any thread may read it.
 */
#ifndef TDDP_GROUP_PEERS_H
#define TDDP_GROUP_PEERS_H

#include <stdatomic.h>

#include <tddp/store.h>

#include "base/base.h"
#include "net/net.h"

enum {
    TDDP_PEER_HOST_BYTES = 72,    /* a host's name */
    TDDP_PEER_RECORD_BYTES = 256, /* a rank's own description, as text */
    TDDP_PEER_NAME_BYTES = 128,   /* "rank 2 (host b12, pid 4711)" */
    TDDP_PEERS_TEXT_BYTES = 1024  /* several of them */
};

typedef struct tddp_peer_entry {
    char host_id[TDDP_NET_HOST_ID_BYTES]; /* equal where ranks reach each other over loopback */
    char host[TDDP_PEER_HOST_BYTES];
    int64_t pid;
    uint64_t pid_namespace; /* its number; pids are comparable within one namespace */
    uint64_t started; /* when the process started: tells it from a later one with the same pid */
    int root_rank;    /* its rank in the group that others are made from */
} tddp_peer_entry;

typedef struct tddp_peers {
    atomic_int references;
    int count;
    tddp_peer_entry entries[]; /* by rank */
} tddp_peers;

/* Formats this process's record, for the other ranks' tables. */
TDDP_NODISCARD tddp_status tddp_peers_describe_self(int root_rank,
                                                    char text[TDDP_PEER_RECORD_BYTES]);

/* Makes a table with one reference from all ranks' records, each with a NUL behind it;
 * TDDP_PROTOCOL if one is malformed. */
TDDP_NODISCARD tddp_status tddp_peers_create(const tddp_slice *records, int count,
                                             tddp_peers **out);

tddp_peers *tddp_peers_retain(tddp_peers *peers); /* NULL is fine, here and below */
void tddp_peers_release(tddp_peers *peers);

bool tddp_peers_same_host(const tddp_peers *peers);

/* The host of each rank, numbered from 0 in the order of ranks; to be freed. NULL: no memory. */
int *tddp_peers_hosts(const tddp_peers *peers);

/* "rank 2 (host b12, pid 4711)", or "rank 2" if that is all that is known; returns `text`. */
const char *tddp_peers_name(const tddp_peers *peers, int rank, char text[TDDP_PEER_NAME_BYTES]);

/* The state of a rank's process, as this process can observe it. `self` is a rank of this process.
 */
typedef enum tddp_peer_liveness {
    TDDP_PEER_UNKNOWN, /* it is on another host or in another container */
    TDDP_PEER_ALIVE,
    TDDP_PEER_STOPPED, /* by a signal or a debugger */
    TDDP_PEER_ENDED,
} tddp_peer_liveness;

tddp_peer_liveness tddp_peers_check_liveness(const tddp_peers *peers, int self, int rank);

/* Formats host and pid of the ranks that a backend's error text names, except `self`: "; rank 1 is
 * pid 4711 on host b12, ...", or "" for none. Returns `out`. */
const char *tddp_peers_annotate(const tddp_peers *peers, int self, const char *text,
                                char out[TDDP_PEERS_TEXT_BYTES]);

#endif
