/*
 * A node and its coordinator: taking a slot at one, and what becomes of the round when the
 * connection to it is lost. One that is known to be gone is lost at once, a silent one after
 * times.silence_ms. The same coordinator found again before goes on with this node as if nothing
 * had been; another one begins with a new slot and a new round. Where the rendezvous survives its
 * coordinator (etcd) the node looks for the next one; else there is no other: its silence costs the
 * job a restart, and the node waits for its return; without a restart left, or if it is gone, the
 * job is over for the node. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "net/net.h"

/* --local-addr may be a name. */
tddp_status tddp_launch_node_find_address(tddp_launch_node *node)
{
    const char *given = node->options->local_addr;
    return given ? tddp_launch_address_of(given, node->cancel, node->self.addr) : TDDP_OK;
}

/* The address of this node on the way to where the nodes meet. */
static tddp_status address_towards_endpoints(tddp_launch_node *node)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; i < node->options->endpoint_count; i++) {
        status = tddp_launch_address_towards(node->options->endpoints[i].host, node->cancel,
                                             node->self.addr);
        if (status == TDDP_OK || status == TDDP_CANCELED) {
            return status;
        }
    }
    return status;
}

/* What the coordinator is to know of this node, at this leader. */
static void describe(tddp_launch_node *node)
{
    tddp_launch_joiner *self = &node->self;
    tddp_status status;
    self->hosting = node->leader.own;
    do {
        status = node->options->local_addr ? TDDP_OK : address_towards_endpoints(node);
    } while (status == TDDP_CANCELED && tddp_launch_node_take_orders(node));
    if (status != TDDP_OK) {
        (void)snprintf(self->addr, sizeof self->addr, "%s", tddp_net_loopback());
    }
}

tddp_status tddp_launch_node_join(tddp_launch_node *node)
{
    int slot;
    int next_message;
    describe(node);
    tddp_status status = node->backend->take_slot(node, &slot, &next_message);
    if (status != TDDP_OK) {
        return status;
    }
    node->next_message = next_message;
    node->ready_told = false;
    node->beat_at = tddp_deadline_after_ms(node->times.beat_ms);
    tddp_launch_event event = {.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = slot, .joiner = node->self};
    status = tddp_launch_node_push(node, &event);
    if (status == TDDP_OK) {
        node->slot = slot;
        node->was_in = true;
        node->last_term = node->leader.term;
        node->heard_ns = tddp_now_ns();
    }
    return status;
}

/* --- a leader whose connection is lost ------------------------------------------------------- */

enum { NAME_BYTES = TDDP_LAUNCH_HOST_BYTES + 80 };

/* What is said of a lost one; `reason`: NULL if it is silent. free() it; NULL if memory is short.
 */
static char *describe_loss(const tddp_launch_node *node, const char *reason)
{
    char name[NAME_BYTES];
    char silence[32];
    char given_up[128] = "";
    int64_t silence_ms = (tddp_now_ns() - node->heard_ns) / TDDP_NS_PER_MS;
    node->backend->name(node, name, sizeof name);
    (void)snprintf(silence, sizeof silence, "no answer for %lld s",
                   (long long)((silence_ms + 500) / 1000));
    if (reason && silence_ms >= node->times.silence_ms - 2 * node->times.margin_ms) {
        /* This torchrun was stopped, say: no loss of the other's. */
        (void)snprintf(given_up, sizeof given_up,
                       "; this node gave no sign of life for %lld s before, so that it counted as "
                       "lost there",
                       (long long)((silence_ms + 500) / 1000));
    }
    return tddp_format("%s is lost: %s%s%s", name, reason ? reason : silence, given_up,
                       node->backend->survives ? ""
                                               : "; a job with --rdzv-backend=etcd survives that");
}

/* Whether waiting for a silent host makes sense: no round runs, or it may be run again. */
static bool may_wait(const tddp_launch_node *node)
{
    return node->stage == TDDP_LAUNCH_AWAITING || node->world.restart < node->options->max_restarts;
}

/* Ends the round here for a reason that costs a restart; the coordinator is told once it is back.
 */
