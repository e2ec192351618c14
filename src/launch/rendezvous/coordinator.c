/*
 * The coordinator's rules: what each event, and time, makes of the state (the picture is in
 * coordinator_state.h). Called by one thread, the host's. Keeps: at most `max` members; none of
 * them in a running round that did not live when it started; after the end nothing is said but
 * refusals, and the end once more.
 */
#include <stdio.h>
#include <stdlib.h>

#include "launch/rendezvous/coordinator_state.h"

enum { LATE_MS = 1000, LATE_PART = 4, GAP_PART = 2, GAP_BYTES = 96 };

tddp_status tddp_launch_coordinator_create(const tddp_launch_coordinator_opts *opts, int64_t now_ns,
                                           tddp_launch_coordinator **out)
{
    tddp_launch_coordinator *coordinator = tddp_alloc(sizeof *coordinator);
    if (!coordinator) {
        return TDDP_OUT_OF_MEMORY;
    }
    coordinator->opts = *opts;
    coordinator->round = -1;
    coordinator->gathering_ns = coordinator->tick_ns = now_ns;
    coordinator->report_ns = now_ns + opts->report_every_ns;
    *out = coordinator;
    return TDDP_OK;
}

void tddp_launch_coordinator_free(tddp_launch_coordinator *coordinator)
{
    if (coordinator) {
        free(coordinator->nodes);
        free(coordinator->gone);
        free(coordinator);
    }
}

bool tddp_launch_coordinator_ended(const tddp_launch_coordinator *coordinator)
{
    return coordinator->stage == TDDP_LAUNCH_STAGE_ENDED;
}

bool tddp_launch_coordinator_over(const tddp_launch_coordinator *coordinator, int64_t now_ns)
{
    if (coordinator->stage != TDDP_LAUNCH_STAGE_ENDED) {
        return false;
    }
    bool all = true;
    for (int i = 0; i < coordinator->count; i++) {
        all = all && coordinator->nodes[i].bye;
    }
    return all || now_ns - coordinator->ended_ns >= coordinator->opts.goodbye_ns;
}

int tddp_launch_coordinator_round(const tddp_launch_coordinator *coordinator)
{
    return coordinator->round;
}

int tddp_launch_coordinator_restart(const tddp_launch_coordinator *coordinator)
{
    return coordinator->restart;
}

static tddp_launch_participant *find_node(tddp_launch_coordinator *coordinator, int slot)
{
    for (int i = 0; i < coordinator->count; i++) {
        if (coordinator->nodes[i].slot == slot) {
            return &coordinator->nodes[i];
        }
    }
    return NULL;
}

/* --- events ------------------------------------------------------------------------ */

static void on_ready(tddp_launch_coordinator *coordinator, tddp_launch_participant *node, int round)
{
    char name[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 64];
    if (round <= node->round) {
        return; /* of an earlier round, come twice */
    }
    if (node->in && coordinator->stage == TDDP_LAUNCH_STAGE_RUNNING) {
        (void)snprintf(text, sizeof text, "%s has ended its workers",
                       tddp_launch_coordinator_name(node, name));
        tddp_launch_coordinator_charge_restart(coordinator, TDDP_LAUNCH_HOW_FAILED, text);
    }
    node->ready = true;
}

static void on_running(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                       const tddp_launch_event *event)
{
    if (coordinator->stage != TDDP_LAUNCH_STAGE_RUNNING || !node->in ||
        event->round != coordinator->round) {
        return;
    }
    if (event->kind == TDDP_LAUNCH_EVENT_FAILED) {
        tddp_launch_coordinator_charge_restart(coordinator, TDDP_LAUNCH_HOW_FAILED, event->text);
    } else if (event->kind == TDDP_LAUNCH_EVENT_DONE) {
        node->done = coordinator->finishing = true;
        tddp_launch_coordinator_check_done(coordinator);
    } else if (node->rank == 0 && !coordinator->master) {
        tddp_launch_message *message =
            tddp_launch_coordinator_add_message(coordinator, TDDP_LAUNCH_MESSAGE_MASTER, "%s", "");
        if (message) {
            message->port = event->port;
            (void)snprintf(message->addr, sizeof message->addr, "%s", event->addr);
        }
        coordinator->master = true;
    }
}

