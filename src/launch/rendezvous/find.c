/*
 * The way to where the nodes meet: tried again and again until it is there, or time is over, with a
 * line now and then. What becomes of a round meanwhile: where certainly nobody is any more the host
 * has taken the job along; silence alone ends nothing, unless the job is elastic and the others
 * have gone on by now. Runs on the rendezvous thread.
 */
#include <stdio.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    REACH_MS = 2 * 1000, /* for one attempt */
    FIRST_PAUSE_MS = 20,
    LAST_PAUSE_MS = 400,
    EARLIER_PART =
        5, /* of the silence: a node that is cut off ends its workers before others begin */
    SHORT_PAUSE_MS = 100, /* of a node that the others may count as lost */
    RETURN_MS = 5 * 1000, /* for another host where the last one has ended */
    HOST_EVERY_MS = 1500, /* to see whether the endpoint's port has become free */
    TRIED_BYTES = TDDP_LAUNCH_MAX_ENDPOINTS * (TDDP_LAUNCH_HOST_BYTES + 16) + TDDP_LAUNCH_WHY_BYTES,
};

/* One search. */
typedef struct search {
    int64_t deadline; /* INT64_MAX: none, as long as workers run */
    int64_t host_at;
    bool gone;   /* nobody is there any more, and the agent knows */
    bool silent; /* nobody answers, and the agent knows */
} search;

/* "a:2379, b:2379 (Connection refused)". */
static const char *describe_tried(const tddp_launch_node *node, const char *why,
                                  char text[TRIED_BYTES])
{
    size_t used = 0;
    for (int i = 0; i < node->options->endpoint_count && used < TRIED_BYTES; i++) {
        char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
        tddp_launch_endpoint_text(&node->options->endpoints[i], endpoint, sizeof endpoint);
        used += (size_t)snprintf(text + used, TRIED_BYTES - used, "%s%s", i ? ", " : "", endpoint);
    }
    if (used < TRIED_BYTES) {
        (void)snprintf(text + used, TRIED_BYTES - used, " (%s)", why);
    }
    return text;
}

/* Whether another try would be as vain: another secret, say, or no store at all. A node that was in
 * the job knows that it may be otherwise. */
static bool is_permanent(const tddp_launch_node *node, tddp_status status)
{
    return status == TDDP_OUT_OF_MEMORY || status == TDDP_UNAVAILABLE ||
           (!node->was_in && (status == TDDP_STORE || status == TDDP_PROTOCOL ||
                              status == TDDP_INVALID_ARGUMENT || status == TDDP_UNSUPPORTED));
}

static void give_up(tddp_launch_node *node, const char *why)
{
    char tried[TRIED_BYTES];
    bool etcd = node->link.backend->survives;
    if (node->was_in) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s is lost: %s%s",
                                node->meets, why,
                                etcd ? "" : "; a job with --rdzv-backend=etcd survives that");
        return;
    }
    tddp_launch_node_notify(
        node, TDDP_LAUNCH_NOTIFICATION_ERROR,
        "no torchrun leads the job \"%s\" within %d s: tried %s; check that %s, and that all nodes "
        "have the same --rdzv-endpoint and --rdzv-id, or raise --rdzv-conf join_timeout",
        node->run_id, node->options->conf.join_timeout, describe_tried(node, why, tried),
        etcd ? "etcd answers there"
             : "torchrun runs there (with --rdzv-conf is_host=1 if that host knows itself by "
               "another address)");
}

/* A line now and then. */
static void report_search(tddp_launch_node *node, const char *why)
{
    char tried[TRIED_BYTES];
    if (tddp_now_ns() >= node->report_at) {
        node->report_at = tddp_deadline_after_ms(node->times.report_ms);
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS,
                                "looking for who leads the job \"%s\": tried %s", node->run_id,
                                describe_tried(node, why, tried));
    }
}

/* --- a connection that is lost --------------------------------------------------------------- */

/* Nobody is there: who served the store has ended, and took the job along. An elastic one begins
 * anew, with this node as a newcomer, if another host comes in a moment. */
static void note_gone(tddp_launch_node *node, search *s)
{
    char text[sizeof node->meets + sizeof node->link.why + 16];
    if (s->gone) {
        return;
    }
    s->gone = true;
    s->deadline = tddp_deadline_after_ms(tddp_launch_is_elastic(node->options) ? RETURN_MS : 0);
    (void)snprintf(text, sizeof text, "%s is lost: %s", node->meets, node->link.why);
    tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, text);
    node->entry.round = node->entry.rank = node->entry.ready = -1;
    node->entry.done = node->entry.failed = node->entry.master_round = -1;
}

/* Nobody answers. Workers that run go on, but in an elastic job not beside those of a round that
 * the others have begun by now. */
