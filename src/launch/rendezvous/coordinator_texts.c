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
        if (node->status != TDDP_LAUNCH_MEMBER || (unready && node->ready)) {
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

static void report_absent(tddp_launch_coordinator *coordinator, int absent, const char *here)
{
    char missing[TDDP_LAUNCH_LIST_BYTES];
    int ranks = list_missing(coordinator, missing);
    bool more = coordinator->opts.options->max_nodes > tddp_launch_coordinator_needed(coordinator);
    report(coordinator, "waiting at %s for %d of %s%d nodes%s%s%s; here: %s",
           coordinator->opts.where, absent, more ? "at least " : "",
           tddp_launch_coordinator_needed(coordinator),
           ranks == 1  ? ": node rank "
           : ranks > 1 ? ": node ranks "
                       : "",
           missing,
           ranks == 1  ? " has not come"
           : ranks > 1 ? " have not come"
                       : "",
           here[0] ? here : "nobody");
}

void tddp_launch_coordinator_report_waiting(tddp_launch_coordinator *coordinator)
{
    char here[TDDP_LAUNCH_LIST_BYTES];
    char unready[TDDP_LAUNCH_LIST_BYTES];
    int count = list_nodes(coordinator, false, here);
    int absent = tddp_launch_coordinator_needed(coordinator) - count;
    if (absent > 0) {
        report_absent(coordinator, absent, here);
    } else if (list_nodes(coordinator, true, unready) > 0) {
        report(coordinator, "waiting at %s for the workers of %s to end", coordinator->opts.where,
               unready);
    } else if (coordinator->enough_ns != 0) {
        int64_t left =
            tddp_deadline_from(coordinator->enough_ns, coordinator->opts.times->last_call_ms) -
            coordinator->now_ns;
        report(coordinator,
               "%d of up to %d nodes have come to %s (%s); the workers start in %lld s, or once "
               "all have come",
               count, coordinator->opts.options->max_nodes, coordinator->opts.where, here,
               (long long)((left + TDDP_NS_PER_S - 1) / TDDP_NS_PER_S));
    }
}

void tddp_launch_coordinator_describe_missing(const tddp_launch_coordinator *coordinator,
                                              char text[TDDP_LAUNCH_TEXT_BYTES])
{
    char here[TDDP_LAUNCH_LIST_BYTES];
    char other[TDDP_LAUNCH_LIST_BYTES];
    const char *where = coordinator->opts.where;
    long long seconds = coordinator->opts.times->join_ms / 1000;
    int needed = tddp_launch_coordinator_needed(coordinator);
    int count = list_nodes(coordinator, false, here);
    if (count >= needed && list_nodes(coordinator, true, other) > 0) {
        (void)snprintf(text, TDDP_LAUNCH_TEXT_BYTES,
                       "the workers of %s did not end within %lld s, so no other round can start",
                       other, seconds);
        return;
    }
    int ranks = list_missing(coordinator, other);
    if (ranks == 0) {
        (void)snprintf(other, sizeof other, "%d", needed - count);
    }
    (void)snprintf(text, TDDP_LAUNCH_TEXT_BYTES,
                   "not all of the %d nodes came to %s within %lld s (%s%s %s missing; here: %s); "
                   "check that torchrun runs on each with the same endpoint and --rdzv-id, or "
                   "raise --rdzv-conf join_timeout",
                   needed, where, seconds,
                   ranks == 1  ? "node rank "
                   : ranks > 1 ? "node ranks "
                               : "",
                   other, ranks == 1 || (ranks == 0 && needed - count == 1) ? "is" : "are",
                   here[0] ? here : "nobody");
}
