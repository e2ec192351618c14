/*
 * Nodes come and go: who gets a place, who waits for one, who is refused, and what the round makes
 * of one that is gone. Called by coordinator.c. Keeps: at most `max` nodes have a place, no two of
 * them asked for the same rank, and a slot that is gone does not come back.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

enum { SAID_BYTES = 512 };

/* --- nodes come and go ----------------------------------------------------------------------- */

static bool is_gone(const tddp_launch_coordinator *coordinator, int slot)
{
    for (int i = 0; i < coordinator->gone_count; i++) {
        if (coordinator->gone[i] == slot) {
            return true;
        }
    }
    return false;
}

/* Makes room for one more in an array that doubles; false if memory is short. */
static bool make_room(tddp_launch_coordinator *coordinator, void **array, int count, int *capacity,
                      size_t each)
{
    if (count < *capacity) {
        return true;
    }
    int more = *capacity ? *capacity * 2 : 8;
    void *grown = tddp_resize(*array, (size_t)more * each);
    if (!grown) {
        coordinator->status = TDDP_OUT_OF_MEMORY;
        return false;
    }
    *array = grown;
    *capacity = more;
    return true;
}

static void note_gone(tddp_launch_coordinator *coordinator, int slot)
{
    void *gone = coordinator->gone;
    if (make_room(coordinator, &gone, coordinator->gone_count, &coordinator->gone_capacity,
                  sizeof(int))) {
        coordinator->gone = gone;
        coordinator->gone[coordinator->gone_count++] = slot;
    }
}

static void leave_trace(tddp_launch_coordinator *coordinator, const tddp_launch_participant *node)
{
    if (node->rank >= 0) {
        tddp_launch_trace *trace =
            &coordinator->traces[coordinator->trace_count++ % TDDP_LAUNCH_MOST_TRACES];
        trace->rank = node->rank;
        (void)snprintf(trace->host, sizeof trace->host, "%s", node->joiner.host);
    }
}

/* The rank of the last node that went from this host, and forgets it; or -1. */
static int take_trace(tddp_launch_coordinator *coordinator, const char *host)
{
    for (int i = 0; i < TDDP_LAUNCH_MOST_TRACES && i < coordinator->trace_count; i++) {
        tddp_launch_trace *trace =
            &coordinator->traces[(coordinator->trace_count - 1 - i) % TDDP_LAUNCH_MOST_TRACES];
        if (trace->host[0] && strcmp(trace->host, host) == 0) {
            trace->host[0] = '\0';
            return trace->rank;
        }
    }
    return -1;
}

static void remove_node(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    int index = (int)(node - coordinator->nodes);
    note_gone(coordinator, node->slot);
    memmove(node, node + 1, (size_t)(coordinator->count - index - 1) * sizeof *node);
    coordinator->count--;
}

static void refuse(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                   const char *text)
{
    tddp_launch_message *message =
        tddp_launch_coordinator_add_message(coordinator, TDDP_LAUNCH_MESSAGE_REFUSE, "%s", text);
    if (message) {
        message->slot = node->slot;
    }
    remove_node(coordinator, node);
}

/* What the round makes of a member that has gone. */
static void miss(tddp_launch_coordinator *coordinator, tddp_launch_departure how, bool was_in,
                 bool was_done, const char *text)
{
    tddp_launch_how last =
        how == TDDP_LAUNCH_LEFT ? TDDP_LAUNCH_HOW_STOPPED : TDDP_LAUNCH_HOW_FAILED;
    bool no_other_comes =
        how == TDDP_LAUNCH_LEFT && (coordinator->opts.fixed || coordinator->round >= 0);
    if (coordinator->stage == TDDP_LAUNCH_STAGE_RUNNING && was_in) {
        if (was_done) {
            tddp_launch_coordinator_check_done(coordinator);
        } else if (coordinator->opts.elastic || how == TDDP_LAUNCH_REPLACED) {
            tddp_launch_coordinator_end_round(coordinator, TDDP_LAUNCH_HOW_CHANGED, text);
        } else {
            tddp_launch_coordinator_charge_restart(coordinator, last, text);
        }
    } else if (coordinator->stage == TDDP_LAUNCH_STAGE_GATHERING && no_other_comes &&
               !coordinator->opts.elastic && !tddp_launch_coordinator_has_restart(coordinator)) {
        tddp_launch_coordinator_end_job(coordinator, last, text);
    }
}

