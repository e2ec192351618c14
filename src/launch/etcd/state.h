/*
 * The client's state, shared by etcd.c (requests) and watch.c.
 */
#ifndef TDDP_ETCD_STATE_H
#define TDDP_ETCD_STATE_H

#include "launch/etcd/etcd.h"

struct tddp_etcd {
    tddp_etcd_opts opts;
    tddp_http *http;
    int at;      /* the endpoint that answered last */
    char *token; /* of this user, once asked for; NULL: none yet */
};

enum { TDDP_ETCD_URL_BYTES = TDDP_LAUNCH_HOST_BYTES + 64 };

/* "http://HOST:PORT" and the path; returns `url`. */
const char *tddp_etcd_url(const tddp_etcd *etcd, int endpoint, const char *path,
                          char url[TDDP_ETCD_URL_BYTES]);

/* Logs in, unless there is a token or no user. `*header`: the line to send, or NULL; free(). */
TDDP_NODISCARD tddp_status tddp_etcd_authorize(tddp_etcd *etcd, const tddp_wait *wait,
                                               char **header);

/* Another endpoint, or another login, may succeed where this code was the answer. */
bool tddp_etcd_is_transient(int code);

#endif
