/*
 * The coordinator's side of the rendezvous backend etcd (text.h has the keys). Who writes the key
 * `coordinator` first coordinates, until its lease runs out; the key's revision is the term.
 * Invariant: every write is a transaction that compares that revision, so a coordinator that was
 * stopped for longer than its lease writes nothing, whatever its own clock says. What it has
 * written for its term goes with its lease.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/etcd_keys.h"
#include "launch/rendezvous/host_parts.h"

enum {
    SLICE_MS = 100,   /* for an event, before time is looked at */
    ANSWER_MS = 2000, /* of etcd */
    GOODBYE_MS = 500, /* for it to end the leases */
    NODES_MS = 500,   /* between two looks at which nodes' leases are there */
    ENDED_S = 3600,   /* how long the job's end stays, for a node that was cut off */
    MOST_TAKEN = 64,  /* events deleted together: a transaction has 128 operations at most */
    RENEWALS = 3,     /* of a lease, in its time */
};

typedef struct led {
    tddp_etcd *etcd;
    int64_t lease; /* 0: none */
    int64_t renew_ns;
    int64_t ended_lease; /* of the job's end; 0: none yet */
    tddp_etcd_watch *events;
    char *taken[MOST_TAKEN]; /* keys of events to delete */
    int taken_count;
    /* Nodes whose leases were there at the last look, as beats to be handed out. */
    tddp_etcd_answer nodes;
    size_t nodes_taken;
    int64_t look_ns;
} led;

static tddp_wait answer_wait(const tddp_launch_host *host)
{
    return (tddp_wait){ANSWER_MS, host->cancel};
}

static tddp_status deposed(tddp_launch_host *host)
{
    tddp_launch_host_depose(host);
    return tddp_fail(TDDP_CANCELED, "another torchrun coordinates the job by now");
}

/* Executes what only the coordinator may do. */
static tddp_status commit(tddp_launch_host *host, tddp_etcd_txn *txn)
{
    led *l = host->state;
    int64_t revision = 0;
    tddp_wait wait = answer_wait(host);
    tddp_status status = tddp_etcd_txn_commit(l->etcd, txn, &wait, &revision);
    bool lost = status == TDDP_NOT_FOUND || (status == TDDP_OK && revision == 0);
    return lost ? deposed(host) : status;
}

static tddp_etcd_txn begin(const tddp_launch_host *host)
{
    tddp_etcd_txn txn = {0};
    tddp_launch_etcd_while_leading(&txn, host->opts.run_id, host->term);
    return txn;
}

/* --- start and stop -------------------------------------------------------------------------- */

static void plan_renewal(tddp_launch_host *host)
{
    led *l = host->state;
    int64_t lease_ms = tddp_launch_coordinator_lease_s(&host->opts.times) * 1000;
    l->renew_ns = tddp_deadline_after_ms(lease_ms / RENEWALS);
}

/* Writes the key `coordinator`, unless it is there. */
static tddp_status campaign(tddp_launch_host *host)
{
    led *l = host->state;
    char job[TDDP_LAUNCH_JOB_BYTES];
    char key[TDDP_LAUNCH_KEY_BYTES];
    int64_t revision = 0;
    tddp_etcd_txn txn = {0};
    tddp_wait wait = answer_wait(host);
    tddp_slice name = tddp_launch_etcd_key(host->opts.run_id, key, "coordinator");
    tddp_launch_job_text(host->opts.options, job);
    tddp_status status = tddp_etcd_lease_grant(
        l->etcd, tddp_launch_coordinator_lease_s(&host->opts.times), &wait, &l->lease);
    if (status != TDDP_OK) {
        return status;
    }
    plan_renewal(host);
    tddp_etcd_txn_created_in(&txn, name, 0);
    tddp_etcd_txn_put(&txn, name, (tddp_slice){job, strlen(job)}, l->lease);
    status = tddp_etcd_txn_commit(l->etcd, &txn, &wait, &revision);
    if (status == TDDP_OK && revision == 0) {
        return tddp_fail(TDDP_ADDRESS_IN_USE, "another torchrun coordinates the job");
    }
    host->term = revision;
    return status;
}

static tddp_status start(tddp_launch_host *host)
{
    led *made = tddp_alloc(sizeof *made);
    char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
    host->state = made;
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_launch_endpoint_text(&host->opts.options->endpoints[0], endpoint, sizeof endpoint);
    (void)snprintf(host->where, sizeof host->where, "etcd at %s", endpoint);
    tddp_status status = tddp_launch_etcd_open(host->opts.options, &made->etcd);
    return status ? status : campaign(host);
}

static void forget_taken(led *l)
{
    for (int i = 0; i < l->taken_count; i++) {
        free(l->taken[i]);
    }
    l->taken_count = 0;
}

/* Ends the leadership, and with it all keys of the term. Where etcd does not answer, the lease runs
 * out by itself. */
static void give_up_lease(led *l)
{
    tddp_wait wait = {GOODBYE_MS, NULL};
    if (l->etcd && l->lease) {
        (void)!tddp_etcd_lease_revoke(l->etcd, l->lease, &wait);
    }
    l->lease = 0;
}

static void stop(tddp_launch_host *host)
{
    led *l = host->state;
    if (l) {
        give_up_lease(l);
        forget_taken(l);
        tddp_etcd_watch_close(l->events);
        tddp_etcd_answer_free(&l->nodes);
        tddp_etcd_close(l->etcd);
        free(l);
    }
}

/* --- the thread's ---------------------------------------------------------------------------- */

