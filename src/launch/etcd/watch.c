/*
 * Watches: a response that has no end, of which each line is an answer with changes. Where it ends
 * all the same, it is asked for again from the first revision that has not been seen, at the next
 * endpoint. Used by the client's thread. Invariant: a watch and its client use the same endpoint.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/etcd/state.h"
#include "net/net.h"

enum {
    PAUSE_MS = 100,
    OPEN_MS = 2000, /* for the line that says that the watch is there */
};

struct tddp_etcd_watch {
    tddp_etcd *etcd;
    tddp_http *http;
    char *key;
    size_t key_size;
    bool prefix;
    int64_t revision; /* the first one that was not seen */
    bool open;        /* a response is under way */
    bool confirmed;   /* and has begun */
    int64_t opened_ns;
    int at; /* the endpoint of the response */
    tddp_bytes body;
    tddp_bytes lines;
    tddp_etcd_answer answer; /* the line that is being handed out */
    size_t taken;            /* of its pairs */
};

tddp_status tddp_etcd_watch_open(tddp_etcd *etcd, tddp_slice key, bool prefix, int64_t revision,
                                 tddp_etcd_watch **out)
{
    tddp_etcd_watch *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    *made = (tddp_etcd_watch){.etcd = etcd,
                              .key = tddp_alloc(key.size + 1),
                              .key_size = key.size,
                              .prefix = prefix,
                              .revision = revision};
    tddp_status status =
        made->key ? tddp_http_create(&etcd->opts.tls, &made->http) : TDDP_OUT_OF_MEMORY;
    if (status != TDDP_OK) {
        tddp_etcd_watch_close(made);
        return status;
    }
    memcpy(made->key, key.data, key.size);
    *out = made;
    return TDDP_OK;
}

void tddp_etcd_watch_close(tddp_etcd_watch *watch)
{
    if (watch) {
        tddp_http_free(watch->http);
        tddp_etcd_answer_free(&watch->answer);
        tddp_bytes_free(&watch->body);
        tddp_bytes_free(&watch->lines);
        free(watch->key);
        free(watch);
    }
}

static void drop(tddp_etcd_watch *watch)
{
    if (watch->open) {
        tddp_http_end(watch->http, NULL);
    }
    watch->open = watch->confirmed = false;
    watch->lines.size = 0;
}

/* The next attempt goes to the next endpoint, as do the client's requests. */
static void fail_over(tddp_etcd_watch *watch)
{
    drop(watch);
    if (watch->etcd->at == watch->at) {
        watch->etcd->at = (watch->at + 1) % watch->etcd->opts.endpoint_count;
    }
}

static tddp_status make_body(tddp_etcd_watch *watch)
{
    char rest[64];
    int length =
        snprintf(rest, sizeof rest, ", \"start_revision\": \"%lld\"}}", (long long)watch->revision);
    watch->body.size = 0;
    tddp_status status = tddp_bytes_append(&watch->body, "{\"create_request\": {", 20);
    status = status ? status
                    : tddp_etcd_add_key(&watch->body, (tddp_slice){watch->key, watch->key_size},
                                        watch->prefix);
    return status ? status : tddp_bytes_append(&watch->body, rest, (size_t)length);
}

static tddp_status begin(tddp_etcd_watch *watch, const tddp_wait *wait)
{
    char url[TDDP_ETCD_URL_BYTES];
    char *header;
    tddp_status status = make_body(watch);
    status = status ? status : tddp_etcd_authorize(watch->etcd, wait, &header);
    if (status != TDDP_OK) {
        return status;
    }
    watch->at = watch->etcd->at;
    status = tddp_http_begin(watch->http, tddp_etcd_url(watch->etcd, watch->at, "/v3/watch", url),
                             header, &watch->body, &watch->lines);
    free(header);
    watch->open = status == TDDP_OK;
    watch->opened_ns = tddp_now_ns();
    return status;
}