static void on_event(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                     const tddp_launch_event *event)
{
    node->beat_ns = coordinator->now_ns;
    switch (event->kind) {
    case TDDP_LAUNCH_EVENT_READY:
        on_ready(coordinator, node, event->round);
        break;
    case TDDP_LAUNCH_EVENT_MASTER:
    case TDDP_LAUNCH_EVENT_FAILED:
    case TDDP_LAUNCH_EVENT_DONE:
        on_running(coordinator, node, event);
        break;
    case TDDP_LAUNCH_EVENT_LEAVE:
        tddp_launch_coordinator_remove(coordinator, node, TDDP_LAUNCH_LEFT, event->text);
        break;
    case TDDP_LAUNCH_EVENT_BYE:
        node->bye = true;
        break;
    case TDDP_LAUNCH_EVENT_JOIN:
    case TDDP_LAUNCH_EVENT_BEAT:
        break;
    }
}

static void try_start(tddp_launch_coordinator *coordinator);

tddp_status tddp_launch_coordinator_take(tddp_launch_coordinator *coordinator,
                                         const tddp_launch_event *event, int64_t now_ns,
                                         tddp_launch_messages *messages)
{
    coordinator->now_ns = now_ns;
    coordinator->messages = messages;
    tddp_launch_participant *node = find_node(coordinator, event->slot);
    if (node) {
        on_event(coordinator, node, event);
    } else if (event->kind == TDDP_LAUNCH_EVENT_JOIN) {
        tddp_launch_coordinator_on_join(coordinator, event);
    }
    tddp_launch_coordinator_place(coordinator);
    try_start(coordinator);
    return coordinator->status;
}

/* --- time ------------------------------------------------------------------------------------ */

/* A fixed-size job that moved here without one of its nodes: that one is lost. */
static void charge_missing(tddp_launch_coordinator *coordinator)
{
    int missing = coordinator->old_nodes - tddp_launch_coordinator_returned(coordinator);
    char text[160];
    if (!coordinator->inherited || coordinator->charged || coordinator->opts.elastic ||
        missing <= 0) {
        return;
    }
    coordinator->charged = true;
    if (tddp_launch_coordinator_has_restart(coordinator)) {
        coordinator->restart++;
        return;
    }
    (void)snprintf(text, sizeof text,
                   "%d of the %d nodes of round %d %s lost, with the torchrun that hosted the "
                   "rendezvous",
                   missing, coordinator->old_nodes, coordinator->round,
                   missing == 1 ? "is" : "are");
    tddp_launch_coordinator_end_job(coordinator, TDDP_LAUNCH_HOW_FAILED, text);
}

static void try_start(tddp_launch_coordinator *coordinator)
{
    if (coordinator->stage != TDDP_LAUNCH_STAGE_GATHERING || coordinator->status != TDDP_OK) {
        return;
    }
    bool quiet = coordinator->now_ns - coordinator->last_join_ns >= coordinator->opts.settle_ns;
    bool starts = tddp_launch_coordinator_may_start(coordinator);
    if (starts || quiet) {
        charge_missing(coordinator);
    }
    if (starts && coordinator->stage == TDDP_LAUNCH_STAGE_GATHERING) {
        tddp_launch_coordinator_start(coordinator);
        tddp_launch_coordinator_place(coordinator); /* spares that are of no use any more */
    }
}

/* Time in which nobody looked at the events (this process was stopped, say) is no silence of the
 * nodes; they may have to connect anew, so their time begins again. */
