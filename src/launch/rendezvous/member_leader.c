/*
 * A node and its leader: taking a slot at one, and what becomes of the round when the connection to
 * it is lost. A leader whose host answers that nobody leads there is lost at once, a silent one
 * after times.silence_ms. The same leader found again before goes on with this node as if nothing
 * had been; another one begins with a new slot and a new round. With one endpoint there is no other
 * leader: its silence costs the job a restart, and the node waits for its return; without a restart
 * left, or if it is gone, the job is over for the node. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"

bool tddp_launch_node_hosts_leader(const tddp_launch_node *node)
{
    return node->host && node->leader.endpoint == node->hosted;
}

/* --local-addr may be a name. */
tddp_status tddp_launch_node_find_address(tddp_launch_node *node)
{
    const char *given = node->options->local_addr;
    return given ? tddp_launch_address_of(given, node->cancel, node->self.addr) : TDDP_OK;
}

/* What the coordinator is to know of this node, at this leader. */
static void describe(tddp_launch_node *node)
{
    tddp_launch_joiner *self = &node->self;
    const char *leader = node->endpoints[node->leader.endpoint].host;
    tddp_status status;
    self->hosting = tddp_launch_node_hosts_leader(node);
    do {
        status = node->options->local_addr
                     ? TDDP_OK
                     : tddp_launch_address_towards(leader, node->cancel, self->addr);
    } while (status == TDDP_CANCELED && tddp_launch_node_obey(node));
    if (status != TDDP_OK) {
        (void)snprintf(self->addr, sizeof self->addr, "127.0.0.1");
    }
}

/* How many messages there have been: the past. */
static tddp_status count_messages(tddp_launch_node *node, int64_t *count)
{
    tddp_slice messages = tddp_launch_slice("messages");
    tddp_wait wait = tddp_launch_answer_wait(node);
    tddp_blob value;
    int there;
    *count = 0;
    tddp_status status = tddp_store_check(node->leader.store, &messages, 1, &wait, &there);
    if (status == TDDP_OK && there) {
        status = tddp_store_get(node->leader.store, messages, &wait, &value);
        if (status == TDDP_OK) {
            if (!tddp_parse_int(value.data, 0, INT32_MAX - 1, count)) {
                status =
                    tddp_fail(TDDP_PROTOCOL, "the leader counts \"%.32s\" messages", value.data);
            }
            tddp_blob_free(&value);
        }
    }
    return status;
}

tddp_status tddp_launch_node_enlist(tddp_launch_node *node)
{
    int64_t slot;
    int64_t messages;
    tddp_wait wait = tddp_launch_answer_wait(node);
    describe(node);
    tddp_status status =
        tddp_store_add(node->leader.store, tddp_launch_slice("joiners"), 1, &wait, &slot);
    if (status == TDDP_OK) {
        status = count_messages(node, &messages);
    }
    if (status != TDDP_OK) {
        return status;
    }
    node->next_message = (int)messages + 1;
    node->ready_told = false;
    node->beat_at = tddp_deadline_after_ms(node->times.beat_ms);
    tddp_launch_event event = {
        .kind = TDDP_LAUNCH_EVENT_JOIN, .slot = (int)slot, .joiner = node->self};
    status = tddp_launch_node_push(node, &event);
    if (status == TDDP_OK) {
        node->slot = (int)slot;
        node->was_in = true;
        node->heard_ns = tddp_now_ns();
    }
    return status;
}

/* --- a leader whose connection is lost ------------------------------------------------------- */

enum { HOST_TEXT_BYTES = TDDP_LAUNCH_HOST_BYTES + 80 };

/* "the torchrun that hosts the rendezvous at HOST:PORT". */
static void name_host(const tddp_launch_node *node, const tddp_launch_leader *leader,
                      char text[HOST_TEXT_BYTES])
{
    const tddp_launch_endpoint *endpoint = &node->endpoints[leader->endpoint];
    bool bare = strchr(endpoint->host, ':') != NULL;
    (void)snprintf(text, HOST_TEXT_BYTES, "the torchrun that hosts the rendezvous at %s%s%s:%d",
                   bare ? "[" : "", endpoint->host, bare ? "]" : "", endpoint->port);
}

/* What is said of a lost one; `reason`: NULL if it is silent. free() it; NULL if memory is short.
 */
