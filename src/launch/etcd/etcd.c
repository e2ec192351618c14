/*
 * Requests: one endpoint after the other until one answers or time is over, the login, and one
 * watch, a response that has no end, at the endpoint that answers. What no endpoint can serve now
 * (no leader, a member that starts) is asked for again.
 */
#include "launch/etcd/etcd.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "net/net.h"

enum {
    LEAST_NS = 200 * 1000 * 1000, /* for one endpoint, also where less is left */
    PAUSE_MS = 50,                /* after one in vain */
    /* Codes of gRPC. */
    DEADLINE_EXCEEDED = 4,
    NOT_FOUND = 5,
    RESOURCE_EXHAUSTED = 8,
    UNAVAILABLE = 14,
    UNAUTHENTICATED = 16
};

tddp_status tddp_etcd_open(tddp_etcd *etcd, const tddp_launch_options *options)
{
    etcd->options = options;
    tddp_status status = tddp_http_open(&etcd->calls, &options->conf.etcd);
    return status ? status : tddp_http_open(&etcd->watch, &options->conf.etcd);
}

void tddp_etcd_close(tddp_etcd *etcd)
{
    tddp_http_close(&etcd->calls);
    tddp_http_close(&etcd->watch);
    free(etcd->authorization);
}

/* --- one request ----------------------------------------------------------------------------- */

static tddp_status begin(tddp_etcd *etcd, tddp_http *http, const char *path, const char *body)
{
    char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
    tddp_launch_endpoint_text(&etcd->options->endpoints[etcd->at], endpoint, sizeof endpoint);
    (void)snprintf(http->url, sizeof http->url, "%s://%s%s",
                   etcd->options->conf.etcd.https ? "https" : "http", endpoint, path);
    return tddp_http_begin(http, etcd->authorization, body);
}

/* Another endpoint may succeed where this was the answer. */
static bool is_transient(const tddp_etcd_answer *answer)
{
    return answer->code == UNAVAILABLE || answer->code == DEADLINE_EXCEEDED ||
           answer->code == RESOURCE_EXHAUSTED;
}

/* Goes through the endpoints until one answers or time is over. A silent one leaves time for the
 * others; where there are none, it is waited for rather than asked twice. */
static tddp_status ask(tddp_etcd *etcd, const char *path, const char *body, const tddp_wait *wait,
                       tddp_etcd_answer *out)
{
    tddp_http *http = &etcd->calls;
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    int64_t deadline_ns = tddp_wait_deadline(wait, 0);
    for (;;) {
        int64_t part_ns = (deadline_ns - tddp_now_ns()) / etcd->options->endpoint_count;
        int64_t until_ns = tddp_now_ns() + (part_ns > LEAST_NS ? part_ns : LEAST_NS);
        tddp_status status = begin(etcd, http, path, body);
        while (status == TDDP_OK && http->open) {
            status = tddp_http_receive(http, until_ns, cancel);
        }
        tddp_http_end(http);
        tddp_etcd_answer_free(out);
        if (status == TDDP_OK) {
            status = tddp_etcd_answer_read(http->response.data, http->response.size, out);
        }
        if (status == TDDP_OK && is_transient(out)) {
            const char *why = out->error ? out->error : "unavailable";
            status = tddp_fail(TDDP_NETWORK, "%s: %s", http->url, why);
        }
        if (status != TDDP_NETWORK && status != TDDP_TIMEOUT) {
            return status;
        }
        etcd->at = (etcd->at + 1) % etcd->options->endpoint_count;
        int64_t pause_ns = tddp_deadline_after_ms(PAUSE_MS);
        if (pause_ns + LEAST_NS >= deadline_ns) {
            return tddp_fail(TDDP_NETWORK, "etcd does not answer: %s", tddp_error_message());
        }
        status = tddp_net_sleep(pause_ns, tddp_cancel_fd(cancel));
        if (status != TDDP_OK) {
            return status;
        }
    }
}

/* --- login ----------------------------------------------------------------------------------- */

