/*
 * The way to where the nodes meet, and to who leads there: tried again and again, with a line now
 * and then, until time is over. What becomes of a round meanwhile: where certainly nobody is any
 * more the host has taken the job along; silence alone ends nothing, unless the job is elastic and
 * the others have gone on by now.
 *
 * Whether this node serves the store, with c10d and static: of nodes with ranks the first one (with
 * static always, with c10d if the endpoint is here), else who has the endpoint's address, is first
 * there, or is asked to. A node with another rank serves an endpoint that is its own once nobody
 * else has for a while: the first may be on the same machine. A store of another job that is there
 * is as good. With etcd nothing is served, and any node may lead. Runs on the rendezvous thread.
 */
#include <stdio.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    LOOKUP_MS = 10 * 1000,
    REACH_MS = 2 * 1000, /* for one attempt */
    PAUSE_MS = 20,       /* grows with the time that the search takes, up to: */
    MOST_PAUSE_MS = 400,
    SHORT_PAUSE_MS = 100, /* of a node that the others may count as lost */
    EARLIER_PART =
        5, /* of the silence: a node that is cut off ends its workers before others begin */
    RETURN_MS = 5 * 1000, /* for another host where the last one has ended */
    HOST_LATE_MS = 1500,  /* until a node serves where nobody else does */
};

/* --- serving --------------------------------------------------------------------------------- */

/* Whether one of the endpoint's addresses is this machine's. If it has none connecting tries again,
 * with a message. */
static bool is_here(const tddp_launch_node *node)
{
    char address[TDDP_LAUNCH_ADDR_BYTES];
    tddp_net_address found[TDDP_NET_MAX_ADDRESSES];
    size_t count = 0;
    bool here = false;
    (void)!tddp_net_resolve(node->link.options->endpoints[0].host, 0,
                            tddp_deadline_after_ms(LOOKUP_MS), tddp_cancel_fd(node->link.cancel),
                            found, TDDP_NET_MAX_ADDRESSES, &count);
    for (size_t i = 0; i < count && !here; i++) {
        int fd = -1;
        here = tddp_net_listen(tddp_net_host_text(&found[i], address), 0, &fd) == TDDP_OK;
        tddp_close(fd);
    }
    return here;
}

/* Serves the endpoint's store, if that is this node's part by now. Another one that is there is as
 * good; `problem`: why this node fails if it is none. */
static tddp_status serve(tddp_launch_node *node, char problem[TDDP_LAUNCH_WHY_BYTES])
{
    const tddp_launch_options *options = node->link.options;
    bool fixed = options->backend == TDDP_LAUNCH_STATIC;
    bool asked = options->conf.is_host > 0;
    bool chosen = asked || options->node_rank == 0;
    bool late = tddp_now_ns() >= tddp_deadline_from(node->alone_ns, HOST_LATE_MS);
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = options->endpoints[0].host;
    opts.port = options->endpoints[0].port;
    if (options->backend == TDDP_LAUNCH_ETCD) {
        node->candidate = options->conf.is_host != 0;
        return TDDP_OK;
    }
    if (options->conf.is_host == 0 || (!chosen && (fixed || (options->node_rank > 0 && !late))) ||
        (!asked && !fixed && !is_here(node))) {
        return TDDP_OK;
    }
    tddp_status status = tddp_store_server_start(&opts, &node->link.server);
    node->entry.self.hosting = status == TDDP_OK;
    node->candidate = true;
    bool other = status == TDDP_ADDRESS_IN_USE && !fixed;
    if (status != TDDP_OK && (!other || (chosen && node->heard_ns == 0))) {
        (void)snprintf(problem, TDDP_LAUNCH_WHY_BYTES, "%s", tddp_error_message());
    }
    return other ? TDDP_OK : status;
}

/* --- nobody leads ---------------------------------------------------------------------------- */

void tddp_launch_node_begin_search(tddp_launch_node *node)
{
    node->alone_ns = tddp_now_ns();
    node->report_ns = tddp_deadline_after_ms(node->link.times.report_ms);
}

static void give_up(tddp_launch_node *node, const char *why)
{
    bool etcd = node->link.backend->survives;
    if (node->started) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s at %s is lost: %s%s",
                                node->meets, node->where, why,
                                etcd ? "" : "; a job with --rdzv-backend=etcd survives that");
        return;
    }
    tddp_launch_node_notify(
        node, TDDP_LAUNCH_NOTIFICATION_ERROR,
        "no torchrun leads the job \"%s\" within %d s: tried %s (%s); check that %s, and that all "
        "nodes have the same --rdzv-endpoint and --rdzv-id, or raise --rdzv-conf join_timeout",
        node->link.run_id, node->link.options->conf.join_timeout, node->where, why,
        etcd ? "etcd answers there"
             : "torchrun runs there (with --rdzv-conf is_host=1 if that host knows itself by "
               "another address)");
}

void tddp_launch_node_await_leader(tddp_launch_node *node, const char *why)
{
    bool lost = node->contact == TDDP_LAUNCH_LOST;
    int64_t return_ms = tddp_launch_is_elastic(node->link.options) ? RETURN_MS : 0;
    if (node->part != TDDP_LAUNCH_AWAITING && node->entry.done != node->entry.round) {
        /* As long as workers run there is time; but who is connected may lead soon. */
        node->alone_ns = node->contact == TDDP_LAUNCH_CONNECTED ? node->alone_ns : tddp_now_ns();
    } else if (tddp_now_ns() >=
               tddp_deadline_from(node->alone_ns, lost ? return_ms : node->link.times.join_ms)) {
        give_up(node, why);
    } else if (node->part == TDDP_LAUNCH_AWAITING && tddp_now_ns() >= node->report_ns) {
        node->report_ns = tddp_deadline_after_ms(node->link.times.report_ms);
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS,
                                "looking for who leads the job \"%s\": tried %s (%s)",
                                node->link.run_id, node->where, why);
    }
}

