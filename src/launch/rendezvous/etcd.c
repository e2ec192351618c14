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
    KEY_BYTES = 512,
    LEAST_LEASE_S = 2,     /* etcd's own least, with its usual election timeout of one second */
    STATE_LEASE_TIMES = 2, /* of a node's: for the next leader to find it */
    ENDED_S = 3600,        /* how long the job's end stays, for a node that was cut off */
};

typedef struct connection {
    tddp_etcd *etcd;
    tddp_etcd_watch *watch; /* NULL: what is there was not listed yet */
    int64_t revision;       /* of the list */
    int64_t lease;          /* the entry's and the leader's; 0: none */
    int64_t state_lease;    /* the document's */
    int64_t led_in;         /* the revision in which this node's `leader` was made; 0: none */
    tddp_bytes entry;       /* as it was put last under that lease */
    bool left;              /* the entry stays */
} connection;

static tddp_slice key_of(const tddp_launch_link *link, char text[KEY_BYTES], const char *first,
                         const char *second)
{
    int length = snprintf(text, KEY_BYTES, "/torchrun/%s/%s%s", link->run_id, first, second);
    return (tddp_slice){text, (size_t)length};
}

static tddp_wait answer_wait(const tddp_launch_link *link)
{
    return (tddp_wait){link->times.read_ms, NULL};
}

/* No answer in time is a link that is lost, and no "nothing has changed". */
static tddp_status lost(tddp_status status)
{
    return status == TDDP_TIMEOUT ? tddp_fail(TDDP_NETWORK, "%s", tddp_error_message()) : status;
}

/* --- life ------------------------------------------------------------------------------------ */

static tddp_status open_link(tddp_launch_link *link)
{
    const tddp_launch_options *options = link->options;
    const tddp_launch_etcd_conf *conf = &options->conf.etcd;
    const tddp_etcd_opts opts = {
        .endpoints = options->endpoints,
        .endpoint_count = options->endpoint_count,
        .https = conf->https,
        .tls = {.cacert = conf->cacert[0] ? conf->cacert : NULL,
                .cert = conf->cert[0] ? conf->cert : NULL,
                .key = conf->key[0] ? conf->key : NULL},
        .username = conf->username[0] ? conf->username : NULL,
        .password = conf->password,
    };
    connection *made = tddp_alloc(sizeof *made);
    link->state = made;
    return made ? tddp_etcd_open(&opts, &made->etcd) : TDDP_OUT_OF_MEMORY;
}

static void forget_list(connection *c)
{
    tddp_etcd_watch_close(c->watch);
    c->watch = NULL;
    c->revision = 0;
}

static void close_link(tddp_launch_link *link)
{
    connection *c = link->state;
    tddp_wait wait = answer_wait(link);
    if (!c) {
        return;
    }
    if (c->lease && !c->left) {
        (void)!tddp_etcd_lease_revoke(c->etcd, c->lease, &wait); /* else it runs out */
    }
    forget_list(c);
    tddp_bytes_free(&c->entry);
    tddp_etcd_close(c->etcd);
    free(c);
    link->state = NULL;
}

/* The client makes its connections itself: this only sees whether etcd answers. */
static tddp_status connect_link(tddp_launch_link *link, int64_t limit_ms)
{
    connection *c = link->state;
    char key[KEY_BYTES];
    tddp_wait wait = {limit_ms, link->cancel};
    tddp_etcd_answer answer = {0};
    link->refused = false;
    link->why[0] = '\0';
    forget_list(c);
    tddp_status status =
        tddp_etcd_range(c->etcd, key_of(link, key, "leader", ""), false, 1, &wait, &answer);
    tddp_etcd_answer_free(&answer);
    if (status != TDDP_OK) {
        (void)snprintf(link->why, sizeof link->why, "%s", tddp_error_message());
    }
    return lost(status);
}

/* --- what is there --------------------------------------------------------------------------- */