static tddp_status log_in(tddp_etcd *etcd, const tddp_wait *wait)
{
    const tddp_launch_etcd_conf *conf = &etcd->options->conf.etcd;
    tddp_bytes body = {0};
    tddp_etcd_answer answer = {0};
    tddp_status status = tddp_bytes_append(&body, "{\"name\": ", 9);
    status = status ? status : tddp_bytes_append_json(&body, conf->username);
    status = status ? status : tddp_bytes_append(&body, ", \"password\": ", 14);
    status = status ? status : tddp_bytes_append_json(&body, conf->password);
    status = status ? status : tddp_bytes_append(&body, "}", 2); /* with its NUL */
    status = status ? status : ask(etcd, "/v3/auth/authenticate", body.data, wait, &answer);
    if (status == TDDP_OK && (answer.code != 0 || !answer.token)) {
        status = tddp_fail(TDDP_STORE, "etcd refuses the user %.64s: %s", conf->username,
                           answer.error ? answer.error : "it gave no token");
    }
    if (status == TDDP_OK) {
        etcd->authorization = tddp_format("Authorization: %s", answer.token);
        status = etcd->authorization ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    tddp_etcd_answer_free(&answer);
    tddp_bytes_free(&body);
    return status;
}

static void forget_login(tddp_etcd *etcd)
{
    tddp_http_end(&etcd->watch); /* which borrows it */
    free(etcd->authorization);
    etcd->authorization = NULL;
}

tddp_status tddp_etcd_call(tddp_etcd *etcd, const char *path, char *body, const tddp_wait *wait,
                           tddp_etcd_answer *out)
{
    tddp_status status = body ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    for (int tries = 0; tries < 2 && status == TDDP_OK; tries++) {
        if (etcd->options->conf.etcd.username[0] && !etcd->authorization) {
            status = log_in(etcd, wait);
        }
        status = status ? status : ask(etcd, path, body, wait, out);
        if (out->code != UNAUTHENTICATED) {
            break;
        }
        forget_login(etcd); /* tokens expire */
    }
    free(body);
    if (status == TDDP_OK && out->code != 0) {
        return tddp_fail(out->code == NOT_FOUND ? TDDP_NOT_FOUND : TDDP_STORE, "etcd: %s",
                         out->error ? out->error : "no reason given");
    }
    return status;
}

/* --- the watch ------------------------------------------------------------------------------- */

/* Reads the lines that have come; true: something has changed after `revision`. A watch that etcd
 * has canceled (its start was compacted, its token has expired) is ended. */
static bool take_lines(tddp_http *http, int64_t revision)
{
    bool changed = false;
    const char *end;
    while ((end = memchr(http->response.data, '\n', http->response.size)) != NULL) {
        tddp_etcd_answer answer = {0};
        size_t length = (size_t)(end - http->response.data);
        tddp_status status = tddp_etcd_answer_read(http->response.data, length, &answer);
        if (status != TDDP_OK || answer.canceled || answer.code != 0) {
            tddp_http_end(http);
        }
        changed |= answer.mod_revision > revision;
        tddp_etcd_answer_free(&answer);
        tddp_bytes_consume(&http->response, length + 1);
    }
    return changed;
}

tddp_status tddp_etcd_watch(tddp_etcd *etcd, char *body, int64_t revision, const tddp_wait *wait)
{
    tddp_http *http = &etcd->watch;
    int64_t deadline_ns = tddp_wait_deadline(wait, 0);
    bool changed = false;
    tddp_status status = body ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && (!http->open || etcd->watched != etcd->at)) {
        etcd->watched = etcd->at;
        status = begin(etcd, http, "/v3/watch", body);
    }
    free(body);
    while (status == TDDP_OK && !(changed = take_lines(http, revision)) && http->open) {
        status = tddp_http_receive(http, deadline_ns, tddp_wait_cancel(wait));
    }
    if (status == TDDP_NETWORK || (status == TDDP_OK && !changed)) { /* it has ended */
        status = tddp_net_sleep(tddp_deadline_after_ms(PAUSE_MS),
                                tddp_cancel_fd(tddp_wait_cancel(wait)));
    }
    return status;
}
