/*
 * Nodes come and go: who gets a place, who waits for one, who is refused, and what the round makes
 * of one that is gone. Called by council.c. Keeps: at most `max` nodes have a place, no two of them
 * asked for the same rank, and a slot that is gone does not come back.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/council_state.h"

enum { SAID_BYTES = 512 };

/* --- nodes come and go ----------------------------------------------------------------------- */

static bool is_gone(const tddp_launch_council *council, int slot)
{
    for (int i = 0; i < council->gone_count; i++) {
        if (council->gone[i] == slot) {
            return true;
        }
    }
    return false;
}

/* Makes room for one more in an array that doubles; false if memory is short. */
static bool make_room(tddp_launch_council *council, void **array, int count, int *capacity,
                      size_t each)
{
    if (count < *capacity) {
        return true;
    }
    int more = *capacity ? *capacity * 2 : 8;
    void *grown = tddp_resize(*array, (size_t)more * each);
    if (!grown) {
        council->status = TDDP_OUT_OF_MEMORY;
        return false;
    }
    *array = grown;
    *capacity = more;
    return true;
}

static void note_gone(tddp_launch_council *council, int slot)
{
    void *gone = council->gone;
    if (make_room(council, &gone, council->gone_count, &council->gone_capacity, sizeof(int))) {
        council->gone = gone;
        council->gone[council->gone_count++] = slot;
    }
}

static void leave_trace(tddp_launch_council *council, const tddp_launch_seat *node)
{
    if (node->rank >= 0) {
        tddp_launch_trace *trace =
            &council->traces[council->trace_count++ % TDDP_LAUNCH_MOST_TRACES];
        trace->rank = node->rank;
        (void)snprintf(trace->host, sizeof trace->host, "%s", node->comer.host);
    }
}

/* The rank of the last node that went from this host, and forgets it; or -1. */
static int take_trace(tddp_launch_council *council, const char *host)
{
    for (int i = 0; i < TDDP_LAUNCH_MOST_TRACES && i < council->trace_count; i++) {
        tddp_launch_trace *trace =
            &council->traces[(council->trace_count - 1 - i) % TDDP_LAUNCH_MOST_TRACES];
        if (trace->host[0] && strcmp(trace->host, host) == 0) {
            trace->host[0] = '\0';
            return trace->rank;
        }
    }
    return -1;
}

static void remove_node(tddp_launch_council *council, tddp_launch_seat *node)
{
    int index = (int)(node - council->nodes);
    note_gone(council, node->slot);
    memmove(node, node + 1, (size_t)(council->count - index - 1) * sizeof *node);
    council->count--;
}

static void refuse(tddp_launch_council *council, tddp_launch_seat *node, const char *text)
{
    tddp_launch_word *word = tddp_launch_council_say(council, TDDP_LAUNCH_WORD_REFUSE, "%s", text);
    if (word) {
        word->slot = node->slot;
    }
    remove_node(council, node);
}

/* What the round makes of a member that has gone. */
static void miss(tddp_launch_council *council, tddp_launch_parting how, bool was_in, bool was_done,
                 const char *text)
{
    tddp_launch_how last =
        how == TDDP_LAUNCH_LEFT ? TDDP_LAUNCH_HOW_STOPPED : TDDP_LAUNCH_HOW_FAILED;
    bool no_other_comes = how == TDDP_LAUNCH_LEFT && (council->opts.fixed || council->round >= 0);
    if (council->stage == TDDP_LAUNCH_STAGE_RUNNING && was_in) {
        if (was_done) {
            tddp_launch_council_look_for_done(council);
        } else if (council->opts.elastic || how == TDDP_LAUNCH_REPLACED) {
            tddp_launch_council_end_round(council, TDDP_LAUNCH_HOW_CHANGED, text);
        } else {
            tddp_launch_council_charge(council, last, text);
        }
    } else if (council->stage == TDDP_LAUNCH_STAGE_GATHERING && no_other_comes &&
               !council->opts.elastic && !tddp_launch_council_has_restart(council)) {
        tddp_launch_council_end_job(council, last, text);
    }
}

