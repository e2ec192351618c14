/*
 * The council's rules: what each event, and time, makes of the state (the picture is in
 * council_state.h). Called by one thread, the host's. Keeps: at most `max` members; none of them in
 * a running round that did not live when it started; after the end nothing is said but refusals.
 */
#include <stdio.h>
#include <stdlib.h>

#include "launch/rendezvous/council_state.h"

enum { LATE_MS = 1000, LATE_PART = 4 };

tddp_status tddp_launch_council_create(const tddp_launch_council_opts *opts, int64_t now_ns,
                                       tddp_launch_council **out)
{
    tddp_launch_council *council = tddp_alloc(sizeof *council);
    if (!council) {
        return TDDP_OUT_OF_MEMORY;
    }
    council->opts = *opts;
    council->round = -1;
    council->gathering_ns = council->tick_ns = now_ns;
    council->tell_ns = now_ns + opts->tell_every_ns;
    *out = council;
    return TDDP_OK;
}

void tddp_launch_council_free(tddp_launch_council *council)
{
    if (council) {
        free(council->nodes);
        free(council->gone);
        free(council);
    }
}

bool tddp_launch_council_ended(const tddp_launch_council *council)
{
    return council->stage == TDDP_LAUNCH_STAGE_ENDED;
}

bool tddp_launch_council_over(const tddp_launch_council *council, int64_t now_ns)
{
    if (council->stage != TDDP_LAUNCH_STAGE_ENDED) {
        return false;
    }
    bool all = true;
    for (int i = 0; i < council->count; i++) {
        all = all && council->nodes[i].bye;
    }
    return all || now_ns - council->ended_ns >= council->opts.goodbye_ns;
}

int tddp_launch_council_round(const tddp_launch_council *council)
{
    return council->round;
}

int tddp_launch_council_restart(const tddp_launch_council *council)
{
    return council->restart;
}

static tddp_launch_seat *find_node(tddp_launch_council *council, int slot)
{
    for (int i = 0; i < council->count; i++) {
        if (council->nodes[i].slot == slot) {
            return &council->nodes[i];
        }
    }
    return NULL;
}

/* --- events ------------------------------------------------------------------------ */

static void on_ready(tddp_launch_council *council, tddp_launch_seat *node, int round)
{
    char name[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 64];
    if (round <= node->round) {
        return; /* of an earlier round, come twice */
    }
    if (node->in && council->stage == TDDP_LAUNCH_STAGE_RUNNING) {
        (void)snprintf(text, sizeof text, "%s has ended its workers",
                       tddp_launch_council_name(node, name));
        tddp_launch_council_charge(council, TDDP_LAUNCH_HOW_FAILED, text);
    }
    node->ready = true;
}

static void on_running(tddp_launch_council *council, tddp_launch_seat *node,
                       const tddp_launch_event *event)
{
    if (council->stage != TDDP_LAUNCH_STAGE_RUNNING || !node->in ||
        event->round != council->round) {
        return;
    }
    if (event->kind == TDDP_LAUNCH_EVENT_FAILED) {
        tddp_launch_council_charge(council, TDDP_LAUNCH_HOW_FAILED, event->text);
    } else if (event->kind == TDDP_LAUNCH_EVENT_DONE) {
        node->done = council->finishing = true;
        tddp_launch_council_look_for_done(council);
    } else if (node->rank == 0 && !council->master) {
        tddp_launch_word *word =
            tddp_launch_council_say(council, TDDP_LAUNCH_WORD_MASTER, "%s", "");
        if (word) {
            word->port = event->port;
            (void)snprintf(word->addr, sizeof word->addr, "%s", event->addr);
        }
        council->master = true;
    }
}

static void on_event(tddp_launch_council *council, tddp_launch_seat *node,
                     const tddp_launch_event *event)
{
    node->beat_ns = council->now_ns;
    switch (event->kind) {
    case TDDP_LAUNCH_EVENT_READY:
        on_ready(council, node, event->round);
        break;
    case TDDP_LAUNCH_EVENT_MASTER:
    case TDDP_LAUNCH_EVENT_FAILED:
    case TDDP_LAUNCH_EVENT_DONE:
        on_running(council, node, event);
        break;
    case TDDP_LAUNCH_EVENT_LEAVE:
        tddp_launch_council_part(council, node, TDDP_LAUNCH_LEFT, event->text);
        break;
    case TDDP_LAUNCH_EVENT_BYE:
        node->bye = true;
        break;
    case TDDP_LAUNCH_EVENT_JOIN:
    case TDDP_LAUNCH_EVENT_BEAT:
        break;
    }
}

static void try_start(tddp_launch_council *council);