static tddp_status list(tddp_launch_link *link, tddp_launch_view *view)
{
    connection *c = link->state;
    char text[KEY_BYTES];
    tddp_etcd_answer answer = {0};
    tddp_wait wait = {link->times.read_ms, link->cancel};
    tddp_slice prefix = key_of(link, text, "", "");
    tddp_status status = tddp_etcd_range(c->etcd, prefix, true, 0, &wait, &answer);
    if (status == TDDP_OK) {
        tddp_launch_view_free(view);
        c->revision = answer.revision;
    }
    for (size_t i = 0; i < answer.count && status == TDDP_OK; i++) {
        const tddp_etcd_pair *pair = &answer.pairs[i];
        status = tddp_launch_view_add(
            view, (tddp_slice){pair->key.data + prefix.size, pair->key.size - prefix.size},
            (tddp_slice){pair->value.data, pair->value.size});
    }
    if (status == TDDP_OK && !c->watch) {
        status = tddp_etcd_watch_open(c->etcd, prefix, true, c->revision + 1, &c->watch);
    }
    tddp_etcd_answer_free(&answer);
    return lost(status);
}

/* Waits for a change after what was listed. */
static tddp_status await_change(connection *c, const tddp_wait *wait)
{
    int64_t deadline_ns = tddp_wait_deadline(wait, 0);
    int64_t changed_in = 0;
    while (changed_in <= c->revision) {
        tddp_etcd_pair pair = {0};
        tddp_wait left = {tddp_deadline_poll_ms(deadline_ns), wait->cancel};
        tddp_status status = tddp_etcd_watch_next(c->watch, &left, &pair);
        changed_in = pair.mod_revision;
        tddp_etcd_pair_free(&pair);
        if (status == TDDP_NOT_FOUND) { /* too far behind: all of it is listed again */
            forget_list(c);
            return TDDP_OK;
        }
        if (status != TDDP_OK) {
            return status;
        }
    }
    return TDDP_OK;
}

static tddp_status watch(tddp_launch_link *link, int64_t limit_ms, tddp_launch_view *view)
{
    connection *c = link->state;
    tddp_wait wait = {limit_ms, link->cancel};
    tddp_status status = c->watch ? await_change(c, &wait) : TDDP_OK;
    return status == TDDP_OK ? list(link, view) : status;
}

/* --- entries --------------------------------------------------------------------------------- */

static int64_t lease_s(const tddp_launch_link *link)
{
    int64_t silence_s = (link->times.silence_ms + 999) / 1000;
    return silence_s > LEAST_LEASE_S ? silence_s : LEAST_LEASE_S;
}

/* Renews the node's lease, or gets another one. */
static tddp_status renew(tddp_launch_link *link)
{
    connection *c = link->state;
    tddp_wait wait = answer_wait(link);
    tddp_status status =
        c->lease ? tddp_etcd_lease_renew(c->etcd, c->lease, &wait) : TDDP_NOT_FOUND;
    if (status == TDDP_NOT_FOUND) {
        c->led_in = 0;
        c->entry.size = 0;
        status = tddp_etcd_lease_grant(c->etcd, lease_s(link), &wait, &c->lease);
    }
    return status;
}

static tddp_status put_entry(tddp_launch_link *link, tddp_slice value, bool again)
{
    connection *c = link->state;
    char key[KEY_BYTES];
    int64_t revision;
    tddp_wait wait = answer_wait(link);
    (void)again; /* the lease may have run out, and the entry with it */
    tddp_status status = renew(link);
    bool there = c->entry.size == value.size && memcmp(c->entry.data, value.data, value.size) == 0;
    if (status == TDDP_OK && !there) {
        c->entry.size = 0;
        const tddp_etcd_write write = {
            .key = key_of(link, key, "node/", link->id), .value = value, .lease = c->lease};
        status = tddp_etcd_put(c->etcd, &write, &wait, &revision);
        status = status ? status : tddp_bytes_append(&c->entry, value.data, value.size);
    }
    return lost(status);
}

