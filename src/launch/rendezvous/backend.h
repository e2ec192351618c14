/*
 * Where the nodes keep what state.h describes, below the job's own prefix. c10d and static keep it
 * in a store that one of the nodes serves, etcd in a cluster of its own. All functions may wait as
 * long as `link->times.read_ms`; an ephemeral key goes with the link that put it, or when nothing
 * was heard from it for the silence that the job grants.
 *
 * A failure means that the link is of no further use before another `connect`, but for
 * TDDP_OUT_OF_MEMORY and what is named.
 */
#ifndef TDDP_LAUNCH_BACKEND_H
#define TDDP_LAUNCH_BACKEND_H

#include <tddp/store.h>

#include "launch/rendezvous/rendezvous.h"
#include "launch/rendezvous/state.h"

typedef struct tddp_launch_backend tddp_launch_backend;

/* A node's way there. */
typedef struct tddp_launch_link {
    const tddp_launch_backend *backend;
    const tddp_launch_options *options; /* borrowed */
    const char *run_id;                 /* borrowed */
    tddp_store_server *server;          /* borrowed; the store is served here. NULL: elsewhere */
    tddp_launch_times times;
    tddp_cancel *cancel; /* ends `connect`, `watch` and signs of life */
    char id[TDDP_LAUNCH_ID_BYTES];
    void *state;  /* the backend's */
    bool refused; /* after a `connect` in vain: certainly nobody is there */
} tddp_launch_link;

/* What is kept there. All zero: nothing. */
typedef struct tddp_launch_view {
    char leader[TDDP_LAUNCH_ID_BYTES]; /* "": nobody leads */
    tddp_blob state;                   /* `data` is NULL: there is none */
    tddp_launch_entry *entries;
    int count;
} tddp_launch_view;

void tddp_launch_view_free(tddp_launch_view *view);

/* Puts a key into a view; `prefix`: the length of what comes before its name. What is none is
 * logged and passed over. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_view_add(tddp_launch_view *view, const tddp_blob *key,
                                                size_t prefix, const tddp_blob *value);

struct tddp_launch_backend {
    /* One attempt, of at most `limit_ms`; a connection that there is ends. */
    tddp_status (*connect)(tddp_launch_link *link, int64_t limit_ms);

    /* Lets go of what is ephemeral, and frees. */
    void (*close)(tddp_launch_link *link);

    /* Replaces `*view` once it is another than the one that was returned last; at once after
     * `connect`. TDDP_TIMEOUT, TDDP_CANCELED: nothing has changed yet, and the link may go on. */
    tddp_status (*watch)(tddp_launch_link *link, int64_t limit_ms, tddp_launch_view *view);

    /* Puts this node's entry. `again`: it is there already, and this is a sign of life, which may
     * wait for as long as silence is granted. `stays`: it is not ephemeral, but for the leader to
     * read and to remove. */
    tddp_status (*put_entry)(tddp_launch_link *link, tddp_slice value, bool again, bool stays);
    tddp_status (*remove_entry)(tddp_launch_link *link, const char *id);

    /* Becomes the leader if nobody is, by an ephemeral key. TDDP_NOT_FOUND: another one is. */
    tddp_status (*lead)(tddp_launch_link *link);

    /* Writes the document over the one that was read. It stays as long as the store does; in etcd
     * for an hour after its leader has gone. TDDP_NOT_FOUND: another node leads. */
    tddp_status (*put_state)(tddp_launch_link *link, tddp_slice before, tddp_slice now);

    /* Removes what the workers of earlier rounds have left in the store that is served here; NULL:
     * workers never share it. */
    tddp_status (*clear)(tddp_launch_link *link);

    /* The job outlives the torchrun that hosts it. */
    bool survives;
};

extern const tddp_launch_backend tddp_launch_c10d;
extern const tddp_launch_backend tddp_launch_etcd;

#endif
