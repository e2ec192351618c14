/*
 * A client of etcd v3, by the JSON gateway that every etcd serves beside gRPC. Requests go to one
 * endpoint until it fails, or hangs while there are others, then to the next. A request may have
 * been executed although its answer was lost. A client serves one thread at a time.
 *
 * Statuses: TDDP_NETWORK (no endpoint answered in time; the text has the last reason),
 * TDDP_CANCELED, TDDP_NOT_FOUND (no such lease), TDDP_STORE (etcd refused; the text is etcd's),
 * TDDP_PROTOCOL (not etcd's answer), TDDP_OUT_OF_MEMORY.
 */
#ifndef TDDP_ETCD_H
#define TDDP_ETCD_H

#include <tddp/store.h>

#include "launch/etcd/http.h"

/* --- answers: answer.c ----------------------------------------------------------------------- */

/* Of a range, or of a watch's event. Both have a NUL after them. */
typedef struct tddp_etcd_pair {
    tddp_blob key;
    tddp_blob value;
} tddp_etcd_pair;

/* What the fields of an answer say that are there. All zero is an empty one. */
typedef struct tddp_etcd_answer {
    tddp_etcd_pair *pairs;
    size_t count;
    int64_t create_revision; /* of the last pair */
    int64_t mod_revision;
    int64_t revision;  /* the whole store's, when the request was executed */
    int64_t id;        /* a lease's */
    int64_t ttl;       /* in seconds; 0: the lease has run out */
    int64_t succeeded; /* 1: a transaction's comparisons held */
    int64_t canceled;  /* 1: a watch has ended */
    int64_t code;      /* gRPC's; 0: no error */
    char *error;       /* etcd's text */
    char *token;
} tddp_etcd_answer;

/* Reads one JSON value. Errors: TDDP_PROTOCOL. */
TDDP_NODISCARD tddp_status tddp_etcd_answer_read(const char *text, size_t size,
                                                 tddp_etcd_answer *out);
void tddp_etcd_answer_free(tddp_etcd_answer *answer);

/* Writes bytes in base64, as requests have keys and values, and a NUL: (size + 2) / 3 * 4 + 1
 * bytes. Returns `to`. */
char *tddp_base64(tddp_slice bytes, char *to);

/* --- requests: etcd.c ------------------------------------------------------------------------ */

/* All zero is one that was not opened; it stays where it was. */
typedef struct tddp_etcd {
    const tddp_launch_options *options; /* borrowed */
    int at;                             /* the endpoint that answered last */
    char *authorization;                /* the header line that a login gave; NULL: none yet */
    tddp_http calls;
    tddp_http watch;
    int watched; /* the endpoint where it is open */
} tddp_etcd;

/* Asks no server. Errors: TDDP_UNAVAILABLE (no libcurl), TDDP_OUT_OF_MEMORY. Caller:
 * tddp_etcd_close(), also after a failure. */
TDDP_NODISCARD tddp_status tddp_etcd_open(tddp_etcd *etcd, const tddp_launch_options *options);
void tddp_etcd_close(tddp_etcd *etcd);

/* Posts `body` to `path` ("/v3/kv/range"), and frees it; NULL: memory was short. Caller:
 * tddp_etcd_answer_free(), also after a failure. */
TDDP_NODISCARD tddp_status tddp_etcd_call(tddp_etcd *etcd, const char *path, char *body,
                                          const tddp_wait *wait, tddp_etcd_answer *out);

/* Waits until something has changed after `revision` in what `body` watches (freed as above), or
 * may have: the watch stays open over calls, and where it has ended, the next call opens it again.
 * TDDP_TIMEOUT, TDDP_CANCELED: nothing has changed. Nothing comes from an endpoint that hangs:
 * requests find that out, so make one now and then (a lease's renewal does). */
TDDP_NODISCARD tddp_status tddp_etcd_watch(tddp_etcd *etcd, char *body, int64_t revision,
                                           const tddp_wait *wait);

#endif
