/*
 * A node and its leader: taking a slot at one, and what becomes of the round when the leader is
 * lost. The same leader found again goes on with this node as if nothing had been; another one
 * begins with a new slot and a new round. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"

/* For the only leader there can be, to be back. */
enum { RETURN_MS = 1000 };

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

/* What the council is to know of this node, at this leader. */
static void describe(tddp_launch_node *node)
{
    tddp_launch_comer *self = &node->self;
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

/* How many words there have been: the past. */
static tddp_status count_words(tddp_launch_node *node, int64_t *count)
{
    tddp_slice words = tddp_launch_slice("words");
    tddp_wait wait = tddp_launch_answer_wait(node);
    tddp_blob value;
    int there;
    *count = 0;
    tddp_status status = tddp_store_check(node->leader.store, &words, 1, &wait, &there);
    if (status == TDDP_OK && there) {
        status = tddp_store_get(node->leader.store, words, &wait, &value);
        if (status == TDDP_OK) {
            if (!tddp_parse_int(value.data, 0, INT32_MAX - 1, count)) {
                status = tddp_fail(TDDP_PROTOCOL, "the leader counts \"%.32s\" words", value.data);
            }
            tddp_blob_free(&value);
        }
    }
    return status;
}

tddp_status tddp_launch_node_enlist(tddp_launch_node *node)
{
    int64_t slot;
    int64_t words;
    tddp_wait wait = tddp_launch_answer_wait(node);
    describe(node);
    tddp_status status =
        tddp_store_add(node->leader.store, tddp_launch_slice("comers"), 1, &wait, &slot);
    if (status == TDDP_OK) {
        status = count_words(node, &words);
    }
    if (status != TDDP_OK) {
        return status;
    }
    node->next_word = (int)words + 1;
    node->ready_told = false;
    node->beat_at = tddp_deadline_after_ms(TDDP_LAUNCH_BEAT_MS);
    tddp_launch_event event = {
        .kind = TDDP_LAUNCH_EVENT_JOIN, .slot = (int)slot, .comer = node->self};
    status = tddp_launch_node_push(node, &event);
    if (status == TDDP_OK) {
        node->slot = (int)slot;
        node->was_in = true;
        node->heard_ns = tddp_now_ns();
    }
    return status;
}

/* Finds a leader, the first or the next one; false if there is none for this node. */
bool tddp_launch_node_seek(tddp_launch_node *node, const char *lost)
{
    tddp_launch_leader last = node->leader;
    tddp_launch_leader found;
    tddp_launch_word end = {0};
    bool only = lost && node->endpoint_count == 1;
    int64_t limit = only ? RETURN_MS : (int64_t)node->options->conf.join_timeout * 1000;
    tddp_launch_leader_forget(&node->leader);
    tddp_status status = tddp_launch_find_leader(node, lost && !only ? 0 : limit, &found, &end);
    if (status == TDDP_TIMEOUT && lost && !only) {
        tddp_launch_node_round_over(node, TDDP_LAUNCH_NEWS_CHANGED, lost);
        status = tddp_launch_find_leader(node, limit, &found, &end);
    }
    if (status == TDDP_NOT_FOUND) {
        tddp_launch_node_take_end(node, &end);
    } else if (status == TDDP_CANCELED) {
        node->over = true;
    } else if (status != TDDP_OK) {
        tddp_launch_node_give_up(node, only ? lost : tddp_error_message());
    } else {
        node->leader = found;
        if (!lost || found.endpoint != last.endpoint || found.term != last.term) {
            tddp_launch_node_round_over(node, TDDP_LAUNCH_NEWS_CHANGED, lost ? lost : "");
            node->slot = 0;
        }
    }
    tddp_launch_word_free(&end);
    return !node->over;
}

/* What is said of a leader that is lost, for the reason in tddp_error_message(). free() it. */
char *tddp_launch_node_describe_loss(const tddp_launch_node *node)
{
    const tddp_launch_endpoint *endpoint = &node->endpoints[node->leader.endpoint];
    bool bare = strchr(endpoint->host, ':') != NULL;
    int64_t silence_ns = tddp_now_ns() - node->heard_ns;
    bool silent =
        silence_ns >= (int64_t)node->options->conf.heartbeat_timeout * TDDP_NS_PER_MS * 1000;
    char reason[32];
    (void)snprintf(reason, sizeof reason, "no answer for %lld s",
                   (long long)(silence_ns / TDDP_NS_PER_MS / 1000));
    return tddp_format("the torchrun that hosts the rendezvous at %s%s%s:%d is lost: %s%s",
                       bare ? "[" : "", endpoint->host, bare ? "]" : "", endpoint->port,
                       node->heard_ns && silent ? reason : tddp_error_message(),
                       node->endpoint_count > 1
                           ? ""
                           : "; a job with three endpoints (--rdzv-endpoint=a,b,c) survives that");
}
