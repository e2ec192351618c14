/*
 * The rendezvous backend etcd: keys below /torchrun/RUN_ID/. What is ephemeral hangs on a lease of
 * the node. Runs on the rendezvous thread. Invariant: every write of the leader is a transaction
 * that compares the revision in which its key `leader` was made, so a leader that was stopped for
 * longer than its lease writes nothing, whatever its own clock says.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/etcd/etcd.h"
#include "launch/rendezvous/backend.h"

enum {
    KEY_BYTES = 384, /* run IDs have at most 256 */
    STATE_S = 3600,  /* how long the document stays without a leader: for the next one to go on with
                        it, whatever kept all nodes away, and for a node that was cut off to read
                        the end */
    /* In place of the revision in which `leader` was made: */
    NOBODY_LEADS = 0,
    ANYBODY_LEADS = -1,
};

typedef struct connection {
    tddp_etcd etcd;
    int64_t revision;    /* of the list that was read last; 0: it is to be read */
    int64_t lease;       /* the entry's and the leader's; 0: none */
    int64_t state_lease; /* the document's */
    int64_t led_in;      /* the revision in which this node's `leader` was made; 0: none */
} connection;

typedef struct key {
    char text[KEY_BYTES / 3 * 4 + 1]; /* in base64 */
} key;

static key key_of(const tddp_launch_link *link, const char *first, const char *second)
{
    key made;
    char text[KEY_BYTES];
    (void)snprintf(text, sizeof text, "/torchrun/%s%s%s", link->run_id, first, second);
    (void)tddp_base64((tddp_slice){text, strlen(text)}, made.text);
    return made;
}

/* --- leases ---------------------------------------------------------------------------------- */

/* "/v3/lease/grant", of so many seconds, or what else there is to be done with `*id`, which may be
 * another one then; 0: it has run out, and what hung on it has gone with it. */
