/*
 * HTTP requests with a deadline and a cancel token, over libcurl. Connections are kept and used
 * again. A handle serves one thread at a time.
 */
#ifndef TDDP_ETCD_HTTP_H
#define TDDP_ETCD_HTTP_H

#include "base/base.h"

typedef struct tddp_http tddp_http;

/* Files in PEM; each may be NULL. Borrowed. */
typedef struct tddp_http_tls {
    const char *cacert; /* authorities that the server's certificate is checked against */
    const char *cert;   /* this client's certificate and its key */
    const char *key;
} tddp_http_tls;

/* Errors: TDDP_UNAVAILABLE (no libcurl), TDDP_OUT_OF_MEMORY. Caller: tddp_http_free(). */
TDDP_NODISCARD tddp_status tddp_http_create(const tddp_http_tls *tls, tddp_http **out);
void tddp_http_free(tddp_http *http);

/*
 * Posts `body` and appends the response's body to `*response`, whose first bytes are the caller's.
 * `header`: one more header line, or NULL. Errors: TDDP_NETWORK (the text has the URL and libcurl's
 * reason), TDDP_TIMEOUT, TDDP_CANCELED, TDDP_OUT_OF_MEMORY; else `*code` is HTTP's status.
 */
TDDP_NODISCARD tddp_status tddp_http_post(tddp_http *http, const char *url, const char *header,
                                          const tddp_bytes *body, int64_t deadline_ns,
                                          tddp_cancel *cancel, tddp_bytes *response, long *code);

/*
 * The same in steps, for a response without an end: tddp_http_begin(), then tddp_http_more() as
 * often as wanted, each of which returns TDDP_OK once the response has grown (or is complete, with
 * `*open` false) or the status of a failure; then tddp_http_end(). `body` and `response` must live
 * until the end. After TDDP_TIMEOUT and TDDP_CANCELED tddp_http_more() may be called again.
 */
TDDP_NODISCARD tddp_status tddp_http_begin(tddp_http *http, const char *url, const char *header,
                                           const tddp_bytes *body, tddp_bytes *response);
TDDP_NODISCARD tddp_status tddp_http_more(tddp_http *http, int64_t deadline_ns, tddp_cancel *cancel,
                                          bool *open);
void tddp_http_end(tddp_http *http, long *code);

#endif