/* From the first event that is there; of those that were taken it does not know. */
static tddp_status list_events(tddp_launch_host *host)
{
    led *l = host->state;
    char key[TDDP_LAUNCH_KEY_BYTES];
    size_t count;
    tddp_wait wait = answer_wait(host);
    tddp_slice events = tddp_launch_etcd_term_key(host->opts.run_id, host->term, key, "events/");
    forget_taken(l);
    tddp_status status =
        l->events ? TDDP_OK : tddp_etcd_watch_open(l->etcd, events, true, 0, &l->events);
    return status ? status : tddp_etcd_watch_list(l->events, &wait, &count);
}

/* Message 0 is there from now on, which a node sees go if the term ends. */
static tddp_status open_term(tddp_launch_host *host)
{
    const led *l = host->state;
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_etcd_txn txn = begin(host);
    tddp_slice first =
        tddp_launch_etcd_term_key(host->opts.run_id, host->term, key, "messages/%d", 0);
    tddp_etcd_txn_put(&txn, first, (tddp_slice){"open", 4}, l->lease);
    tddp_status status = commit(host, &txn);
    return status ? status : list_events(host);
}

static void close_term(tddp_launch_host *host, bool ended)
{
    (void)ended;
    give_up_lease(host->state);
}

static tddp_status renew(tddp_launch_host *host)
{
    const led *l = host->state;
    tddp_wait wait = answer_wait(host);
    if (tddp_now_ns() < l->renew_ns) {
        return TDDP_OK;
    }
    tddp_status status = tddp_etcd_lease_renew(l->etcd, l->lease, &wait);
    if (status == TDDP_NOT_FOUND) {
        return deposed(host);
    }
    plan_renewal(host);
    return status;
}

/* Looks which nodes' leases are there, if it is time. */
static tddp_status look_at_nodes(tddp_launch_host *host)
{
    led *l = host->state;
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_wait wait = answer_wait(host);
    if (tddp_now_ns() < l->look_ns) {
        return TDDP_OK;
    }
    tddp_etcd_answer_free(&l->nodes);
    l->nodes_taken = 0;
    l->look_ns = tddp_deadline_after_ms(NODES_MS);
    return tddp_etcd_range(l->etcd,
                           tddp_launch_etcd_term_key(host->opts.run_id, host->term, key, "nodes/"),
                           true, 0, &wait, &l->nodes);
}

static void add_deletions(tddp_launch_host *host, tddp_etcd_txn *txn)
{
    led *l = host->state;
    for (int i = 0; i < l->taken_count; i++) {
        tddp_etcd_txn_delete(txn, (tddp_slice){l->taken[i], strlen(l->taken[i])}, false);
        free(l->taken[i]);
    }
    l->taken_count = 0;
}

static tddp_status delete_taken(tddp_launch_host *host)
{
    const led *l = host->state;
    if (l->taken_count == 0) {
        return TDDP_OK;
    }
    tddp_etcd_txn txn = begin(host);
    add_deletions(host, &txn);
    return commit(host, &txn);
}

static tddp_status take_next(tddp_launch_host *host, bool block, tddp_launch_event *event)
{
    led *l = host->state;
    tddp_wait wait = {block ? SLICE_MS : 0, host->cancel};
    tddp_etcd_pair pair = {0};
    do {
        tddp_etcd_pair_free(&pair);
        tddp_status status = tddp_etcd_watch_next(l->events, &wait, &pair);
        if (status == TDDP_NOT_FOUND) { /* the watch is too far behind */
            status = delete_taken(host);
            return status ? status : list_events(host);
        }
        if (status != TDDP_OK) {
            return status == TDDP_TIMEOUT || status == TDDP_CANCELED ? TDDP_NOT_FOUND : status;
        }
    } while (pair.deleted);
    l->taken[l->taken_count++] = pair.key.data;
    pair.key = (tddp_blob){0};
    tddp_status status = tddp_launch_host_read_event(&pair.value, event);
    tddp_etcd_pair_free(&pair);
    return status;
}

static tddp_status take(tddp_launch_host *host, bool block, tddp_launch_event *event)
{
    led *l = host->state;
    tddp_status status = renew(host);
    status = status ? status : look_at_nodes(host);
    if (status == TDDP_OK && (l->taken_count == MOST_TAKEN || block)) {
        status = delete_taken(host);
    }
    if (status != TDDP_OK) {
        return status;
    }
    if (l->nodes_taken < l->nodes.count) {
        int64_t slot = tddp_launch_etcd_number(&l->nodes.pairs[l->nodes_taken++].key);
        event->slot = slot > 0 ? (int)slot : 0;
        return TDDP_OK;
    }
    return take_next(host, block, event);
}

static tddp_status publish(tddp_launch_host *host, int64_t number, tddp_slice text, bool end)
{
    led *l = host->state;
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_wait wait = answer_wait(host);
    tddp_status status = TDDP_OK;
    if (end && !l->ended_lease) {
        status = tddp_etcd_lease_grant(l->etcd, ENDED_S, &wait, &l->ended_lease);
    }
    if (status != TDDP_OK) {
        return status;
    }
    tddp_etcd_txn txn = begin(host);
    add_deletions(host, &txn);
    if (end) {
        tddp_etcd_txn_put(&txn, tddp_launch_etcd_key(host->opts.run_id, key, "ended"), text,
                          l->ended_lease);
    }
    tddp_slice message = tddp_launch_etcd_term_key(host->opts.run_id, host->term, key,
                                                   "messages/%lld", (long long)number);
    tddp_etcd_txn_put(&txn, message, text, l->lease);
    return commit(host, &txn);
}

const tddp_launch_coordinator_backend tddp_launch_etcd_coordinator = {
    .start = start,
    .stop = stop,
    .open = open_term,
    .take = take,
    .publish = publish,
    .close = close_term,
    .survives = true,
};