/* Reads a line into `answer`, if one is complete. TDDP_NOT_FOUND: the revision is compacted;
 * TDDP_NETWORK: the watch has to be opened again. */
static tddp_status take_line(tddp_etcd_watch *watch, bool *taken)
{
    const char *end =
        watch->lines.size > 0 ? memchr(watch->lines.data, '\n', watch->lines.size) : NULL;
    tddp_etcd_answer *answer = &watch->answer;
    *taken = end != NULL;
    if (!end) {
        return TDDP_OK;
    }
    size_t length = (size_t)(end - watch->lines.data);
    tddp_etcd_answer_free(answer);
    watch->taken = 0;
    tddp_status status = tddp_etcd_answer_read(watch->lines.data, length, answer);
    tddp_bytes_consume(&watch->lines, length + 1);
    if (status != TDDP_OK) {
        return status;
    }
    if (answer->compact_revision > 0) {
        return tddp_fail(TDDP_NOT_FOUND, "etcd: revision %lld is compacted",
                         (long long)watch->revision);
    }
    if (answer->canceled || answer->code != 0) {
        return tddp_fail(TDDP_NETWORK, "the watch was canceled: %s",
                         answer->error ? answer->error : "no reason given");
    }
    watch->confirmed = true;
    return TDDP_OK;
}

/* Waits until there is a line, the watch has to be opened again (TDDP_NETWORK), or time is over. */
static tddp_status await_line(tddp_etcd_watch *watch, int64_t deadline_ns, const tddp_wait *wait)
{
    bool taken = false;
    bool still_open = true;
    int64_t opened_by_ns = tddp_deadline_from(watch->opened_ns, OPEN_MS);
    tddp_status status = take_line(watch, &taken);
    while (status == TDDP_OK && !taken) {
        bool awaits_start = !watch->confirmed && opened_by_ns < deadline_ns;
        status = tddp_http_more(watch->http, awaits_start ? opened_by_ns : deadline_ns,
                                tddp_wait_cancel(wait), &still_open);
        if (status == TDDP_TIMEOUT && awaits_start) {
            return TDDP_NETWORK;
        }
        status = status ? status : take_line(watch, &taken);
        if (status == TDDP_OK && !taken && !still_open) {
            return tddp_fail(TDDP_NETWORK, "etcd has ended the watch");
        }
    }
    return status;
}

static bool hand_out(tddp_etcd_watch *watch, tddp_etcd_pair *out)
{
    if (watch->taken == watch->answer.count) {
        return false;
    }
    tddp_etcd_pair *pair = &watch->answer.pairs[watch->taken++];
    *out = *pair;
    *pair = (tddp_etcd_pair){0};
    /* A line has all changes of its revisions. */
    if (watch->taken == watch->answer.count && out->mod_revision >= watch->revision) {
        watch->revision = out->mod_revision + 1;
    }
    return true;
}

tddp_status tddp_etcd_watch_next(tddp_etcd_watch *watch, const tddp_wait *wait, tddp_etcd_pair *out)
{
    int64_t deadline_ns = tddp_wait_deadline(wait, OPEN_MS);
    while (!hand_out(watch, out)) {
        if (watch->open && watch->at != watch->etcd->at) {
            drop(watch); /* a request has found that endpoint silent, which a watch cannot */
        }
        tddp_status status = watch->open ? TDDP_OK : begin(watch, wait);
        status = status ? status : await_line(watch, deadline_ns, wait);
        if (status == TDDP_NETWORK) {
            fail_over(watch);
            int64_t pause_ns = tddp_deadline_after_ms(PAUSE_MS);
            if (pause_ns >= deadline_ns) {
                return tddp_fail(TDDP_TIMEOUT, "etcd does not answer: %s", tddp_error_message());
            }
            status = tddp_net_sleep(pause_ns, tddp_cancel_fd(tddp_wait_cancel(wait)));
        }
        if (status != TDDP_OK) {
            return status;
        }
    }
    return TDDP_OK;
}
