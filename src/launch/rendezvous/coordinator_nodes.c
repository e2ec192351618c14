/*
 * Nodes come and go: who gets a place, who waits for one, who is refused, and what the round makes
 * of one that is gone. Called by coordinator.c. Keeps: at most `max` nodes have a place, and no two
 * of them asked for the same rank.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

/* --- the document's lists -------------------------------------------------------------------- */

static void remove_at(void *items, int *count, size_t each, int index)
{
    char *at = (char *)items + (size_t)index * each;
    memmove(at, at + each, (size_t)(--*count - index) * each);
}

static int find_note(const tddp_launch_state *doc, const char *id)
{
    int i = doc->note_count - 1;
    while (i >= 0 && strcmp(doc->notes[i].id, id) != 0) {
        i--;
    }
    return i;
}

static void drop_note(tddp_launch_coordinator *coordinator, const char *id)
{
    tddp_launch_state *doc = &coordinator->doc;
    int found = find_note(doc, id);
    if (found >= 0) {
        remove_at(doc->notes, &doc->note_count, sizeof *doc->notes, found);
        coordinator->changed = true;
    }
}

bool tddp_launch_coordinator_has_refused(const tddp_launch_coordinator *coordinator, const char *id)
{
    int found = find_note(&coordinator->doc, id);
    return found >= 0 && coordinator->doc.notes[found].refused;
}

/* A newcomer is a SPARE, or OUT: it is told why. */
static void decide(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                   tddp_launch_node_status status, const char *format, ...) TDDP_PRINTF(4, 5);

static void decide(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                   tddp_launch_node_status status, const char *format, ...)
{
    tddp_launch_state *doc = &coordinator->doc;
    void *notes = doc->notes;
    va_list arguments;
    node->status = status;
    drop_note(coordinator, node->entry.self.id);
    if (tddp_launch_grow(&notes, doc->note_count, sizeof *doc->notes) != TDDP_OK) {
        coordinator->status = TDDP_OUT_OF_MEMORY;
        return;
    }
    doc->notes = notes;
    tddp_launch_note *note = &doc->notes[doc->note_count++];
    note->refused = status == TDDP_LAUNCH_OUT;
    memcpy(note->id, node->entry.self.id, sizeof note->id);
    va_start(arguments, format);
    (void)vsnprintf(note->text, sizeof note->text, format, arguments);
    va_end(arguments);
    coordinator->changed = true;
}

/* --- nodes that go --------------------------------------------------------------------------- */

/* A node has left, or is lost: what the round makes of that. */
static void do_without(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                       bool left, const char *text)
{
    tddp_launch_how last = left ? TDDP_LAUNCH_HOW_STOPPED : TDDP_LAUNCH_HOW_FAILED;
    bool fixed = coordinator->opts.options->backend == TDDP_LAUNCH_STATIC;
    bool no_other_comes = left && (fixed || coordinator->doc.round >= 0);
    bool member = node->status == TDDP_LAUNCH_MEMBER;
    bool was_in = node->in;
    bool was_done = tddp_launch_participant_done(coordinator, node);
    node->status = TDDP_LAUNCH_OUT;
    node->in = false;
    drop_note(coordinator, node->entry.self.id);
    if (left && node->entry.self.hosting &&
        coordinator->opts.options->backend != TDDP_LAUNCH_ETCD) {
        tddp_launch_coordinator_end_job(coordinator, last, text);
    } else if (member && was_in && coordinator->doc.stage == TDDP_LAUNCH_STAGE_RUNNING) {
        if (was_done) {
            tddp_launch_coordinator_check_done(coordinator);
        } else {
            tddp_launch_coordinator_lose_round(coordinator, last, text);
        }
    } else if (member && coordinator->doc.stage == TDDP_LAUNCH_STAGE_GATHERING && no_other_comes &&
               !coordinator->elastic && !tddp_launch_coordinator_has_restart(coordinator)) {
        tddp_launch_coordinator_end_job(coordinator, last, text);
    }
}

void tddp_launch_coordinator_leave(tddp_launch_coordinator *coordinator,
                                   tddp_launch_participant *node)
{
    char text[2 * TDDP_LAUNCH_NAME_BYTES];
    bool hosting = node->entry.self.hosting && coordinator->elastic;
    /* Others would go on without it, but for the store that it takes along: that is said. */
    (void)snprintf(text, sizeof text, "%s%s", node->entry.leave_text,
                   hosting && coordinator->opts.options->backend != TDDP_LAUNCH_ETCD
                       ? ", and with it the coordinator; a job with --rdzv-backend=etcd survives "
                         "that"
                       : "");
    do_without(coordinator, node, true, text);
}