/* Others would go on without it, but for the store that it takes along: that is said. */
static void end_with_host(tddp_launch_council *council, const char *text)
{
    char said[SAID_BYTES];
    (void)snprintf(said, sizeof said, "%.256s%s", text,
                   council->opts.elastic
                       ? ", and with it the only endpoint; a job with three endpoints "
                         "(--rdzv-endpoint=a,b,c) survives that"
                       : "");
    tddp_launch_council_end_job(council, TDDP_LAUNCH_HOW_STOPPED, said);
}

/* Takes a node away and does what follows from that. */
void tddp_launch_council_part(tddp_launch_council *council, tddp_launch_seat *node,
                              tddp_launch_parting how, const char *text)
{
    bool was_in = node->in;
    bool was_done = node->done;
    bool member = node->standing == TDDP_LAUNCH_MEMBER;
    bool hosting = node->comer.hosting;
    if (how == TDDP_LAUNCH_LOST) {
        tddp_launch_word *word =
            tddp_launch_council_say(council, TDDP_LAUNCH_WORD_ANEW, "%s", text);
        if (word) {
            word->slot = node->slot;
        }
    }
    if (how != TDDP_LAUNCH_REPLACED) {
        leave_trace(council, node);
    }
    remove_node(council, node);
    if (how == TDDP_LAUNCH_LEFT && hosting && !council->opts.hands_over &&
        council->stage != TDDP_LAUNCH_STAGE_ENDED) {
        end_with_host(council, text);
    } else if (member) {
        miss(council, how, was_in, was_done, text);
    }
}

/* --- newcomers ------------------------------------------------------------------------------- */

/* Whether a node has said something since another came. */
static bool lives_since(const tddp_launch_seat *node, const tddp_launch_seat *comer)
{
    return node->beat_ns > comer->joined_ns;
}

static tddp_launch_seat *same_rank(tddp_launch_council *council, const tddp_launch_seat *comer)
{
    for (int i = 0; i < council->count; i++) {
        tddp_launch_seat *node = &council->nodes[i];
        if (node != comer && node->standing != TDDP_LAUNCH_HELD && comer->comer.node_rank >= 0 &&
            node->comer.node_rank == comer->comer.node_rank) {
            return node;
        }
    }
    return NULL;
}

static bool all_live_since(const tddp_launch_council *council, const tddp_launch_seat *comer)
{
    for (int i = 0; i < council->count; i++) {
        const tddp_launch_seat *node = &council->nodes[i];
        if (node->standing == TDDP_LAUNCH_MEMBER && !lives_since(node, comer)) {
            return false;
        }
    }
    return true;
}

static void admit(tddp_launch_council *council, tddp_launch_seat *node)
{
    char name[TDDP_LAUNCH_LIST_BYTES];
    node->standing = TDDP_LAUNCH_MEMBER;
    if (node->rank < 0 && node->comer.node_rank < 0) {
        node->rank = take_trace(council, node->comer.host);
    }
    if (council->stage == TDDP_LAUNCH_STAGE_RUNNING) {
        char text[TDDP_LAUNCH_LIST_BYTES + 32];
        (void)snprintf(text, sizeof text, "%s has come", tddp_launch_council_name(node, name));
        tddp_launch_council_end_round(council, TDDP_LAUNCH_HOW_CHANGED, text);
    }
}

static void make_spare(tddp_launch_council *council, tddp_launch_seat *node, bool full)
{
    tddp_launch_word *word =
        full
            ? tddp_launch_council_say(council, TDDP_LAUNCH_WORD_SPARE,
                                      "the job \"%s\" at %s has its %d nodes: this one waits for a "
                                      "place that comes free",
                                      council->opts.run_id, council->opts.where,
                                      council->opts.max_nodes)
            : tddp_launch_council_say(council, TDDP_LAUNCH_WORD_SPARE,
                                      "some nodes of the job \"%s\" at %s are done already: this "
                                      "one waits for the others' end",
                                      council->opts.run_id, council->opts.where);
    if (word) {
        word->slot = node->slot;
    }
    node->standing = TDDP_LAUNCH_SPARE;
}