static void abandon_round(tddp_launch_node *node, const char *text)
{
    if (node->stage != TDDP_LAUNCH_AWAITING) {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_FAILED, text);
        node->orders.failed = true;
        (void)snprintf(node->orders.failure, sizeof node->orders.failure, "%s", text);
        node->report_failure_at = tddp_now_ns();
    }
}

/* The leader was silent for too long, or is gone. */
static tddp_status survive_loss(tddp_launch_node *node, bool gone, const char *text,
                                tddp_launch_leader *out, tddp_launch_message *end)
{
    tddp_launch_search search = {.limit_ms = node->times.join_ms};
    if (node->backend->survives) {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, text);
        node->slot = 0; /* also where it is the same leader that is found: it joins again */
        return tddp_launch_find_leader(node, &search, out, end);
    }
    if (gone || !may_wait(node)) {
        return tddp_fail(TDDP_TIMEOUT, "%s", text);
    }
    abandon_round(node, text);
    search.lost = true;
    search.gone_ms = node->times.return_ms;
    tddp_status status = tddp_launch_find_leader(node, &search, out, end);
    return status == TDDP_TIMEOUT && search.gone ? tddp_fail(status, "%s", text) : status;
}

/* Finds the leader again whose connection was lost, or the next one. `text` is what is said of it
 * if it is gone. */
static tddp_status find_again(tddp_launch_node *node, int64_t last_term, const char *text,
                              tddp_launch_leader *out, tddp_launch_message *end)
{
    const tddp_launch_times *times = &node->times;
    int64_t limit_ms = times->silence_ms - 2 * times->margin_ms -
                       (tddp_now_ns() - node->heard_ns) / TDDP_NS_PER_MS;
    char name[NAME_BYTES];
    char line[NAME_BYTES + 80];
    node->backend->name(node, name, sizeof name);
    (void)snprintf(line, sizeof line, "%s does not answer; after %lld s it counts as lost", name,
                   (long long)((times->silence_ms + 999) / 1000));
    tddp_launch_search search = {
        /* A node that was stopped itself finds the leader first. */
        .limit_ms = limit_ms > times->return_ms ? limit_ms : times->return_ms,
        .exact = true,
        .lost = true,
        .gone_ms = node->backend->survives ? 0 : times->return_ms,
        .line = line,
    };
    tddp_status status = tddp_launch_find_leader(node, &search, out, end);
    if (status == TDDP_TIMEOUT && search.gone) {
        return survive_loss(node, true, text, out, end);
    }
    if (status == TDDP_TIMEOUT) {
        char *silent = describe_loss(node, NULL);
        status = silent ? survive_loss(node, false, silent, out, end) : TDDP_OUT_OF_MEMORY;
        free(silent);
    } else if (status == TDDP_OK && search.reported && out->term == last_term) {
        (void)snprintf(line, sizeof line, "%s answers again", name);
        tddp_launch_node_send_notification(node, TDDP_LAUNCH_NOTIFICATION_STATUS, line);
    }
    return status;
}

bool tddp_launch_node_seek(tddp_launch_node *node, const char *reason)
{
    int64_t last_term = node->leader.term;
    tddp_launch_leader found;
    tddp_launch_message end = {0};
    tddp_launch_search search = {.limit_ms = node->times.join_ms};
    char *text = reason ? describe_loss(node, reason) : NULL;
    tddp_launch_leader_forget(node, &node->leader);
    tddp_status status = !reason ? tddp_launch_find_leader(node, &search, &found, &end)
                         : text  ? find_again(node, last_term, text, &found, &end)
                                 : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_NOT_FOUND) {
        tddp_launch_node_take_end(node, &end);
    } else if (status == TDDP_CANCELED) {
        node->over = true;
    } else if (status != TDDP_OK) {
        tddp_launch_node_give_up(node, tddp_error_message());
    } else {
        node->leader = found;
        if (!reason || found.term != last_term) {
            tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, text ? text : "");
            node->slot = 0;
        }
    }
    free(text);
    tddp_launch_message_free(&end);
    return !node->over;
}