/* Others would go on without it, but for the store that it takes along: that is said. */
static void end_with_host(tddp_launch_coordinator *coordinator, const char *text)
{
    char said[SAID_BYTES];
    (void)snprintf(said, sizeof said, "%.256s%s", text,
                   coordinator->opts.elastic
                       ? ", and with it the coordinator; a job with --rdzv-backend=etcd "
                         "survives that"
                       : "");
    tddp_launch_coordinator_end_job(coordinator, TDDP_LAUNCH_HOW_STOPPED, said);
}

/* Takes a node away and does what follows from that. */
void tddp_launch_coordinator_remove(tddp_launch_coordinator *coordinator,
                                    tddp_launch_participant *node, tddp_launch_departure how,
                                    const char *text)
{
    bool was_in = node->in;
    bool was_done = node->done;
    bool member = node->standing == TDDP_LAUNCH_MEMBER;
    bool hosting = node->joiner.hosting;
    if (how == TDDP_LAUNCH_LOST) {
        tddp_launch_message *message = tddp_launch_coordinator_add_message(
            coordinator, TDDP_LAUNCH_MESSAGE_REJOIN, "%s", text);
        if (message) {
            message->slot = node->slot;
        }
    }
    if (how != TDDP_LAUNCH_REPLACED) {
        leave_trace(coordinator, node);
    }
    remove_node(coordinator, node);
    if (how == TDDP_LAUNCH_LEFT && hosting && !coordinator->opts.hands_over &&
        coordinator->stage != TDDP_LAUNCH_STAGE_ENDED) {
        end_with_host(coordinator, text);
    } else if (member) {
        miss(coordinator, how, was_in, was_done, text);
    }
}

/* --- newcomers ------------------------------------------------------------------------------- */

/* Whether a node has said something since another came. */
static bool lives_since(const tddp_launch_participant *node, const tddp_launch_participant *joiner)
{
    return node->beat_ns > joiner->joined_ns;
}

static tddp_launch_participant *same_rank(tddp_launch_coordinator *coordinator,
                                          const tddp_launch_participant *joiner)
{
    for (int i = 0; i < coordinator->count; i++) {
        tddp_launch_participant *node = &coordinator->nodes[i];
        if (node != joiner && node->standing != TDDP_LAUNCH_HELD && joiner->joiner.node_rank >= 0 &&
            node->joiner.node_rank == joiner->joiner.node_rank) {
            return node;
        }
    }
    return NULL;
}

static bool all_live_since(const tddp_launch_coordinator *coordinator,
                           const tddp_launch_participant *joiner)
{
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        if (node->standing == TDDP_LAUNCH_MEMBER && !lives_since(node, joiner)) {
            return false;
        }
    }
    return true;
}

static void admit(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    char name[TDDP_LAUNCH_LIST_BYTES];
    node->standing = TDDP_LAUNCH_MEMBER;
    if (node->rank < 0 && node->joiner.node_rank < 0) {
        node->rank = take_trace(coordinator, node->joiner.host);
    }
    if (coordinator->stage == TDDP_LAUNCH_STAGE_RUNNING) {
        char text[TDDP_LAUNCH_LIST_BYTES + 32];
        (void)snprintf(text, sizeof text, "%s has come", tddp_launch_coordinator_name(node, name));
        tddp_launch_coordinator_end_round(coordinator, TDDP_LAUNCH_HOW_CHANGED, text);
    }
}

static void make_spare(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                       bool full)
{
    tddp_launch_message *message =
        full ? tddp_launch_coordinator_add_message(
                   coordinator, TDDP_LAUNCH_MESSAGE_SPARE,
                   "the job \"%s\" at %s has its %d nodes: this one waits for a "
                   "place that comes free",
                   coordinator->opts.run_id, coordinator->opts.where, coordinator->opts.max_nodes)
             : tddp_launch_coordinator_add_message(
                   coordinator, TDDP_LAUNCH_MESSAGE_SPARE,
                   "some nodes of the job \"%s\" at %s are done already: this "
                   "one waits for the others' end",
                   coordinator->opts.run_id, coordinator->opts.where);
    if (message) {
        message->slot = node->slot;
    }
    node->standing = TDDP_LAUNCH_SPARE;
}

