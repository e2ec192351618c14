/*
 * The coordinator's sentences about who is here and who is missing. Called by coordinator.c and
 * coordinator_nodes.c.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

/* --- lists of nodes -------------------------------------------------------------------------- */

/* Appends to a text of LIST_BYTES; what does not fit is cut, with dots. */
static void add(char *text, const char *format, ...) TDDP_PRINTF(2, 3);

static void add(char *text, const char *format, ...)
{
    size_t used = strlen(text);
    if (used + 4 >= TDDP_LAUNCH_LIST_BYTES) {
        return; /* it has its dots already */
    }
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text + used, TDDP_LAUNCH_LIST_BYTES - used, format, arguments);
    va_end(arguments);
    if (length < 0 || used + (size_t)length + 4 >= TDDP_LAUNCH_LIST_BYTES) {
        (void)snprintf(text + TDDP_LAUNCH_LIST_BYTES - 5, 5, " ...");
    }
}

const char *tddp_launch_coordinator_name(const tddp_launch_participant *node,
                                         char text[TDDP_LAUNCH_LIST_BYTES])
{
    text[0] = '\0';
    int rank = node->rank >= 0 ? node->rank : node->entry.self.node_rank;
    if (rank >= 0) {
        add(text, "node %d", rank);
    } else {
        add(text, "a node");
    }
    add(text, " (%s pid %lld)", node->entry.self.host, (long long)node->entry.self.pid);
    return text;
}

/* Who is here (`unready`: of them, whose workers still run); returns how many. */
static int list_nodes(const tddp_launch_coordinator *coordinator, bool unready, char *text)
{
    int listed = 0;
    text[0] = '\0';
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        char name[TDDP_LAUNCH_LIST_BYTES];
        if (node->status != TDDP_LAUNCH_MEMBER ||
            (unready && tddp_launch_participant_ready(node))) {
            continue;
        }
        add(text, "%s%s", listed++ ? ", " : "", tddp_launch_coordinator_name(node, name));
    }
    return listed;
}

/* Whether a rank is asked for, or else was held, by a node that is here. */
static bool has_rank(const tddp_launch_coordinator *coordinator, int rank)
{
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        int its = node->entry.self.node_rank >= 0 ? node->entry.self.node_rank : node->rank;
        if (node->status == TDDP_LAUNCH_MEMBER && its == rank) {
            return true;
        }
    }
    return false;
}

/* The ranks nobody has, where all who are here have one; else none. Returns how many. */
static int list_missing(const tddp_launch_coordinator *coordinator, char *text)
{
    int missing = 0;
    text[0] = '\0';
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        if (node->status == TDDP_LAUNCH_MEMBER && node->entry.self.node_rank < 0 &&
            node->rank < 0 && !node->entry.self.hosting) {
            return 0;
        }
    }
    for (int rank = 0; rank < tddp_launch_coordinator_needed(coordinator); rank++) {
        bool hosts = rank == 0 && coordinator->doc.round < 0 && coordinator->count > 0 &&
                     coordinator->nodes[0].entry.self.hosting &&
                     coordinator->nodes[0].entry.self.node_rank < 0;
        if (!hosts && !has_rank(coordinator, rank)) {
            add(text, "%s%d", missing++ ? ", " : "", rank);
        }
    }
    return missing;
}

/* --- sentences ------------------------------------------------------------------------------- */

/* ": node rank 1 has not come; here: node 0 (a pid 12)"; how many are here. */
static int describe_absent(const tddp_launch_coordinator *coordinator,
                           char text[2 * TDDP_LAUNCH_LIST_BYTES])
{
    char here[TDDP_LAUNCH_LIST_BYTES];
    char missing[TDDP_LAUNCH_LIST_BYTES];
    int count = list_nodes(coordinator, false, here);
    int ranks = list_missing(coordinator, missing);
    (void)snprintf(text, 2 * TDDP_LAUNCH_LIST_BYTES, "%s%.400s%s; here: %s",
                   ranks == 1  ? ": node rank "
                   : ranks > 1 ? ": node ranks "
                               : "",
                   missing,
                   ranks == 1  ? " has not come"
                   : ranks > 1 ? " have not come"
                               : "",
                   count > 0 ? here : "nobody");
    return count;
}

/* A new status line, for all nodes to show. */
static void report(tddp_launch_coordinator *coordinator, const char *format, ...) TDDP_PRINTF(2, 3);

static void report(tddp_launch_coordinator *coordinator, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(coordinator->doc.status, sizeof coordinator->doc.status, format, arguments);
    va_end(arguments);
    coordinator->doc.report++;
    coordinator->changed = true;
}

void tddp_launch_coordinator_report_waiting(tddp_launch_coordinator *coordinator)
{
    char text[2 * TDDP_LAUNCH_LIST_BYTES];
    const char *where = coordinator->opts.where;
    int max = coordinator->opts.options->max_nodes;
    int needed = tddp_launch_coordinator_needed(coordinator);
    int here = describe_absent(coordinator, text);
    if (here < needed) {
        report(coordinator, "waiting at %s for %d of %s%d nodes%s", where, needed - here,
               max > needed ? "at least " : "", needed, text);
    } else if (list_nodes(coordinator, true, text) > 0) {
        report(coordinator, "waiting at %s for the workers of %s to end", where, text);
    } else if (coordinator->enough_ns != 0) {
        int64_t start_ns =
            tddp_deadline_from(coordinator->enough_ns, coordinator->opts.times->last_call_ms);
        (void)list_nodes(coordinator, false, text);
        report(coordinator,
               "%d of up to %d nodes have come to %s (%s); the workers start in %lld s, or once "
               "all have come",
               here, max, where, text,
               (long long)((start_ns - coordinator->now_ns + TDDP_NS_PER_S - 1) / TDDP_NS_PER_S));
    }
}

void tddp_launch_coordinator_describe_missing(const tddp_launch_coordinator *coordinator,
                                              char text[TDDP_LAUNCH_TEXT_BYTES])
{
    char nodes[2 * TDDP_LAUNCH_LIST_BYTES];
    long long seconds = coordinator->opts.times->join_ms / 1000;
    int needed = tddp_launch_coordinator_needed(coordinator);
    int here = list_nodes(coordinator, false, nodes);
    if (here >= needed && list_nodes(coordinator, true, nodes) > 0) {
        (void)snprintf(text, TDDP_LAUNCH_TEXT_BYTES,
                       "the workers of %s did not end within %lld s, so no other round can start",
                       nodes, seconds);
        return;
    }
    (void)describe_absent(coordinator, nodes);
    (void)snprintf(text, TDDP_LAUNCH_TEXT_BYTES,
                   "only %d of the %d nodes came to %s within %lld s%s; check that torchrun "
                   "runs on each with the same endpoint and --rdzv-id, or raise --rdzv-conf "
                   "join_timeout",
                   here, needed, coordinator->opts.where, seconds, nodes);
}