static void describe_loss(const tddp_launch_coordinator *coordinator,
                          const tddp_launch_participant *node, char *text, size_t size)
{
    char rank[24] = "a node";
    char silence[64] = "";
    int silence_s = (int)(coordinator->opts.times->silence_ms / 1000);
    if (node->rank >= 0) {
        (void)snprintf(rank, sizeof rank, "node %d", node->rank);
    }
    if (silence_s > 0) {
        (void)snprintf(silence, sizeof silence, ", or has been silent for %d s", silence_s);
    }
    (void)snprintf(text, size, "%s is lost: its torchrun is gone%s (%.200s pid %lld)", rank,
                   silence, node->entry.self.host, (long long)node->entry.self.pid);
}

int64_t tddp_launch_coordinator_lost_at(const tddp_launch_coordinator *coordinator,
                                        const tddp_launch_participant *node)
{
    const tddp_launch_times *times = coordinator->opts.times;
    bool patient = node->adopted || node->missing_ns < coordinator->patient_ns;
    return node->status == TDDP_LAUNCH_OUT
               ? node->missing_ns
               : tddp_deadline_from(node->missing_ns,
                                    patient ? times->takeover_ms : times->reconnect_ms);
}

void tddp_launch_coordinator_remove_lost(tddp_launch_coordinator *coordinator)
{
    char text[TDDP_LAUNCH_LIST_BYTES];
    for (int i = coordinator->count - 1; i >= 0; i--) {
        tddp_launch_participant *node = &coordinator->nodes[i];
        if (node->missing_ns != 0 &&
            coordinator->now_ns >= tddp_launch_coordinator_lost_at(coordinator, node)) {
            describe_loss(coordinator, node, text, sizeof text);
            do_without(coordinator, node, false, text);
            remove_at(coordinator->nodes, &coordinator->count, sizeof *node, i);
        }
    }
}

/* --- newcomers ------------------------------------------------------------------------------- */

/* Whether a node has answered since another came, which asks all to. */
static bool lives_since(const tddp_launch_participant *node,
                        const tddp_launch_participant *newcomer)
{
    return newcomer->probe != 0 && node->missing_ns == 0 && node->entry.probe >= newcomer->probe;
}

static tddp_launch_participant *same_rank(tddp_launch_coordinator *coordinator,
                                          const tddp_launch_participant *newcomer)
{
    int wanted = newcomer->entry.self.node_rank;
    for (int i = 0; i < coordinator->count && wanted >= 0; i++) {
        tddp_launch_participant *node = &coordinator->nodes[i];
        if (node != newcomer && node->entry.self.node_rank == wanted &&
            (node->status == TDDP_LAUNCH_SPARE || node->status == TDDP_LAUNCH_MEMBER)) {
            return node;
        }
    }
    return NULL;
}

static bool all_live_since(const tddp_launch_coordinator *coordinator,
                           const tddp_launch_participant *newcomer)
{
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        if (node->status == TDDP_LAUNCH_MEMBER && !lives_since(node, newcomer)) {
            return false;
        }
    }
    return true;
}

/* The rank that a node of this host had in the last round, if that node has gone; or -1. */
static int free_rank_of_host(const tddp_launch_coordinator *coordinator, const char *host)
{
    const tddp_launch_state *doc = &coordinator->doc;
    for (int rank = 0; rank < doc->count; rank++) {
        bool taken = strcmp(doc->members[rank].host, host) != 0;
        for (int i = 0; i < coordinator->count && !taken; i++) {
            const tddp_launch_participant *node = &coordinator->nodes[i];
            taken = node->status == TDDP_LAUNCH_MEMBER && node->rank == rank;
        }
        if (!taken) {
            return rank;
        }
    }
    return -1;
}

static void admit(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    char name[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 32];
    node->status = TDDP_LAUNCH_MEMBER;
    drop_note(coordinator, node->entry.self.id);
    if (node->rank < 0 && node->entry.self.node_rank < 0) {
        node->rank = free_rank_of_host(coordinator, node->entry.self.host);
    }
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_RUNNING) {
        (void)snprintf(text, sizeof text, "%s has come", tddp_launch_coordinator_name(node, name));
        tddp_launch_coordinator_end_round(coordinator, TDDP_LAUNCH_HOW_CHANGED, text);
    }
}