static void forgive_lateness(tddp_launch_coordinator *coordinator)
{
    int64_t part_ns = coordinator->opts.node_timeout_ns / LATE_PART;
    int64_t late_ns = part_ns < LATE_MS * TDDP_NS_PER_MS ? part_ns : LATE_MS * TDDP_NS_PER_MS;
    bool late = coordinator->now_ns - coordinator->tick_ns > late_ns;
    if (late) {
        coordinator->gap_ns = coordinator->now_ns - coordinator->tick_ns;
        coordinator->gap_end_ns = coordinator->now_ns;
    }
    for (int i = 0; late && i < coordinator->count; i++) {
        coordinator->nodes[i].beat_ns = coordinator->now_ns;
    }
    coordinator->tick_ns = coordinator->now_ns;
}

/* What is added when a node is called lost that was last looked for after this process stood still
 * for a while: it may have given up the coordinator, rather than the other way round. */
static void describe_gap(const tddp_launch_coordinator *coordinator,
                         const tddp_launch_participant *node, char text[GAP_BYTES])
{
    bool since = node->beat_ns == coordinator->gap_end_ns; /* nothing has come since then */
    text[0] = '\0';
    if (since && coordinator->gap_ns >= coordinator->opts.node_timeout_ns / GAP_PART) {
        (void)snprintf(text, GAP_BYTES,
                       "; before that the torchrun that coordinates was itself stopped for %lld s",
                       (long long)((coordinator->gap_ns + TDDP_NS_PER_S / 2) / TDDP_NS_PER_S));
    }
}

static void look_for_lost(tddp_launch_coordinator *coordinator)
{
    char where[TDDP_LAUNCH_LIST_BYTES];
    char gap[GAP_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + GAP_BYTES + 96];
    long long seconds = (coordinator->opts.node_timeout_ns + TDDP_NS_PER_S - 1) / TDDP_NS_PER_S;
    for (int i = 0; i < coordinator->count && coordinator->stage != TDDP_LAUNCH_STAGE_ENDED;) {
        tddp_launch_participant *node = &coordinator->nodes[i];
        if (coordinator->now_ns - node->beat_ns < coordinator->opts.node_timeout_ns) {
            i++;
            continue;
        }
        (void)snprintf(where, sizeof where, "(%.200s pid %lld)", node->joiner.host,
                       (long long)node->joiner.pid);
        describe_gap(coordinator, node, gap);
        if (node->rank >= 0) {
            (void)snprintf(text, sizeof text, "node %d is lost: no sign of life for %lld s %s%s",
                           node->rank, seconds, where, gap);
        } else {
            (void)snprintf(text, sizeof text, "a node is lost: no sign of life for %lld s %s%s",
                           seconds, where, gap);
        }
        tddp_launch_coordinator_remove(coordinator, node, TDDP_LAUNCH_LOST, text);
    }
}

static void look_at_time(tddp_launch_coordinator *coordinator)
{
    char text[TDDP_LAUNCH_TEXT_BYTES];
    if (coordinator->stage != TDDP_LAUNCH_STAGE_GATHERING) {
        return;
    }
    if (coordinator->now_ns - coordinator->gathering_ns >= coordinator->opts.join_timeout_ns) {
        tddp_launch_coordinator_describe_missing(coordinator, text);
        tddp_launch_coordinator_end_job(coordinator, TDDP_LAUNCH_HOW_FAILED, text);
    } else if (coordinator->now_ns >= coordinator->report_ns) {
        tddp_launch_coordinator_report_waiting(coordinator);
        coordinator->report_ns = coordinator->now_ns + coordinator->opts.report_every_ns;
    }
}

tddp_status tddp_launch_coordinator_tick(tddp_launch_coordinator *coordinator, int64_t now_ns,
                                         tddp_launch_messages *messages)
{
    coordinator->now_ns = now_ns;
    coordinator->messages = messages;
    forgive_lateness(coordinator);
    look_for_lost(coordinator);
    tddp_launch_coordinator_place(coordinator);
    try_start(coordinator);
    look_at_time(coordinator);
    return coordinator->status;
}