static void note_silent(tddp_launch_node *node, search *s)
{
    char text[sizeof node->meets + 96];
    int64_t silence_ms = (tddp_now_ns() - node->heard_ns) / TDDP_NS_PER_MS;
    int64_t limit_ms = node->times.silence_ms - node->times.silence_ms / EARLIER_PART;
    bool elastic = tddp_launch_is_elastic(node->options);
    if (!s->silent && silence_ms >= REACH_MS) {
        s->silent = true;
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s does not answer: %s",
                                node->meets, node->link.why);
    }
    if (elastic && node->part != TDDP_LAUNCH_AWAITING && silence_ms >= limit_ms) {
        (void)snprintf(text, sizeof text,
                       "%s has not answered for %lld s: the other nodes go on without this one",
                       node->meets, (long long)(silence_ms / 1000));
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, text);
    }
    if (node->part != TDDP_LAUNCH_AWAITING && node->entry.done != node->entry.round) {
        s->deadline = INT64_MAX;
    } else if (s->deadline == INT64_MAX) {
        s->deadline = tddp_deadline_after_ms(node->times.join_ms);
    }
}

/* A worker has failed here while nobody answers: the round is over without the others' consent, and
 * without a restart left nothing comes after it. */
static void note_failure(tddp_launch_node *node)
{
    bool failed = node->report_failure_at != INT64_MAX || node->entry.failed == node->entry.round;
    if (node->part != TDDP_LAUNCH_WORKING || !failed) {
        return;
    }
    node->entry.failed = node->entry.round;
    node->entry_changed = true;
    if (node->world.restart >= node->options->max_restarts) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ENDED, "%s", node->entry.text);
    } else {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_FAILED, node->entry.text);
    }
}

/* --- the search ------------------------------------------------------------------------------ */

/* How long one attempt may take. */
static int64_t attempt_ms(const tddp_launch_node *node)
{
    int64_t read_ms = (int64_t)node->options->conf.read_timeout * 1000;
    int64_t most_ms = read_ms < REACH_MS ? read_ms : REACH_MS;
    return node->was_in && node->times.read_ms < most_ms ? node->times.read_ms : most_ms;
}

/* What follows from an attempt in vain. */
static void go_on(tddp_launch_node *node, search *s)
{
    const char *why = node->link.why;
    if (node->was_in && node->link.refused) {
        note_gone(node, s);
    } else if (node->was_in && !s->gone) {
        note_silent(node, s);
    }
    note_failure(node);
    if (!node->over && tddp_now_ns() >= s->deadline) {
        give_up(node, why);
    }
    if (!node->over && tddp_now_ns() >= s->host_at) {
        s->host_at = tddp_deadline_after_ms(HOST_EVERY_MS);
        if (!node->was_in && tddp_launch_node_host(node, false) != TDDP_OK) {
            tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s",
                                    tddp_error_message());
        }
    }
    if (!node->over && node->part == TDDP_LAUNCH_AWAITING) {
        report_search(node, why);
    }
}

/* The address of this node on the way to where the nodes meet. */
static void find_address(tddp_launch_node *node)
{
    char *addr = node->entry.self.addr;
    tddp_status status = TDDP_SYSTEM;
    for (int i = 0; i < node->options->endpoint_count && status != TDDP_OK; i++) {
        status = tddp_launch_address_towards(node->options->endpoints[i].host, NULL, addr);
    }
    if (status != TDDP_OK) {
        (void)snprintf(addr, sizeof node->entry.self.addr, "%s", tddp_net_loopback());
    }
}

static void be_connected(tddp_launch_node *node, const search *s)
{
    if (s->silent) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s answers again",
                                node->meets);
    }
    if (node->options->local_addr[0] == '\0') {
        find_address(node);
    }
    tddp_launch_view_free(&node->view);
    node->viewed = false;
    node->entry_changed = true;
    node->lead_at = 0;
    node->heard_ns = node->began_ns = tddp_now_ns();
    node->report_at = tddp_deadline_after_ms(node->times.report_ms);
}

bool tddp_launch_node_connect(tddp_launch_node *node)
{
    int64_t pause_ms = FIRST_PAUSE_MS;
    search s = {
        .deadline = tddp_deadline_after_ms(node->times.join_ms),
        .host_at = tddp_deadline_after_ms(HOST_EVERY_MS),
    };
    node->report_at = tddp_deadline_after_ms(node->times.report_ms);
    while (!node->over && !node->leave && !node->quit) {
        tddp_status status = node->link.backend->connect(&node->link, attempt_ms(node));
        if (status == TDDP_OK) {
            be_connected(node, &s);
            return true;
        }
        if (is_permanent(node, status)) {
            tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s",
                                    tddp_error_message());
        } else if (status != TDDP_CANCELED) {
            go_on(node, &s);
        }
        if (!node->over &&
            (status == TDDP_CANCELED || tddp_net_sleep(tddp_deadline_after_ms(pause_ms),
                                                       tddp_cancel_fd(node->cancel)) != TDDP_OK)) {
            (void)tddp_launch_node_take_requests(node);
        }
        int64_t longest_ms = node->was_in ? SHORT_PAUSE_MS : LAST_PAUSE_MS;
        pause_ms = pause_ms * 2 < longest_ms ? pause_ms * 2 : longest_ms;
    }
    node->over = true;
    return false;
}

void tddp_launch_node_await_leader(tddp_launch_node *node)
{
    char why[TDDP_LAUNCH_WHY_BYTES];
    (void)snprintf(why, sizeof why, "nobody leads the job \"%.80s\" there", node->run_id);
    if (node->part == TDDP_LAUNCH_AWAITING &&
        tddp_now_ns() >= tddp_deadline_from(node->began_ns, node->times.join_ms)) {
        give_up(node, why);
    } else {
        report_search(node, why);
    }
}
