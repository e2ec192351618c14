/*
 * Requests: one endpoint after the other until one answers or time is over, and the login. A
 * request that no endpoint can serve now (no leader, a member that starts) is tried again after a
 * pause.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/etcd/base64.h"
#include "launch/etcd/state.h"
#include "net/net.h"

enum {
    ATTEMPT_MS = 2000, /* for one of several endpoints, at most */
    LEAST_ATTEMPT_MS = 200,
    PAUSE_MS = 100, /* once all have failed */
    /* Codes of gRPC. */
    DEADLINE_EXCEEDED = 4,
    RESOURCE_EXHAUSTED = 8,
    UNAVAILABLE = 14,
    UNAUTHENTICATED = 16,
    NOT_FOUND = 5
};

/* --- life ------------------------------------------------------------------------------------ */

tddp_status tddp_etcd_open(const tddp_etcd_opts *opts, tddp_etcd **out)
{
    tddp_etcd *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    made->opts = *opts;
    tddp_status status = tddp_http_create(&opts->tls, &made->http);
    if (status != TDDP_OK) {
        free(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

void tddp_etcd_close(tddp_etcd *etcd)
{
    if (etcd) {
        tddp_http_free(etcd->http);
        free(etcd->token);
        free(etcd);
    }
}

const char *tddp_etcd_url(const tddp_etcd *etcd, int endpoint, const char *path,
                          char url[TDDP_ETCD_URL_BYTES])
{
    char at[TDDP_LAUNCH_HOST_BYTES + 16];
    tddp_launch_endpoint_text(&etcd->opts.endpoints[endpoint], at, sizeof at);
    (void)snprintf(url, TDDP_ETCD_URL_BYTES, "%s://%s%s", etcd->opts.https ? "https" : "http", at,
                   path);
    return url;
}

/* --- one request ----------------------------------------------------------------------------- */

bool tddp_etcd_is_transient(int code)
{
    return code == UNAVAILABLE || code == DEADLINE_EXCEEDED || code == RESOURCE_EXHAUSTED;
}

static tddp_status read_response(const tddp_bytes *response, long http_code, tddp_etcd_answer *out)
{
    tddp_status status =
        tddp_etcd_answer_read(response->data ? response->data : "", response->size, out);
    if (status == TDDP_OK && http_code >= 400 && out->code == 0) {
        return tddp_fail(TDDP_PROTOCOL, "HTTP status %ld: %s", http_code,
                         out->error ? out->error : "no reason given");
    }
    return status;
}

/* A silent endpoint leaves time for another one. */
static int64_t attempt_ms(const tddp_etcd *etcd, int64_t deadline_ns)
{
    int64_t share_ms = (deadline_ns - tddp_now_ns()) / TDDP_NS_PER_MS / etcd->opts.endpoint_count;
    return share_ms < LEAST_ATTEMPT_MS ? LEAST_ATTEMPT_MS
           : share_ms < ATTEMPT_MS     ? share_ms
                                       : ATTEMPT_MS;
}

/* Asks one endpoint. TDDP_NETWORK: another one may answer. */
static tddp_status ask(tddp_etcd *etcd, int endpoint, const char *path, const char *header,
                       const tddp_bytes *body, int64_t deadline_ns, tddp_cancel *cancel,
                       tddp_etcd_answer *out)
{
    char url[TDDP_ETCD_URL_BYTES];
    long code;
    tddp_bytes response = {0};
    /* Where no other could answer, a slow one is waited for, rather than asked twice. */
    int64_t attempt_ns = etcd->opts.endpoint_count > 1
                             ? tddp_deadline_after_ms(attempt_ms(etcd, deadline_ns))
                             : deadline_ns;
    tddp_status status = tddp_http_post(
        etcd->http, tddp_etcd_url(etcd, endpoint, path, url), header, body,
        attempt_ns < deadline_ns ? attempt_ns : deadline_ns, cancel, &response, &code);
    if (status == TDDP_OK) {
        status = read_response(&response, code, out);
    }
    tddp_bytes_free(&response);
    if (status == TDDP_OK && tddp_etcd_is_transient(out->code)) {
        return tddp_fail(TDDP_NETWORK, "%s: %s", url, out->error ? out->error : "unavailable");
    }
    return status == TDDP_TIMEOUT ? TDDP_NETWORK : status;
}

/* Goes through the endpoints until one answers or time is over. */
static tddp_status ask_any(tddp_etcd *etcd, const char *path, const char *header,
                           const tddp_bytes *body, const tddp_wait *wait, tddp_etcd_answer *out)
{
    int64_t deadline_ns = tddp_wait_deadline(wait, ATTEMPT_MS);
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    for (int failed = 1;; failed++) {
        tddp_etcd_answer_free(out);
        tddp_status status = ask(etcd, etcd->at, path, header, body, deadline_ns, cancel, out);
        if (status != TDDP_NETWORK) {
            return status;
        }
        etcd->at = (etcd->at + 1) % etcd->opts.endpoint_count;
        bool all = failed % etcd->opts.endpoint_count == 0;
        int64_t pause_ns = tddp_deadline_after_ms(all ? PAUSE_MS : 0);
        if (tddp_now_ns() >= deadline_ns || (all && pause_ns >= deadline_ns)) {
            return tddp_fail(TDDP_TIMEOUT, "etcd does not answer: %s", tddp_error_message());
        }
        if (all && tddp_net_sleep(pause_ns, tddp_cancel_fd(cancel)) != TDDP_OK) {
            return tddp_fail(TDDP_CANCELED, "interrupted");
        }
    }
}

/* --- login ----------------------------------------------------------------------------------- */

static tddp_status log_in(tddp_etcd *etcd, const tddp_wait *wait)
{
    tddp_bytes body = {0};
    tddp_etcd_answer answer = {0};
    tddp_status status = tddp_bytes_append(&body, "{\"name\": ", 9);
    status = status ? status : tddp_bytes_append_json(&body, etcd->opts.username);
    status = status ? status : tddp_bytes_append(&body, ", \"password\": ", 14);
    status = status ? status
                    : tddp_bytes_append_json(&body, etcd->opts.password ? etcd->opts.password : "");
    status = status ? status : tddp_bytes_append(&body, "}", 1);
    status = status ? status : ask_any(etcd, "/v3/auth/authenticate", NULL, &body, wait, &answer);
    if (status == TDDP_OK && (answer.code != 0 || !answer.token)) {
        status = tddp_fail(TDDP_STORE, "etcd refuses the user %.64s: %s", etcd->opts.username,
                           answer.error ? answer.error : "it gave no token");
    }
    if (status == TDDP_OK) {
        free(etcd->token);
        etcd->token = answer.token;
        answer.token = NULL;
    }
    tddp_etcd_answer_free(&answer);
    tddp_bytes_free(&body);
    return status;
}

tddp_status tddp_etcd_authorize(tddp_etcd *etcd, const tddp_wait *wait, char **header)
{
    *header = NULL;
    if (!etcd->opts.username) {
        return TDDP_OK;
    }
    tddp_status status = etcd->token ? TDDP_OK : log_in(etcd, wait);
    if (status == TDDP_OK) {
        *header = tddp_format("Authorization: %s", etcd->token);
        status = *header ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    return status;
}

/* --- requests -------------------------------------------------------------------------------- */

tddp_status tddp_etcd_call(tddp_etcd *etcd, const char *path, const tddp_bytes *body,
                           const tddp_wait *wait, tddp_etcd_answer *out)
{
    for (int logins = 0;; logins++) {
        char *header;
        tddp_status status = tddp_etcd_authorize(etcd, wait, &header);
        status = status ? status : ask_any(etcd, path, header, body, wait, out);
        free(header);
        if (status != TDDP_OK || out->code == 0) {
            return status;
        }
        if (out->code == UNAUTHENTICATED && etcd->token && logins == 0) {
            free(etcd->token); /* tokens expire */
            etcd->token = NULL;
            continue;
        }
        return tddp_fail(out->code == NOT_FOUND ? TDDP_NOT_FOUND : TDDP_STORE, "etcd: %s",
                         out->error ? out->error : "no reason given");
    }
}

/* `"name": "BASE64"`. */
static tddp_status add_bytes(tddp_bytes *body, const char *name, tddp_slice bytes)
{
    tddp_status status = tddp_bytes_append(body, "\"", 1);
    status = status ? status : tddp_bytes_append(body, name, strlen(name));
    status = status ? status : tddp_bytes_append(body, "\": \"", 4);
    status = status ? status : tddp_base64_append(body, bytes);
    return status ? status : tddp_bytes_append(body, "\"", 1);
}

tddp_status tddp_etcd_add_key(tddp_bytes *body, tddp_slice key, bool prefix)
{
    tddp_status status = add_bytes(body, "key", key);
    if (status != TDDP_OK || !prefix) {
        return status;
    }
    /* The first key after all that begin so: our keys do not end in a byte of 255. */
    char *end = tddp_alloc(key.size);
    if (!end) {
        return TDDP_OUT_OF_MEMORY;
    }
    memcpy(end, key.data, key.size);
    end[key.size - 1]++;
    status = tddp_bytes_append(body, ", ", 2);
    status = status ? status : add_bytes(body, "range_end", (tddp_slice){end, key.size});
    free(end);
    return status;
}

tddp_status tddp_etcd_range(tddp_etcd *etcd, tddp_slice key, bool prefix, int limit,
                            const tddp_wait *wait, tddp_etcd_answer *out)
{
    char rest[96];
    tddp_bytes body = {0};
    int length = snprintf(rest, sizeof rest,
                          ", \"limit\": \"%d\", \"sort_order\": \"ASCEND\", "
                          "\"sort_target\": \"CREATE\"}",
                          limit);
    tddp_status status = tddp_bytes_append(&body, "{", 1);
    status = status ? status : tddp_etcd_add_key(&body, key, prefix);
    status = status ? status : tddp_bytes_append(&body, rest, (size_t)length);
    status = status ? status : tddp_etcd_call(etcd, "/v3/kv/range", &body, wait, out);
    tddp_bytes_free(&body);
    return status;
}

/* --- writes ---------------------------------------------------------------------------------- */

static tddp_status add_text(tddp_bytes *body, const char *format, ...) TDDP_PRINTF(2, 3);

static tddp_status add_text(tddp_bytes *body, const char *format, ...)
{
    char text[96];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return tddp_bytes_append(body, text, (size_t)length);
}

static tddp_status add_condition(tddp_bytes *body, const tddp_etcd_write *write)
{
    tddp_status status = add_text(body, "{\"compare\": [");
    if (write->guard.data) {
        status = status ? status : add_text(body, "{");
        status = status ? status : tddp_etcd_add_key(body, write->guard, false);
        status = status ? status
                        : add_text(body, ", \"target\": \"CREATE\", \"create_revision\": \"%lld\"}",
                                   (long long)write->made_in);
    }
    return status ? status : add_text(body, "],\n\"success\": [");
}

static tddp_status add_operation(tddp_bytes *body, const tddp_etcd_write *write)
{
    tddp_status status =
        add_text(body, "{\"request_%s\": {", write->remove ? "delete_range" : "put");
    status = status ? status : tddp_etcd_add_key(body, write->key, false);
    if (!write->remove) {
        status = status ? status : add_text(body, ", ");
        status = status ? status : add_bytes(body, "value", write->value);
        status = status ? status : add_text(body, ", \"lease\": \"%lld\"", (long long)write->lease);
    }
    return status ? status : add_text(body, "}}]}");
}

tddp_status tddp_etcd_put(tddp_etcd *etcd, const tddp_etcd_write *write, const tddp_wait *wait,
                          int64_t *revision)
{
    tddp_bytes body = {0};
    tddp_etcd_answer answer = {0};
    tddp_status status = add_condition(&body, write);
    status = status ? status : add_operation(&body, write);
    status = status ? status : tddp_etcd_call(etcd, "/v3/kv/txn", &body, wait, &answer);
    if (status == TDDP_OK) {
        *revision = answer.succeeded ? answer.revision : 0;
    }
    tddp_etcd_answer_free(&answer);
    tddp_bytes_free(&body);
    return status;
}

/* --- leases ---------------------------------------------------------------------------------- */

static tddp_status call_lease(tddp_etcd *etcd, const char *path, const char *field, int64_t number,
                              const tddp_wait *wait, tddp_etcd_answer *out)
{
    char text[64];
    int length = snprintf(text, sizeof text, "{\"%s\": \"%lld\"}", field, (long long)number);
    const tddp_bytes body = {.data = text, .size = (size_t)length};
    return tddp_etcd_call(etcd, path, &body, wait, out);
}

tddp_status tddp_etcd_lease_grant(tddp_etcd *etcd, int64_t ttl_s, const tddp_wait *wait,
                                  int64_t *id)
{
    tddp_etcd_answer answer = {0};
    tddp_status status = call_lease(etcd, "/v3/lease/grant", "TTL", ttl_s, wait, &answer);
    if (status == TDDP_OK) {
        *id = answer.id;
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

tddp_status tddp_etcd_lease_renew(tddp_etcd *etcd, int64_t id, const tddp_wait *wait)
{
    tddp_etcd_answer answer = {0};
    tddp_status status = call_lease(etcd, "/v3/lease/keepalive", "ID", id, wait, &answer);
    if (status == TDDP_OK && answer.ttl <= 0) {
        status = tddp_fail(TDDP_NOT_FOUND, "etcd: the lease has run out");
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

tddp_status tddp_etcd_lease_revoke(tddp_etcd *etcd, int64_t id, const tddp_wait *wait)
{
    tddp_etcd_answer answer = {0};
    tddp_status status = call_lease(etcd, "/v3/lease/revoke", "ID", id, wait, &answer);
    tddp_etcd_answer_free(&answer);
    return status;
}
