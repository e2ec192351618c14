/*
 * Who the ranks of a group are: said by each at the join, kept for the group's life and for whoever
 * still speaks of it. Never changes once the ranks have met, so that any thread may read it.
 */
#ifndef TDDP_GROUP_PEERS_H
#define TDDP_GROUP_PEERS_H

#include <stdatomic.h>

#include <tddp/store.h>

#include "base/base.h"
#include "net/net.h"

enum {
    TDDP_PEER_HOST_BYTES = 72,    /* a host's name */
    TDDP_PEER_RECORD_BYTES = 256, /* what a rank says of itself */
    TDDP_PEER_NAME_BYTES = 128,   /* "rank 2 (host b12, pid 4711)" */
    TDDP_PEERS_TEXT_BYTES = 1024  /* several such */
};

typedef struct tddp_peer_entry {
    char host_id[TDDP_NET_HOST_ID_BYTES]; /* equal where they reach each other over loopback */
    char host[TDDP_PEER_HOST_BYTES];
    int64_t pid;
    uint64_t pid_namespace; /* equal where pids mean the same */
    uint64_t started; /* when the process began, so that a new one with its pid is told apart */
    int root_rank;    /* its rank in the group that others are made from */
} tddp_peer_entry;

typedef struct tddp_peers {
    atomic_int references;
    int count;
    tddp_peer_entry entries[]; /* by rank */
} tddp_peers;

/* What this process says of itself, for the others' tables. */
TDDP_NODISCARD tddp_status tddp_peers_describe_self(int root_rank,
                                                    char text[TDDP_PEER_RECORD_BYTES]);

/* A table with one reference, from what each rank has said; TDDP_PROTOCOL if one said something
 * else. */
TDDP_NODISCARD tddp_status tddp_peers_create(const tddp_blob *words, int count, tddp_peers **out);

tddp_peers *tddp_peers_retain(tddp_peers *peers); /* NULL is fine, here and below */
void tddp_peers_release(tddp_peers *peers);

bool tddp_peers_same_host(const tddp_peers *peers);

/* The host of each rank, numbered from 0 as they first come; to be freed. NULL: no memory. */
int *tddp_peers_hosts(const tddp_peers *peers);

/* "rank 2 (host b12, pid 4711)", or "rank 2" if that is all that is known; returns `text`. */
const char *tddp_peers_name(const tddp_peers *peers, int rank, char text[TDDP_PEER_NAME_BYTES]);

/* What can be seen of the rank's process from here. `self` is a rank of this process. */
typedef enum tddp_peer_liveness {
    TDDP_PEER_UNKNOWN, /* it is on another host or in another container */
    TDDP_PEER_ALIVE,
    TDDP_PEER_STOPPED, /* by a signal or a debugger */
    TDDP_PEER_ENDED,
} tddp_peer_liveness;

tddp_peer_liveness tddp_peers_check_liveness(const tddp_peers *peers, int self, int rank);

/* "; rank 1 is pid 4711 on host b12, ..." for the ranks that a text of a backend speaks of, those
 * of this process left out; "" for none. Returns `out`. */
const char *tddp_peers_annotate(const tddp_peers *peers, int self, const char *text,
                                char out[TDDP_PEERS_TEXT_BYTES]);

#endif
