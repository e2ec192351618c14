/*
 * When a round may start, which rank each node has in it, and how it ends. Called by coordinator.c
 * alone. A started round has every member in it once, with ranks 0 to count - 1.
 */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

tddp_launch_counts tddp_launch_coordinator_count(const tddp_launch_coordinator *c)
{
    tddp_launch_counts counts = {0};
    for (int i = 0; i < c->count; i++) {
        const tddp_launch_participant *node = &c->nodes[i];
        bool member = node->status == TDDP_LAUNCH_MEMBER;
        bool here = member && node->missing_ns == 0;
        counts.members += member;
        counts.here += here;
        counts.ready += here && tddp_launch_participant_ready(node);
        counts.undone += member && node->entry.done != c->doc.round;
    }
    return counts;
}

bool tddp_launch_coordinator_passed(tddp_launch_coordinator *c, int64_t since_ns, int64_t ms)
{
    int64_t at = tddp_deadline_from(since_ns, ms);
    if (c->now_ns < at && at < c->due_ns) {
        c->due_ns = at;
    }
    return c->now_ns >= at;
}

/* --- ranks ----------------------------------------------------------------------------------- */

/* The rank that a node asked for, else had, else, if it hosts the store, 0; -1: any. */
static int wanted_rank(const tddp_launch_participant *node)
{
    int asked = node->entry.self.node_rank;
    return asked >= 0 ? asked : node->rank < 0 && node->entry.self.hosting ? 0 : node->rank;
}

bool tddp_launch_coordinator_has_rank(const tddp_launch_coordinator *c, int rank)
{
    bool has = false;
    for (int i = 0; i < c->count && !has; i++) {
        has = c->nodes[i].status == TDDP_LAUNCH_MEMBER && wanted_rank(&c->nodes[i]) == rank;
    }
    return has;
}

/* Where a node stands among those that may have a rank: the least gets it. `late`: what it wants is
 * another's, so any will do: the host comes first, then nodes that asked for one. */
static int precedence(const tddp_launch_coordinator *c, const tddp_launch_participant *node,
                      int rank, bool late)
{
    int asked = node->entry.self.node_rank;
    if (late) {
        return node->entry.self.hosting ? -1 : asked >= 0 ? asked : INT_MAX - 1;
    }
    return wanted_rank(node) != rank     ? INT_MAX
           : asked >= 0                  ? 0
           : node->round == c->doc.round ? 1
                                         : 2;
}

/* The member without a rank yet that gets this one; NULL: none wants it. */
static tddp_launch_participant *holder_of(const tddp_launch_coordinator *c,
                                          const tddp_launch_member *members, int count, int rank,
                                          bool late)
{
    tddp_launch_participant *first = NULL;
    int least = INT_MAX;
    for (int i = 0; i < c->count; i++) {
        tddp_launch_participant *node = &c->nodes[i];
        int its = precedence(c, node, rank, late);
        bool holds = node->rank >= 0 && node->rank < count &&
                     strcmp(members[node->rank].id, node->entry.self.id) == 0;
        if (node->status == TDDP_LAUNCH_MEMBER && !holds && its < least) {
            first = node;
            least = its;
        }
    }
    return first;
}

/* --- starts ---------------------------------------------------------------------------------- */

static void start(tddp_launch_coordinator *c, int count)
{
    tddp_launch_state *doc = &c->doc;
    tddp_launch_member *members = tddp_alloc_array((size_t)count, sizeof *members);
    if (!members) {
        c->status = TDDP_OUT_OF_MEMORY;
        return;
    }
    for (int turn = 0; turn < 2 * count; turn++) { /* what is wanted, then what is left */
        int rank = turn % count;
        tddp_launch_participant *node =
            members[rank].id[0] ? NULL : holder_of(c, members, count, rank, turn >= count);
        if (node) {
            members[rank] = node->entry.self;
            node->rank = rank;
            node->round = doc->round + 1;
        }
    }
    free(doc->members);
    doc->members = members;
    doc->count = count;
    doc->round++;
    doc->generation++;
    doc->stage = TDDP_LAUNCH_STAGE_RUNNING;
    doc->master_port = 0;
    c->enough_ns = 0;
}

/* Rule 1. */
static bool may_start(tddp_launch_coordinator *c, tddp_launch_counts counts)
{
    const tddp_launch_times *times = c->opts.times;
    bool enough = counts.ready >= c->needed;
    c->enough_ns = !enough ? 0 : c->enough_ns ? c->enough_ns : c->now_ns;
    return enough && counts.ready == counts.members &&
           (counts.ready == c->opts.options->max_nodes ||
            tddp_launch_coordinator_passed(c, c->enough_ns, times->last_call_ms) ||
            tddp_launch_coordinator_passed(c, c->stage_ns, times->join_ms));
}

void tddp_launch_coordinator_gather(tddp_launch_coordinator *c)
{
    char text[TDDP_LAUNCH_STATUS_BYTES];
    tddp_launch_counts counts = tddp_launch_coordinator_count(c);
    if (may_start(c, counts)) {
        start(c, counts.members);
    } else if (tddp_launch_coordinator_passed(c, c->stage_ns, c->opts.times->join_ms)) {
        tddp_launch_coordinator_describe_waiting(c, true, text);
        tddp_launch_coordinator_end(c, TDDP_LAUNCH_HOW_FAILED, "%s", text);
    } else if (tddp_launch_coordinator_passed(c, c->report_ns, c->opts.times->report_ms)) {
        tddp_launch_coordinator_describe_waiting(c, false, c->doc.status);
        c->doc.report++;
        c->report_ns = c->now_ns;
        (void)tddp_launch_coordinator_passed(c, c->report_ns, c->opts.times->report_ms);
    }
}

/* --- ends ------------------------------------------------------------------------------------ */

bool tddp_launch_coordinator_is_final(const tddp_launch_coordinator *c)
{
    return !c->elastic && c->doc.restart >= c->opts.options->max_restarts;
}

void tddp_launch_coordinator_end(tddp_launch_coordinator *c, tddp_launch_how how,
                                 const char *format, ...)
{
    tddp_launch_state *doc = &c->doc;
    bool costs = how == TDDP_LAUNCH_HOW_FAILED || (how == TDDP_LAUNCH_HOW_CHANGED && !c->elastic);
    bool goes_on =
        doc->stage == TDDP_LAUNCH_STAGE_RUNNING &&
        (costs ? doc->restart < c->opts.options->max_restarts : how == TDDP_LAUNCH_HOW_CHANGED);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(doc->text, sizeof doc->text, format, arguments);
    va_end(arguments);
    doc->how = costs ? TDDP_LAUNCH_HOW_FAILED : how;
    doc->over = goes_on ? doc->round : doc->over;
    doc->restart += goes_on && costs;
    doc->stage = goes_on ? TDDP_LAUNCH_STAGE_GATHERING : TDDP_LAUNCH_STAGE_ENDED;
    c->stage_ns = c->report_ns = c->now_ns;
}