/* --- a connection that is lost --------------------------------------------------------------- */

void tddp_launch_node_lose_job(tddp_launch_node *node, const char *why)
{
    tddp_launch_entry *entry = &node->entry;
    char text[TDDP_LAUNCH_WHERE_BYTES + TDDP_LAUNCH_WHY_BYTES + 64];
    (void)snprintf(text, sizeof text, "%s at %s is lost: %s", node->meets, node->where, why);
    tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, text);
    entry->ready = entry->ready > entry->round ? 0 : -1;
    entry->round = entry->rank = entry->done = entry->failed = entry->master_round = -1;
}

/* Nobody answers. Workers that run go on, but in an elastic job not beside those of a round that
 * the others have begun by now. */
static void note_silent(tddp_launch_node *node, const char *why)
{
    int64_t silence_ms = (tddp_now_ns() - node->heard_ns) / TDDP_NS_PER_MS;
    int64_t limit_ms = node->link.times.silence_ms - node->link.times.silence_ms / EARLIER_PART;
    if (node->contact != TDDP_LAUNCH_SILENT && silence_ms >= REACH_MS) {
        node->contact = TDDP_LAUNCH_SILENT;
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS,
                                "%s at %s does not answer: %s", node->meets, node->where, why);
    }
    if (tddp_launch_is_elastic(node->link.options) && silence_ms >= limit_ms) {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, NULL);
    }
}

/* A worker has failed here while nobody answers: the round is over without the others' consent, and
 * without a restart left nothing comes after it. */
static void note_failure(tddp_launch_node *node)
{
    tddp_launch_entry *entry = &node->entry;
    if (node->part != TDDP_LAUNCH_WORKING ||
        (node->failure_ns == INT64_MAX && entry->failed != entry->round)) {
        return;
    }
    entry->failed = entry->round;
    if (node->world.restart >= node->link.options->max_restarts) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ENDED, "%s", entry->text);
    } else {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_FAILED, entry->text);
    }
}

/* --- the search ------------------------------------------------------------------------------ */

/* Whether another try would be as vain: another secret, say, or no store at all. A node that was in
 * the job knows that it may be otherwise. */
static bool is_permanent(const tddp_launch_node *node, tddp_status status)
{
    return status == TDDP_OUT_OF_MEMORY || status == TDDP_UNAVAILABLE ||
           (!node->started && (status == TDDP_STORE || status == TDDP_PROTOCOL ||
                               status == TDDP_INVALID_ARGUMENT || status == TDDP_UNSUPPORTED));
}

/* What follows from an attempt in vain. */
static void go_on(tddp_launch_node *node)
{
    char why[TDDP_LAUNCH_WHY_BYTES];
    (void)snprintf(why, sizeof why, "%s", tddp_error_message());
    if (node->started && node->contact != TDDP_LAUNCH_LOST && node->link.refused) {
        node->contact = TDDP_LAUNCH_LOST;
        node->alone_ns = tddp_now_ns();
        tddp_launch_node_lose_job(node, why);
    } else if (node->started && node->contact != TDDP_LAUNCH_LOST) {
        note_silent(node, why);
    }
    note_failure(node);
    if (!node->over) {
        tddp_launch_node_await_leader(node, why);
    }
}

static void be_connected(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->link.options;
    char *addr = node->entry.self.addr;
    bool found = options->local_addr[0] != '\0';
    if (node->contact == TDDP_LAUNCH_SILENT) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s at %s answers again",
                                node->meets, node->where);
    }
    /* If none is given: the address of this node on the way to where the nodes meet. */
    for (int i = 0; i < options->endpoint_count && !found; i++) {
        found = tddp_launch_address_of(options->endpoints[i].host, true, NULL, addr) == TDDP_OK;
    }
    if (!found) {
        (void)snprintf(addr, sizeof node->entry.self.addr, "%s", tddp_net_loopback());
    }
    tddp_launch_view_free(&node->view);
    tddp_bytes_free(&node->put);
    node->viewed = node->followed = false;
    node->contact = TDDP_LAUNCH_CONNECTED;
    node->heard_ns = tddp_now_ns();
    tddp_launch_node_begin_search(node);
}

tddp_status tddp_launch_node_search(tddp_launch_node *node)
{
    char problem[TDDP_LAUNCH_WHY_BYTES] = "";
    int64_t read_ms = node->started ? node->link.times.read_ms
                                    : (int64_t)node->link.options->conf.read_timeout * 1000;
    tddp_status status = node->started || node->link.server ? TDDP_OK : serve(node, problem);
    if (status == TDDP_OK) {
        status = node->link.backend->connect(&node->link, read_ms < REACH_MS ? read_ms : REACH_MS);
    }
    if (status == TDDP_OK) {
        be_connected(node);
    }
    if (status == TDDP_OK || status == TDDP_CANCELED) {
        return status;
    }
    if (problem[0] || is_permanent(node, status)) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s",
                                problem[0] ? problem : tddp_error_message());
        return TDDP_OK;
    }
    go_on(node);
    int64_t pause_ms = PAUSE_MS + (tddp_now_ns() - node->alone_ns) / TDDP_NS_PER_MS;
    int64_t most_ms = node->started ? SHORT_PAUSE_MS : MOST_PAUSE_MS;
    return node->over
               ? TDDP_OK
               : tddp_net_sleep(tddp_deadline_after_ms(pause_ms < most_ms ? pause_ms : most_ms),
                                tddp_cancel_fd(node->link.cancel));
}