static char *describe_loss(const tddp_launch_node *node, const tddp_launch_leader *leader,
                           const char *reason)
{
    char host[HOST_TEXT_BYTES];
    char silence[32];
    int64_t silence_ms = (tddp_now_ns() - node->heard_ns) / TDDP_NS_PER_MS;
    name_host(node, leader, host);
    (void)snprintf(silence, sizeof silence, "no answer for %lld s",
                   (long long)((silence_ms + 500) / 1000));
    return tddp_format("%s is lost: %s%s", host, reason ? reason : silence,
                       node->endpoint_count > 1
                           ? ""
                           : "; a job with three endpoints (--rdzv-endpoint=a,b,c) survives that");
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
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NEWS_FAILED, text);
        node->orders.failed = true;
        (void)snprintf(node->orders.failure, sizeof node->orders.failure, "%s", text);
        node->report_failure_at = tddp_now_ns();
    }
}

/* The leader was silent for too long, or is gone. */
static tddp_status outlive_loss(tddp_launch_node *node, const tddp_launch_leader *last, bool gone,
                                const char *text, tddp_launch_leader *out, tddp_launch_message *end)
{
    tddp_launch_search search = {.limit_ms = node->times.join_ms, .lost = -1};
    if (node->endpoint_count > 1) {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NEWS_CHANGED, text);
        return tddp_launch_find_leader(node, &search, out, end);
    }
    if (gone || !may_wait(node)) {
        return tddp_fail(TDDP_TIMEOUT, "%s", text);
    }
    abandon_round(node, text);
    search.lost = last->endpoint;
    search.gone_ms = node->times.return_ms;
    tddp_status status = tddp_launch_find_leader(node, &search, out, end);
    return status == TDDP_TIMEOUT && search.gone ? tddp_fail(status, "%s", text) : status;
}

/* Finds the leader again whose connection was lost, or the next one. `text` is what is said of it
 * if it is gone. */
static tddp_status find_again(tddp_launch_node *node, const tddp_launch_leader *last,
                              const char *text, tddp_launch_leader *out, tddp_launch_message *end)
{
    const tddp_launch_times *times = &node->times;
    int64_t limit_ms = times->silence_ms - 2 * times->margin_ms -
                       (tddp_now_ns() - node->heard_ns) / TDDP_NS_PER_MS;
    char host[HOST_TEXT_BYTES];
    char line[HOST_TEXT_BYTES + 80];
    name_host(node, last, host);
    (void)snprintf(line, sizeof line, "%s does not answer; after %lld s it counts as lost", host,
                   (long long)((times->silence_ms + 999) / 1000));
    tddp_launch_search search = {
        /* A node that was stopped itself finds the leader first. */
        .limit_ms = limit_ms > times->return_ms ? limit_ms : times->return_ms,
        .exact = true,
        .lost = last->endpoint,
        .gone_ms = node->endpoint_count == 1 ? times->return_ms : 0,
        .line = line,
    };
    tddp_status status = tddp_launch_find_leader(node, &search, out, end);
    if (status == TDDP_TIMEOUT && search.gone) {
        return outlive_loss(node, last, true, text, out, end);
    }
    if (status == TDDP_TIMEOUT) {
        char *silent = describe_loss(node, last, NULL);
        status = silent ? outlive_loss(node, last, false, silent, out, end) : TDDP_OUT_OF_MEMORY;
        free(silent);
    } else if (status == TDDP_OK && search.reported && out->endpoint == last->endpoint &&
               out->term == last->term) {
        (void)snprintf(line, sizeof line, "%s answers again", host);
        tddp_launch_node_send_news(node, TDDP_LAUNCH_NEWS_STATUS, line);
    }
    return status;
}

bool tddp_launch_node_seek(tddp_launch_node *node, const char *reason)
{
    tddp_launch_leader last = node->leader;
    tddp_launch_leader found;
    tddp_launch_message end = {0};
    tddp_launch_search search = {.limit_ms = node->times.join_ms, .lost = -1};
    char *text = reason ? describe_loss(node, &last, reason) : NULL;
    tddp_launch_leader_forget(&node->leader);
    tddp_status status = !reason ? tddp_launch_find_leader(node, &search, &found, &end)
                         : text  ? find_again(node, &last, text, &found, &end)
                                 : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_NOT_FOUND) {
        tddp_launch_node_take_end(node, &end);
    } else if (status == TDDP_CANCELED) {
        node->over = true;
    } else if (status != TDDP_OK) {
        tddp_launch_node_give_up(node, tddp_error_message());
    } else {
        node->leader = found;
        if (!reason || found.endpoint != last.endpoint || found.term != last.term) {
            tddp_launch_node_round_over(node, TDDP_LAUNCH_NEWS_CHANGED, text ? text : "");
            node->slot = 0;
        }
    }
    free(text);
    tddp_launch_message_free(&end);
    return !node->over;
}
