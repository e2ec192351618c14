/*
 * The coordinator's sentences about who is here and who is missing.
 */
#include <stdio.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

const char *tddp_launch_coordinator_name(const tddp_launch_participant *node,
                                         char text[TDDP_LAUNCH_LIST_BYTES])
{
    int rank = node->rank >= 0 ? node->rank : node->entry.self.node_rank;
    char number[24] = "a node";
    if (rank >= 0) {
        (void)snprintf(number, sizeof number, "node %d", rank);
    }
    (void)snprintf(text, TDDP_LAUNCH_LIST_BYTES, "%s (%s pid %lld)", number, node->entry.self.host,
                   (long long)node->entry.self.pid);
    return text;
}

/* The members, those of them whose workers still run, or the ranks that nobody has, where all
 * members have one. */
typedef enum list_kind { MEMBERS, UNREADY, RANKS } list_kind;

/* The text of an item of a list; false: it is not in it. */
static bool describe_item(const tddp_launch_coordinator *c, list_kind kind, int index,
                          char text[TDDP_LAUNCH_LIST_BYTES])
{
    if (kind == RANKS) {
        (void)snprintf(text, TDDP_LAUNCH_LIST_BYTES, "%d", index);
        return !tddp_launch_coordinator_has_rank(c, -1) &&
               !tddp_launch_coordinator_has_rank(c, index);
    }
    const tddp_launch_participant *node = &c->nodes[index];
    (void)tddp_launch_coordinator_name(node, text);
    return node->status == TDDP_LAUNCH_MEMBER &&
           !(kind == UNREADY && tddp_launch_participant_ready(node));
}

/* Returns how many are listed; what does not fit is cut, with dots. */
static int list(const tddp_launch_coordinator *c, list_kind kind, char text[TDDP_LAUNCH_LIST_BYTES])
{
    char item[TDDP_LAUNCH_LIST_BYTES];
    int listed = 0;
    text[0] = '\0';
    for (int i = 0; i < (kind == RANKS ? c->needed : c->count); i++) {
        if (describe_item(c, kind, i, item)) {
            tddp_add_text(text, TDDP_LAUNCH_LIST_BYTES, "%s%s", listed++ ? ", " : "", item);
        }
    }
    if (strlen(text) == TDDP_LAUNCH_LIST_BYTES - 1) {
        memcpy(text + TDDP_LAUNCH_LIST_BYTES - 5, " ...", 4);
    }
    return listed;
}

void tddp_launch_coordinator_describe_waiting(const tddp_launch_coordinator *c, bool in_vain,
                                              char text[TDDP_LAUNCH_STATUS_BYTES])
{
    char here[TDDP_LAUNCH_LIST_BYTES];
    char unready[TDDP_LAUNCH_LIST_BYTES];
    char ranks[TDDP_LAUNCH_LIST_BYTES];
    char absent[TDDP_LAUNCH_LIST_BYTES + 32] = "";
    const size_t size = TDDP_LAUNCH_STATUS_BYTES;
    const char *where = c->opts.where;
    int max = c->opts.options->max_nodes;
    int members = list(c, MEMBERS, here);
    int missing = list(c, RANKS, ranks);
    int64_t start_ns =
        tddp_deadline_from(c->enough_ns ? c->enough_ns : c->now_ns, c->opts.times->last_call_ms);
    if (missing > 0) {
        tddp_add_text(absent, sizeof absent,
                      missing > 1 ? ": node ranks %s have not come" : ": node rank %s has not come",
                      ranks);
    }
    if (members >= c->needed && list(c, UNREADY, unready) > 0) {
        (void)snprintf(text, size, "waiting at %s for the workers of %s to end%s", where, unready,
                       in_vain ? " took longer than --rdzv-conf join_timeout" : "");
    } else if (members >= c->needed && !in_vain) {
        (void)snprintf(text, size,
                       "%d of up to %d nodes have come to %s (%s); the workers start in %lld s, or "
                       "once all have come",
                       members, max, where, here,
                       (long long)((start_ns - c->now_ns + TDDP_NS_PER_S - 1) / TDDP_NS_PER_S));
    } else if (in_vain) {
        (void)snprintf(text, size,
                       "only %d of the %d nodes came to %s within %lld s%s; here: %s; check that "
                       "torchrun runs on each with the same endpoint and --rdzv-id, or raise "
                       "--rdzv-conf join_timeout",
                       members, c->needed, where, (long long)c->opts.times->join_ms / 1000, absent,
                       members > 0 ? here : "nobody");
    } else {
        (void)snprintf(text, size, "waiting at %s for %d of %s%d nodes%s; here: %s", where,
                       c->needed - members, max > c->needed ? "at least " : "", c->needed, absent,
                       members > 0 ? here : "nobody");
    }
}
