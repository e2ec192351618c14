/*
 * HTTP posts with a deadline and a cancel token, over libcurl. Connections are kept and used again.
 * libcurl is loaded when it is first needed, so that torchrun starts without it, and nothing of it
 * is needed to build: test/c/launch/etcd_curl_test.c holds these declarations against
 * <curl/curl.h>.
 */
#ifndef TDDP_ETCD_HTTP_H
#define TDDP_ETCD_HTTP_H

#include "base/base.h"
#include "launch/command/options.h"

/* --- libcurl's declarations ------------------------------------------------------------------ */

/* struct curl_slist */
typedef struct tddp_curl_list {
    char *data;
    struct tddp_curl_list *next;
} tddp_curl_list;

/* struct CURLMsg */
typedef struct tddp_curl_message {
    int kind;
    void *easy;
    int result; /* in a union with a pointer */
} tddp_curl_message;

/* By libcurl's names; their numbers are part of its ABI. */
enum {
    TDDP_CURL_GLOBAL_DEFAULT = 3,
    TDDP_CURLOPT_NOSIGNAL = 99,
    TDDP_CURLOPT_CONNECTTIMEOUT_MS = 156,
    TDDP_CURLOPT_WRITEDATA = 10001,
    TDDP_CURLOPT_URL = 10002,
    TDDP_CURLOPT_ERRORBUFFER = 10010,
    TDDP_CURLOPT_HTTPHEADER = 10023,
    TDDP_CURLOPT_SSLCERT = 10025,
    TDDP_CURLOPT_CAINFO = 10065,
    TDDP_CURLOPT_SSLKEY = 10087,
    TDDP_CURLOPT_COPYPOSTFIELDS = 10165,
    TDDP_CURLOPT_NOPROXY = 10177,
    TDDP_CURLOPT_WRITEFUNCTION = 20011,
    TDDP_CURL_ERROR_SIZE = 256
};

/* --- posts ----------------------------------------------------------------------------------- */

/* One transfer at a time; all zero is one that was not opened. Serves one thread at a time. */
typedef struct tddp_http {
    char url[TDDP_LAUNCH_HOST_BYTES + 64]; /* of the next transfer: the caller writes it */
    tddp_bytes response;                   /* of the last one */
    bool open;                             /* it goes on; the easy handle is in the multi handle */
    void *easy;
    void *multi;
    tddp_curl_list header;
    char reason[TDDP_CURL_ERROR_SIZE];
} tddp_http;

/* Errors: TDDP_UNAVAILABLE (no libcurl; the text says what to install), TDDP_OUT_OF_MEMORY. Caller:
 * tddp_http_close(), also after a failure. */
TDDP_NODISCARD tddp_status tddp_http_open(tddp_http *http, const tddp_launch_etcd_conf *conf);
void tddp_http_close(tddp_http *http);

/* Begins to post `body`, in place of a transfer that is open. `header`: one header line, borrowed
 * until the end, or NULL. */
TDDP_NODISCARD tddp_status tddp_http_begin(tddp_http *http, char *header, const char *body);

/* Returns TDDP_OK once the response has grown or is complete. After TDDP_TIMEOUT and TDDP_CANCELED
 * the transfer is still open; after TDDP_NETWORK it has ended (the text has the URL and libcurl's
 * reason). */
TDDP_NODISCARD tddp_status tddp_http_receive(tddp_http *http, int64_t deadline_ns,
                                             tddp_cancel *cancel);
void tddp_http_end(tddp_http *http);

#endif