/* Decides on one that has no place yet. */
static void place(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    const tddp_launch_coordinator_opts *opts = &coordinator->opts;
    int max = opts->options->max_nodes;
    bool pending = node->status == TDDP_LAUNCH_PENDING;
    const tddp_launch_participant *other = pending ? same_rank(coordinator, node) : NULL;
    bool full = tddp_launch_coordinator_members(coordinator) >= max;
    /* A job of fixed size that has all its nodes, and no use for spares. */
    bool useless =
        full && !coordinator->elastic && !tddp_launch_coordinator_has_restart(coordinator);
    if (pending && strcmp(node->entry.job, coordinator->doc.job) != 0) {
        decide(coordinator, node, TDDP_LAUNCH_OUT,
               "the job at %.200s was started with %s, this node with %s; expected the same on all "
               "nodes",
               opts->where, coordinator->doc.job, node->entry.job);
        return;
    }
    if (!other && !full && !coordinator->finishing) {
        /* While workers of another round still end there, the others may go on. */
        if (tddp_launch_participant_ready(node) ||
            coordinator->doc.stage != TDDP_LAUNCH_STAGE_RUNNING) {
            admit(coordinator, node);
        }
        return;
    }
    if (!pending && !useless) {
        return; /* it waits on */
    }
    if (node->probe == 0) { /* all are asked whether they live */
        node->probe = ++coordinator->doc.probe;
        coordinator->changed = true;
    }
    if (other && lives_since(other, node)) {
        decide(coordinator, node, TDDP_LAUNCH_OUT,
               "--node-rank=%d is taken already by %.200s pid %lld; expected another rank on each "
               "node",
               node->entry.self.node_rank, other->entry.self.host,
               (long long)other->entry.self.pid);
    } else if (other || (pending && full && !all_live_since(coordinator, node))) {
        return; /* for their answers */
    } else if (useless) {
        decide(coordinator, node, TDDP_LAUNCH_OUT,
               "the job \"%.200s\" at %.200s has its %d nodes already; start more with a larger "
               "--nnodes on all of them",
               opts->run_id, opts->where, max);
    } else if (full) {
        decide(coordinator, node, TDDP_LAUNCH_SPARE,
               "the job \"%.200s\" at %.200s has its %d nodes: this one waits for a place that "
               "comes free",
               opts->run_id, opts->where, max);
    } else {
        decide(coordinator, node, TDDP_LAUNCH_SPARE,
               "some nodes of the job \"%.200s\" at %.200s are done already: this one waits for "
               "the others' end",
               opts->run_id, opts->where);
    }
}

void tddp_launch_coordinator_place(tddp_launch_coordinator *coordinator)
{
    static const tddp_launch_node_status order[] = {TDDP_LAUNCH_SPARE, TDDP_LAUNCH_PENDING};
    if (coordinator->adopted) {
        return; /* whose job it is shows in a moment */
    }
    for (size_t turn = 0; turn < sizeof order / sizeof order[0]; turn++) {
        for (int i = 0; i < coordinator->count && coordinator->status == TDDP_OK &&
                        coordinator->doc.stage != TDDP_LAUNCH_STAGE_ENDED;
             i++) {
            if (coordinator->nodes[i].status == order[turn]) {
                place(coordinator, &coordinator->nodes[i]);
            }
        }
    }
}

void tddp_launch_coordinator_join(tddp_launch_coordinator *coordinator,
                                  const tddp_launch_entry *entry)
{
    tddp_launch_participant *node = tddp_launch_coordinator_add(coordinator, entry);
    if (!node) {
        return;
    }
    node->status = tddp_launch_coordinator_has_refused(coordinator, entry->self.id)
                       ? TDDP_LAUNCH_OUT
                       : TDDP_LAUNCH_PENDING;
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_ENDED && entry->round < 0) {
        /* It is of a job that begins when this one's host has gone. (One of an earlier round has
         * lost its way to the document, and reads the end there.) */
        decide(coordinator, node, TDDP_LAUNCH_SPARE,
               "the job \"%.200s\" at %.200s has ended: this node waits for it to begin again",
               coordinator->opts.run_id, coordinator->opts.where);
        node->status = TDDP_LAUNCH_OUT;
    }
}