/* Decides on one that has no place yet. False: it was refused, and is no longer in the list. */
static bool place(tddp_launch_council *council, tddp_launch_seat *node)
{
    char text[TDDP_LAUNCH_TEXT_BYTES];
    const tddp_launch_seat *other = same_rank(council, node);
    bool full = tddp_launch_council_members(council) >= council->opts.max_nodes;
    bool finishing = council->finishing;
    if (node->standing == TDDP_LAUNCH_HELD && other) {
        if (!lives_since(other, node)) {
            return true;
        }
        (void)snprintf(text, sizeof text,
                       "--node-rank=%d is taken already by %.200s pid %lld; expected another rank "
                       "on each node",
                       node->comer.node_rank, other->comer.host, (long long)other->comer.pid);
        refuse(council, node, text);
        return false;
    }
    if (!full && !finishing) {
        /* While workers of another round still end there, the others may go on. */
        if (node->ready || council->stage != TDDP_LAUNCH_STAGE_RUNNING) {
            admit(council, node);
        }
    } else if (full && !council->opts.elastic && !tddp_launch_council_has_restart(council)) {
        if (node->standing == TDDP_LAUNCH_HELD && !all_live_since(council, node)) {
            return true;
        }
        (void)snprintf(text, sizeof text,
                       "the job \"%.200s\" at %s has its %d nodes already; start more with a "
                       "larger --nnodes on all of them",
                       council->opts.run_id, council->opts.where, council->opts.max_nodes);
        refuse(council, node, text);
        return false;
    } else if (node->standing == TDDP_LAUNCH_HELD && (!full || all_live_since(council, node))) {
        make_spare(council, node, full);
    }
    return true;
}

/* Places go to spares before newcomers; within both, to whoever came first. */
void tddp_launch_council_place(tddp_launch_council *council)
{
    static const tddp_launch_standing order[] = {TDDP_LAUNCH_SPARE, TDDP_LAUNCH_HELD};
    if (council->stage == TDDP_LAUNCH_STAGE_ENDED) {
        return;
    }
    for (size_t turn = 0; turn < sizeof order / sizeof order[0]; turn++) {
        for (int i = 0; i < council->count && council->status == TDDP_OK;) {
            bool due = council->nodes[i].standing == order[turn];
            i += !due || place(council, &council->nodes[i]);
        }
    }
}

/* A council that has started nothing takes over what its nodes tell of earlier rounds. */
static void inherit(tddp_launch_council *council, const tddp_launch_comer *comer)
{
    bool fresh = council->round < 0 || council->inherited;
    if (!fresh || comer->round < 0) {
        return;
    }
    if (comer->round > council->round) {
        council->round = comer->round;
        council->old_nodes = comer->nodes;
    }
    council->restart =
        comer->restart > council->restart && !council->charged ? comer->restart : council->restart;
    council->inherited = true;
}

/* The node of the same process, if that has come under another slot. */
static tddp_launch_seat *same_process(tddp_launch_council *council, const char *id)
{
    for (int i = 0; i < council->count; i++) {
        if (id[0] && strcmp(council->nodes[i].comer.id, id) == 0) {
            return &council->nodes[i];
        }
    }
    return NULL;
}

void tddp_launch_council_on_join(tddp_launch_council *council, const tddp_launch_event *event)
{
    void *nodes = council->nodes;
    char name[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 32];
    if (is_gone(council, event->slot)) {
        return;
    }
    tddp_launch_seat *before = same_process(council, event->comer.id);
    if (before) {
        (void)snprintf(text, sizeof text, "%s has come anew",
                       tddp_launch_council_name(before, name));
        tddp_launch_council_part(council, before, TDDP_LAUNCH_REPLACED, text);
    }
    if (!make_room(council, &nodes, council->count, &council->capacity, sizeof(tddp_launch_seat))) {
        return;
    }
    council->nodes = nodes;
    tddp_launch_seat *node = &council->nodes[council->count++];
    *node = (tddp_launch_seat){
        .comer = event->comer,
        .slot = event->slot,
        .standing = TDDP_LAUNCH_HELD,
        .rank = event->comer.last_rank,
        .round = event->comer.round,
        .joined_ns = council->now_ns,
        .beat_ns = council->now_ns,
    };
    if (council->stage == TDDP_LAUNCH_STAGE_ENDED) {
        refuse(council, node, "the job has ended already");
        return;
    }
    council->last_join_ns = council->now_ns;
    inherit(council, &event->comer);
    tddp_launch_council_place(council);
}
