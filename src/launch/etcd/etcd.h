/*
 * A client of etcd v3, by the JSON gateway that every etcd serves beside gRPC: keys, leases and
 * watches. Requests go to one endpoint until it fails, or hangs while there are
 * others, then to the next. A request may have been executed although its answer was lost, so a
 * caller writes only what may be written twice. A client serves one thread at a time.
 *
 * Statuses: TDDP_TIMEOUT (no endpoint answered in time; the text has the last reason),
 * TDDP_CANCELED, TDDP_STORE (etcd refused; the text is etcd's), TDDP_PROTOCOL (not etcd's answer),
 * TDDP_OUT_OF_MEMORY.
 */
#ifndef TDDP_ETCD_H
#define TDDP_ETCD_H

#include <tddp/store.h>
#include <tddp/wait.h>

#include "launch/command/options.h"
#include "launch/etcd/http.h"

typedef struct tddp_etcd tddp_etcd;

/* Borrowed for the client's life. */
typedef struct tddp_etcd_opts {
    const tddp_launch_endpoint *endpoints;
    int endpoint_count;
    bool https;
    tddp_http_tls tls;
    const char *username; /* NULL: no authentication */
    const char *password;
} tddp_etcd_opts;

/* Errors: TDDP_UNAVAILABLE (no libcurl), TDDP_OUT_OF_MEMORY. Asks no server. Caller:
 * tddp_etcd_close(). */
TDDP_NODISCARD tddp_status tddp_etcd_open(const tddp_etcd_opts *opts, tddp_etcd **out);
void tddp_etcd_close(tddp_etcd *etcd);

/* --- answers --------------------------------------------------------------------------------- */

typedef struct tddp_etcd_pair {
    tddp_blob key;
    tddp_blob value; /* with a NUL after it */
    int64_t create_revision;
    int64_t mod_revision;
    int64_t lease;
    bool deleted; /* of a watch: the key was deleted, or its lease ran out */
} tddp_etcd_pair;

/* What the fields of an answer say that are there. All zero is an empty one. */
typedef struct tddp_etcd_answer {
    tddp_etcd_pair *pairs;
    size_t count;
    size_t capacity;
    int64_t revision;         /* the whole store's, when the request was executed */
    int64_t compact_revision; /* of a watch that starts too early: the earliest possible */
    int64_t id;               /* a lease's */
    int64_t ttl;              /* in seconds; 0: the lease has run out */
    bool succeeded;           /* a transaction's comparisons held */
    bool canceled;            /* a watch has ended */
    char *token;
    int code;    /* gRPC's; 0: no error */
    char *error; /* etcd's text */
} tddp_etcd_answer;

/* Reads one JSON value. Errors: TDDP_PROTOCOL, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_etcd_answer_read(const char *text, size_t size,
                                                 tddp_etcd_answer *out);
void tddp_etcd_answer_free(tddp_etcd_answer *answer);

/* --- requests -------------------------------------------------------------------------------- */

/* The fields `"key": …[, "range_end": …]` of one key or, with `prefix`, all keys that begin so. */
TDDP_NODISCARD tddp_status tddp_etcd_add_key(tddp_bytes *body, tddp_slice key, bool prefix);

/* Posts a body to `path` ("/v3/kv/range"). Caller: tddp_etcd_answer_free(), also after a failure.
 */
TDDP_NODISCARD tddp_status tddp_etcd_call(tddp_etcd *etcd, const char *path, const tddp_bytes *body,
                                          const tddp_wait *wait, tddp_etcd_answer *out);

/* The pairs of a key or a prefix, the oldest first; `limit` 0: all. */
TDDP_NODISCARD tddp_status tddp_etcd_range(tddp_etcd *etcd, tddp_slice key, bool prefix, int limit,
                                           const tddp_wait *wait, tddp_etcd_answer *out);

/* A lease of so many seconds, at least 1. */
TDDP_NODISCARD tddp_status tddp_etcd_lease_grant(tddp_etcd *etcd, int64_t ttl_s,
                                                 const tddp_wait *wait, int64_t *id);
/* Makes it last its whole time from now. TDDP_NOT_FOUND: it has run out. */
TDDP_NODISCARD tddp_status tddp_etcd_lease_renew(tddp_etcd *etcd, int64_t id,
                                                 const tddp_wait *wait);
/* Ends it, and deletes the keys that it holds. */
TDDP_NODISCARD tddp_status tddp_etcd_lease_revoke(tddp_etcd *etcd, int64_t id,
                                                  const tddp_wait *wait);

/* What is written, if the condition holds. */
typedef struct tddp_etcd_write {
    tddp_slice key;
    tddp_slice value;
    int64_t lease;    /* 0: none */
    bool remove;      /* the key, instead of putting it */
    tddp_slice guard; /* a key that has to be one that was made in `made_in` (0: to be absent);
                         `data` is NULL: there is no condition */
    int64_t made_in;
} tddp_etcd_write;

/* `*revision` is that of what was written; 0 if the condition did not hold, so that nothing was.
 * TDDP_NOT_FOUND: there is no such lease. */
TDDP_NODISCARD tddp_status tddp_etcd_put(tddp_etcd *etcd, const tddp_etcd_write *write,
                                         const tddp_wait *wait, int64_t *revision);

/* --- watches: watch.c ------------------------------------------------------------------------ */

/* What happens to a key or a prefix from a revision on. It has a connection of its own, which is
 * made again, also at another endpoint, when it ends. Nothing comes from an endpoint that hangs:
 * the client's requests find that out, so make one now and then (a lease's renewal does). */
typedef struct tddp_etcd_watch tddp_etcd_watch;

TDDP_NODISCARD tddp_status tddp_etcd_watch_open(tddp_etcd *etcd, tddp_slice key, bool prefix,
                                                int64_t revision, tddp_etcd_watch **out);
void tddp_etcd_watch_close(tddp_etcd_watch *watch);

/* Waits for the next change; caller: tddp_etcd_pair_free(). TDDP_NOT_FOUND: changes from the
 * revision on are no longer kept, so read the keys again. TDDP_TIMEOUT here means that nothing has
 * changed, or no endpoint answers. */
TDDP_NODISCARD tddp_status tddp_etcd_watch_next(tddp_etcd_watch *watch, const tddp_wait *wait,
                                                tddp_etcd_pair *out);
void tddp_etcd_pair_free(tddp_etcd_pair *pair);

#endif