/* Decides on one that has no place yet. False: it was refused, and is no longer in the list. */
static bool place(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    char text[TDDP_LAUNCH_TEXT_BYTES];
    const tddp_launch_participant *other = same_rank(coordinator, node);
    bool full = tddp_launch_coordinator_members(coordinator) >= coordinator->opts.max_nodes;
    bool finishing = coordinator->finishing;
    if (node->standing == TDDP_LAUNCH_HELD && other) {
        if (!lives_since(other, node)) {
            return true;
        }
        (void)snprintf(text, sizeof text,
                       "--node-rank=%d is taken already by %.200s pid %lld; expected another rank "
                       "on each node",
                       node->joiner.node_rank, other->joiner.host, (long long)other->joiner.pid);
        refuse(coordinator, node, text);
        return false;
    }
    if (!full && !finishing) {
        /* While workers of another round still end there, the others may go on. */
        if (node->ready || coordinator->stage != TDDP_LAUNCH_STAGE_RUNNING) {
            admit(coordinator, node);
        }
    } else if (full && !coordinator->opts.elastic &&
               !tddp_launch_coordinator_has_restart(coordinator)) {
        if (node->standing == TDDP_LAUNCH_HELD && !all_live_since(coordinator, node)) {
            return true;
        }
        (void)snprintf(text, sizeof text,
                       "the job \"%.200s\" at %s has its %d nodes already; start more with a "
                       "larger --nnodes on all of them",
                       coordinator->opts.run_id, coordinator->opts.where,
                       coordinator->opts.max_nodes);
        refuse(coordinator, node, text);
        return false;
    } else if (node->standing == TDDP_LAUNCH_HELD && (!full || all_live_since(coordinator, node))) {
        make_spare(coordinator, node, full);
    }
    return true;
}

/* Places go to spares before newcomers; within both, to whoever came first. */
void tddp_launch_coordinator_place(tddp_launch_coordinator *coordinator)
{
    static const tddp_launch_standing order[] = {TDDP_LAUNCH_SPARE, TDDP_LAUNCH_HELD};
    if (coordinator->stage == TDDP_LAUNCH_STAGE_ENDED) {
        return;
    }
    for (size_t turn = 0; turn < sizeof order / sizeof order[0]; turn++) {
        for (int i = 0; i < coordinator->count && coordinator->status == TDDP_OK;) {
            bool due = coordinator->nodes[i].standing == order[turn];
            i += !due || place(coordinator, &coordinator->nodes[i]);
        }
    }
}

/* A coordinator that has started nothing takes over what its nodes tell of earlier rounds. */
static void inherit(tddp_launch_coordinator *coordinator, const tddp_launch_joiner *joiner)
{
    bool fresh = coordinator->round < 0 || coordinator->inherited;
    if (!fresh || joiner->round < 0) {
        return;
    }
    if (joiner->round > coordinator->round) {
        coordinator->round = joiner->round;
        coordinator->old_nodes = joiner->nodes;
    }
    coordinator->restart = joiner->restart > coordinator->restart && !coordinator->charged
                               ? joiner->restart
                               : coordinator->restart;
    coordinator->inherited = true;
}

/* The node of the same process, if that has come under another slot. */
static tddp_launch_participant *same_process(tddp_launch_coordinator *coordinator, const char *id)
{
    for (int i = 0; i < coordinator->count; i++) {
        if (id[0] && strcmp(coordinator->nodes[i].joiner.id, id) == 0) {
            return &coordinator->nodes[i];
        }
    }
    return NULL;
}

/* After the job's end: a node that was in one of its rounds lost its coordinator before it heard of
 * the end, and hears it now; a new one has come too late. */
static void answer_late(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    if (node->round >= 0) {
        tddp_launch_coordinator_tell_end(coordinator);
    } else {
        refuse(coordinator, node, "the job has ended already");
    }
}

void tddp_launch_coordinator_on_join(tddp_launch_coordinator *coordinator,
                                     const tddp_launch_event *event)
{
    void *nodes = coordinator->nodes;
    char name[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 32];
    if (is_gone(coordinator, event->slot)) {
        return;
    }
    tddp_launch_participant *before = same_process(coordinator, event->joiner.id);
    if (before) {
        (void)snprintf(text, sizeof text, "%s has joined again",
                       tddp_launch_coordinator_name(before, name));
        tddp_launch_coordinator_remove(coordinator, before, TDDP_LAUNCH_REPLACED, text);
    }
    if (!make_room(coordinator, &nodes, coordinator->count, &coordinator->capacity,
                   sizeof(tddp_launch_participant))) {
        return;
    }
    coordinator->nodes = nodes;
    tddp_launch_participant *node = &coordinator->nodes[coordinator->count++];
    *node = (tddp_launch_participant){
        .joiner = event->joiner,
        .slot = event->slot,
        .standing = TDDP_LAUNCH_HELD,
        .rank = event->joiner.last_rank,
        .round = event->joiner.round,
        .joined_ns = coordinator->now_ns,
        .beat_ns = coordinator->now_ns,
    };
    if (coordinator->stage == TDDP_LAUNCH_STAGE_ENDED) {
        answer_late(coordinator, node);
        return;
    }
    coordinator->last_join_ns = coordinator->now_ns;
    inherit(coordinator, &event->joiner);
    tddp_launch_coordinator_place(coordinator);
}