tddp_status tddp_launch_council_take(tddp_launch_council *council, const tddp_launch_event *event,
                                     int64_t now_ns, tddp_launch_words *words)
{
    council->now_ns = now_ns;
    council->words = words;
    tddp_launch_seat *node = find_node(council, event->slot);
    if (node) {
        on_event(council, node, event);
    } else if (event->kind == TDDP_LAUNCH_EVENT_JOIN) {
        tddp_launch_council_on_join(council, event);
    }
    tddp_launch_council_place(council);
    try_start(council);
    return council->status;
}

/* --- time ------------------------------------------------------------------------------------ */

/* A fixed-size job that moved here without one of its nodes: that one is lost. */
static void charge_missing(tddp_launch_council *council)
{
    int missing = council->old_nodes - tddp_launch_council_returned(council);
    char text[160];
    if (!council->inherited || council->charged || council->opts.elastic || missing <= 0) {
        return;
    }
    council->charged = true;
    if (tddp_launch_council_has_restart(council)) {
        council->restart++;
        return;
    }
    (void)snprintf(text, sizeof text,
                   "%d of the %d nodes of round %d %s lost, with the torchrun that hosted the "
                   "rendezvous",
                   missing, council->old_nodes, council->round, missing == 1 ? "is" : "are");
    tddp_launch_council_end_job(council, TDDP_LAUNCH_HOW_FAILED, text);
}

static void try_start(tddp_launch_council *council)
{
    if (council->stage != TDDP_LAUNCH_STAGE_GATHERING || council->status != TDDP_OK) {
        return;
    }
    bool quiet = council->now_ns - council->last_join_ns >= council->opts.settle_ns;
    bool starts = tddp_launch_council_may_start(council);
    if (starts || quiet) {
        charge_missing(council);
    }
    if (starts && council->stage == TDDP_LAUNCH_STAGE_GATHERING) {
        tddp_launch_council_start(council);
        tddp_launch_council_place(council); /* spares that are of no use any more */
    }
}

/* Time in which nobody looked at the events (this process was stopped, say) is no silence of the
 * nodes; they may have to connect anew, so their time begins again. */
static void forgive_lateness(tddp_launch_council *council)
{
    int64_t part_ns = council->opts.patience_ns / LATE_PART;
    int64_t late_ns = part_ns < LATE_MS * TDDP_NS_PER_MS ? part_ns : LATE_MS * TDDP_NS_PER_MS;
    bool late = council->now_ns - council->tick_ns > late_ns;
    for (int i = 0; late && i < council->count; i++) {
        council->nodes[i].beat_ns = council->now_ns;
    }
    council->tick_ns = council->now_ns;
}

static void look_for_lost(tddp_launch_council *council)
{
    char where[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 96];
    long long seconds = (council->opts.patience_ns + TDDP_NS_PER_S - 1) / TDDP_NS_PER_S;
    for (int i = 0; i < council->count && council->stage != TDDP_LAUNCH_STAGE_ENDED;) {
        tddp_launch_seat *node = &council->nodes[i];
        if (council->now_ns - node->beat_ns < council->opts.patience_ns) {
            i++;
            continue;
        }
        (void)snprintf(where, sizeof where, "(%.200s pid %lld)", node->comer.host,
                       (long long)node->comer.pid);
        if (node->rank >= 0) {
            (void)snprintf(text, sizeof text, "node %d is lost: no sign of life for %lld s %s",
                           node->rank, seconds, where);
        } else {
            (void)snprintf(text, sizeof text, "a node is lost: no sign of life for %lld s %s",
                           seconds, where);
        }
        tddp_launch_council_part(council, node, TDDP_LAUNCH_LOST, text);
    }
}

static void look_at_time(tddp_launch_council *council)
{
    char text[TDDP_LAUNCH_TEXT_BYTES];
    if (council->stage != TDDP_LAUNCH_STAGE_GATHERING) {
        return;
    }
    if (council->now_ns - council->gathering_ns >= council->opts.join_timeout_ns) {
        tddp_launch_council_lament(council, text);
        tddp_launch_council_end_job(council, TDDP_LAUNCH_HOW_FAILED, text);
    } else if (council->now_ns >= council->tell_ns) {
        tddp_launch_council_tell(council);
        council->tell_ns = council->now_ns + council->opts.tell_every_ns;
    }
}

tddp_status tddp_launch_council_tick(tddp_launch_council *council, int64_t now_ns,
                                     tddp_launch_words *words)
{
    council->now_ns = now_ns;
    council->words = words;
    forgive_lateness(council);
    look_for_lost(council);
    tddp_launch_council_place(council);
    try_start(council);
    look_at_time(council);
    return council->status;
}