static tddp_status call_lease(tddp_launch_link *link, const char *path, int64_t ttl_s, int64_t *id)
{
    connection *c = link->state;
    const tddp_wait wait = {link->times.read_ms, NULL};
    tddp_etcd_answer answer = {0};
    char *body = tddp_format(ttl_s ? "{\"TTL\": \"%lld\"}" : "{\"ID\": \"%lld\"}",
                             (long long)(ttl_s ? ttl_s : *id));
    tddp_status status = tddp_etcd_call(&c->etcd, path, body, &wait, &answer);
    if (status == TDDP_OK || status == TDDP_NOT_FOUND) {
        *id = status == TDDP_OK && answer.ttl > 0 ? answer.id : 0;
        status = TDDP_OK;
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

static void close_link(tddp_launch_link *link)
{
    connection *c = link->state;
    if (!c) {
        return;
    }
    if (c->lease) {
        (void)!call_lease(link, "/v3/lease/revoke", 0, &c->lease); /* else it runs out */
    }
    tddp_etcd_close(&c->etcd);
    free(c);
    link->state = NULL;
}

/* --- what is there --------------------------------------------------------------------------- */

/* Reads all that is there. */
static tddp_status list(tddp_launch_link *link, int64_t limit_ms, tddp_launch_view *view)
{
    connection *c = link->state;
    const tddp_wait wait = {limit_ms, link->cancel};
    const size_t prefix = strlen("/torchrun//") + strlen(link->run_id);
    tddp_etcd_answer answer = {0};
    char *body = tddp_format("{\"key\": \"%s\", \"range_end\": \"%s\"}", key_of(link, "/", "").text,
                             key_of(link, "0", "").text);
    c->revision = 0; /* also if this ends early */
    tddp_status status = tddp_etcd_call(&c->etcd, "/v3/kv/range", body, &wait, &answer);
    if (status == TDDP_OK) {
        tddp_launch_view_free(view);
        c->revision = answer.revision;
    }
    for (size_t i = 0; i < answer.count && status == TDDP_OK; i++) {
        status = tddp_launch_view_add(view, &answer.pairs[i].key, prefix, &answer.pairs[i].value);
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

static tddp_status watch(tddp_launch_link *link, int64_t limit_ms, tddp_launch_view *view)
{
    connection *c = link->state;
    const tddp_wait wait = {limit_ms, link->cancel};
    tddp_status status = TDDP_OK;
    if (c->revision > 0) {
        char *body = tddp_format("{\"create_request\": {\"key\": \"%s\", \"range_end\": \"%s\", "
                                 "\"start_revision\": \"%lld\"}}",
                                 key_of(link, "/", "").text, key_of(link, "0", "").text,
                                 (long long)c->revision + 1);
        status = tddp_etcd_watch(&c->etcd, body, c->revision, &wait);
    }
    return status == TDDP_OK ? list(link, link->times.read_ms, view) : status;
}

/* The client makes its connections itself: this only sees whether etcd answers. */
static tddp_status connect_link(tddp_launch_link *link, int64_t limit_ms)
{
    tddp_launch_view view = {.count = 0};
    connection *c = link->state;
    tddp_status status = TDDP_OK;
    if (!c) {
        link->state = c = tddp_alloc(sizeof *c);
        status = c ? tddp_etcd_open(&c->etcd, link->options) : TDDP_OUT_OF_MEMORY;
    }
    if (status == TDDP_OK) {
        status = list(link, limit_ms, &view);
        tddp_launch_view_free(&view);
        c->revision = 0; /* the caller reads it all again */
    }
    return status;
}

/* --- writes ---------------------------------------------------------------------------------- */

static char *put_request(key at, tddp_slice value, int64_t lease)
{
    char *text = tddp_alloc((value.size + 2) / 3 * 4 + 1);
    char *made =
        text ? tddp_format(
                   "\"request_put\": {\"key\": \"%s\", \"value\": \"%s\", \"lease\": \"%lld\"}",
                   at.text, tddp_base64(value, text), (long long)lease)
             : NULL;
    free(text);
    return made;
}

/* Executes a request, and frees it, if `leader` was made in the revision `led_in`. TDDP_NOT_FOUND:
 * it was not, or the request's lease has run out. */
static tddp_status write_if(tddp_launch_link *link, int64_t led_in, char *request)
{
    connection *c = link->state;
    const tddp_wait wait = {link->times.read_ms, NULL};
    tddp_etcd_answer answer = {0};
    key leader = key_of(link, "/leader", "");
    char *body = request ? tddp_format("{\"compare\": [{\"key\": \"%s\", \"target\": \"CREATE\", "
                                       "\"result\": \"%s\", \"create_revision\": \"%lld\"}],\n"
                                       "\"success\": [{%s}],\n"
                                       "\"failure\": [{\"request_range\": {\"key\": \"%s\"}}]}",
                                       leader.text, led_in == ANYBODY_LEADS ? "GREATER" : "EQUAL",
                                       (long long)led_in, request, leader.text)
                         : NULL;
    free(request);
    tddp_status status = tddp_etcd_call(&c->etcd, "/v3/kv/txn", body, &wait, &answer);
    if (status == TDDP_OK && answer.succeeded) {
        c->led_in = led_in == NOBODY_LEADS ? answer.revision : c->led_in;
    } else if (status == TDDP_OK) {
        /* It may be this node's own, made by a request whose answer was lost. */
        bool own = answer.count > 0 && strcmp(answer.pairs[0].value.data, link->id) == 0;
        c->led_in = own ? answer.create_revision : 0;
        if (!own || led_in != NOBODY_LEADS) {
            status = tddp_fail(TDDP_NOT_FOUND, "another torchrun leads");
        }
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

/* --- entries --------------------------------------------------------------------------------- */

/* One that stays has a lease of its own, and goes when that runs out, if nobody removes it before.
 */
static tddp_status put_entry(tddp_launch_link *link, tddp_slice value, bool again, bool stays)
{
    connection *c = link->state;
    int64_t own = 0;
    int64_t *lease = stays ? &own : &c->lease;
    tddp_status status = *lease ? call_lease(link, "/v3/lease/keepalive", 0, lease) : TDDP_OK;
    if (status == TDDP_OK && !*lease) {
        again = false;
        c->led_in = stays ? c->led_in : 0;
        /* etcd makes more of one that is too short for it. */
        status = call_lease(link, "/v3/lease/grant", (link->times.silence_ms + 999) / 1000, lease);
    }
    if (status == TDDP_OK && !again) {
        status = write_if(link, ANYBODY_LEADS,
                          put_request(key_of(link, "/node/", link->id), value, *lease));
    }
    return status == TDDP_OK && c->led_in > 0 && c->state_lease
               ? call_lease(link, "/v3/lease/keepalive", 0, &c->state_lease)
               : status;
}

static tddp_status remove_entry(tddp_launch_link *link, const char *id)
{
    return write_if(link, ANYBODY_LEADS,
                    tddp_format("\"request_delete_range\": {\"key\": \"%s\"}",
                                key_of(link, "/node/", id).text));
}

/* --- the leader ------------------------------------------------------------------------------ */

static tddp_status lead(tddp_launch_link *link)
{
    const tddp_slice own = {link->id, strlen(link->id)};
    const int64_t lease = ((const connection *)link->state)->lease;
    return lease
               ? write_if(link, NOBODY_LEADS, put_request(key_of(link, "/leader", ""), own, lease))
               : tddp_fail(TDDP_NOT_FOUND, "this node's entry has to be put first");
}

static tddp_status put_state(tddp_launch_link *link, tddp_slice before, tddp_slice now)
{
    connection *c = link->state;
    tddp_status status = TDDP_OK;
    (void)before; /* who leads is compared instead */
    if (c->led_in == 0) {
        return tddp_fail(TDDP_NOT_FOUND, "another torchrun leads");
    }
    if (!c->state_lease) {
        status = call_lease(link, "/v3/lease/grant", STATE_S, &c->state_lease);
    }
    if (status == TDDP_OK) {
        status =
            write_if(link, c->led_in, put_request(key_of(link, "/state", ""), now, c->state_lease));
    }
    if (status == TDDP_NOT_FOUND) { /* or it is the lease that has run out */
        c->state_lease = 0;
    }
    return status;
}

const tddp_launch_backend tddp_launch_etcd = {
    .connect = connect_link,
    .close = close_link,
    .watch = watch,
    .put_entry = put_entry,
    .remove_entry = remove_entry,
    .lead = lead,
    .put_state = put_state,
    .survives = true,
};