/* It goes when its lease runs out, if nobody removes it before. */
static tddp_status leave_entry(tddp_launch_link *link, tddp_slice value)
{
    connection *c = link->state;
    c->left = true;
    return put_entry(link, value, false);
}

static tddp_status remove_entry(tddp_launch_link *link, const char *id)
{
    const connection *c = link->state;
    char key[KEY_BYTES];
    int64_t revision;
    tddp_wait wait = answer_wait(link);
    const tddp_etcd_write write = {.key = key_of(link, key, "node/", id), .remove = true};
    return lost(tddp_etcd_put(c->etcd, &write, &wait, &revision));
}

/* --- the leader ------------------------------------------------------------------------------ */

static tddp_status other_leads(void)
{
    return tddp_fail(TDDP_NOT_FOUND, "another torchrun leads");
}

static tddp_status lead(tddp_launch_link *link)
{
    connection *c = link->state;
    char key[KEY_BYTES];
    tddp_wait wait = answer_wait(link);
    if (c->led_in > 0) { /* its lease was renewed with the entry's */
        return c->state_lease ? lost(tddp_etcd_lease_renew(c->etcd, c->state_lease, &wait))
                              : TDDP_OK;
    }
    tddp_status status = c->lease ? TDDP_OK : renew(link);
    tddp_slice leader = key_of(link, key, "leader", "");
    const tddp_etcd_write write = {
        .key = leader, .value = {link->id, strlen(link->id)}, .lease = c->lease, .guard = leader};
    status = status ? status : tddp_etcd_put(c->etcd, &write, &wait, &c->led_in);
    return status == TDDP_OK && c->led_in == 0 ? other_leads() : lost(status);
}

/* Writes what makes sense only while this node leads. */
static tddp_status write_leading(tddp_launch_link *link, tddp_etcd_write write)
{
    connection *c = link->state;
    char key[KEY_BYTES];
    int64_t revision = 0;
    tddp_wait wait = answer_wait(link);
    write.guard = key_of(link, key, "leader", "");
    write.made_in = c->led_in;
    tddp_status status = tddp_etcd_put(c->etcd, &write, &wait, &revision);
    if (status == TDDP_OK && revision == 0) {
        c->led_in = 0;
        return other_leads();
    }
    return lost(status);
}

static tddp_status resign(tddp_launch_link *link)
{
    connection *c = link->state;
    char key[KEY_BYTES];
    tddp_status status = TDDP_OK;
    if (c->led_in > 0) {
        status = write_leading(
            link, (tddp_etcd_write){.key = key_of(link, key, "leader", ""), .remove = true});
    }
    c->led_in = 0;
    return status;
}

static tddp_status put_state(tddp_launch_link *link, tddp_slice before, tddp_slice now, bool last)
{
    connection *c = link->state;
    char key[KEY_BYTES];
    tddp_wait wait = answer_wait(link);
    tddp_status status = TDDP_OK;
    (void)before; /* who leads is compared instead */
    if (!c->state_lease || last) {
        int64_t ttl_s = last ? ENDED_S : STATE_LEASE_TIMES * lease_s(link) + LEAST_LEASE_S;
        status = tddp_etcd_lease_grant(c->etcd, ttl_s, &wait, &c->state_lease);
    }
    if (status != TDDP_OK) {
        return lost(status);
    }
    status = write_leading(link, (tddp_etcd_write){.key = key_of(link, key, "state", ""),
                                                   .value = now,
                                                   .lease = c->state_lease});
    if (status == TDDP_NOT_FOUND) { /* or it is the lease that has run out */
        c->state_lease = 0;
    }
    return status;
}

const tddp_launch_backend tddp_launch_etcd = {
    .open = open_link,
    .close = close_link,
    .connect = connect_link,
    .watch = watch,
    .put_entry = put_entry,
    .leave_entry = leave_entry,
    .remove_entry = remove_entry,
    .lead = lead,
    .resign = resign,
    .put_state = put_state,
    .survives = true,
};
