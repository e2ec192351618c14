/*
 * When a round may start, and which rank each node has in it. Called by coordinator.c. A started
 * round has every member in it once, with ranks 0 to count - 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

int tddp_launch_coordinator_members(const tddp_launch_coordinator *coordinator)
{
    int members = 0;
    for (int i = 0; i < coordinator->count; i++) {
        members += coordinator->nodes[i].status == TDDP_LAUNCH_MEMBER;
    }
    return members;
}

int tddp_launch_coordinator_ready(const tddp_launch_coordinator *coordinator)
{
    int ready = 0;
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        ready += node->status == TDDP_LAUNCH_MEMBER && node->missing_ns == 0 &&
                 tddp_launch_participant_ready(node);
    }
    return ready;
}

int tddp_launch_coordinator_needed(const tddp_launch_coordinator *coordinator)
{
    return coordinator->elastic ? coordinator->opts.options->min_nodes
                                : coordinator->opts.options->max_nodes;
}

/* Rule 1. */
static bool may_start(tddp_launch_coordinator *coordinator)
{
    int ready = tddp_launch_coordinator_ready(coordinator);
    int64_t now = coordinator->now_ns;
    if (ready < tddp_launch_coordinator_needed(coordinator)) {
        coordinator->enough_ns = 0;
        return false;
    }
    coordinator->enough_ns = coordinator->enough_ns ? coordinator->enough_ns : now;
    if (ready < tddp_launch_coordinator_members(coordinator)) {
        return false;
    }
    return ready == coordinator->opts.options->max_nodes ||
           now >=
               tddp_deadline_from(coordinator->enough_ns, coordinator->opts.times->last_call_ms) ||
           now >= tddp_deadline_from(coordinator->gathering_ns, coordinator->opts.times->join_ms);
}

/* --- ranks ----------------------------------------------------------------------------------- */

/* Gives a node a rank if nobody has it. */
static bool give(tddp_launch_participant **holders, int count, int rank,
                 tddp_launch_participant *node)
{
    bool can = rank >= 0 && rank < count && !holders[rank];
    if (can) {
        holders[rank] = node;
        node->rank = rank;
        node->in = true;
    }
    return can;
}

/* Those without a rank yet: who asked for one (beyond the count, or taken) by what it asked for,
 * the host of a first round, the others as they came. */
static int compare_rest(const void *a, const void *b)
{
    const tddp_launch_participant *left = *(tddp_launch_participant *const *)a;
    const tddp_launch_participant *right = *(tddp_launch_participant *const *)b;
    if (left->entry.self.hosting != right->entry.self.hosting) {
        return left->entry.self.hosting ? -1 : 1;
    }
    int64_t one = left->entry.self.node_rank < 0 ? INT32_MAX : left->entry.self.node_rank;
    int64_t other = right->entry.self.node_rank < 0 ? INT32_MAX : right->entry.self.node_rank;
    if (one == other) { /* by their coming */
        return (left > right) - (left < right);
    }
    return (one > other) - (one < other);
}

static void give_rest(tddp_launch_participant **holders, tddp_launch_participant **rest, int left,
                      int count)
{
    int rank = 0;
    qsort(rest, (size_t)left, sizeof(tddp_launch_participant *), compare_rest);
    for (int i = 0; i < left; i++) {
        while (!give(holders, count, rank, rest[i])) {
            rank++;
        }
    }
}

/* Three passes: what was asked for; what a node had in the last round; what one of its host had. */
static int rank_of_pass(const tddp_launch_coordinator *coordinator,
                        const tddp_launch_participant *node, int pass)
{
    bool was_in = node->round >= 0 && node->round == coordinator->doc.round;
    if (pass == 0) {
        return node->entry.self.node_rank;
    }
    return node->entry.self.node_rank < 0 && (pass == 2 || was_in) ? node->rank : -1;
}

static void assign(tddp_launch_coordinator *coordinator, tddp_launch_participant **holders,
                   tddp_launch_participant **rest, int count)
{
    int left = 0;
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < coordinator->count; i++) {
            tddp_launch_participant *node = &coordinator->nodes[i];
            if (node->status == TDDP_LAUNCH_MEMBER && !node->in) {
                (void)give(holders, count, rank_of_pass(coordinator, node, pass), node);
            }
        }
    }
    for (int i = 0; i < coordinator->count; i++) {
        tddp_launch_participant *node = &coordinator->nodes[i];
        if (node->status == TDDP_LAUNCH_MEMBER && !node->in) {
            rest[left++] = node;
        }
    }
    give_rest(holders, rest, left, count);
}

static void start(tddp_launch_coordinator *coordinator)
{
    tddp_launch_state *doc = &coordinator->doc;
    int count = tddp_launch_coordinator_members(coordinator);
    tddp_launch_participant **holders = tddp_alloc_array((size_t)count, 2 * sizeof *holders);
    tddp_launch_member *members = tddp_alloc_array((size_t)count, sizeof *members);
    if (!holders || !members) {
        free(holders);
        free(members);
        coordinator->status = TDDP_OUT_OF_MEMORY;
        return;
    }
    assign(coordinator, holders, holders + count, count);
    free(doc->members);
    doc->members = members;
    doc->count = count;
    doc->round++;
    doc->generation++;
    doc->stage = TDDP_LAUNCH_STAGE_RUNNING;
    doc->master_port = 0;
    coordinator->finishing = false;
    coordinator->enough_ns = 0;
    coordinator->changed = true;
    for (int rank = 0; rank < count; rank++) {
        members[rank] = holders[rank]->entry.self;
        holders[rank]->round = doc->round;
    }
    free(holders);
}

void tddp_launch_coordinator_try_start(tddp_launch_coordinator *coordinator)
{
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_GATHERING && coordinator->status == TDDP_OK &&
        may_start(coordinator)) {
        start(coordinator);
        tddp_launch_coordinator_place(coordinator); /* spares that are of no use any more */
    }
}

void tddp_launch_coordinator_gather(tddp_launch_coordinator *coordinator)
{
    coordinator->doc.stage = TDDP_LAUNCH_STAGE_GATHERING;
    coordinator->finishing = false;
    coordinator->gathering_ns = coordinator->now_ns;
    coordinator->report_ns =
        tddp_deadline_from(coordinator->now_ns, coordinator->opts.times->report_ms);
}

/* --- ends ------------------------------------------------------------------------------------ */

void tddp_launch_coordinator_end_job(tddp_launch_coordinator *coordinator, tddp_launch_how how,
                                     const char *text)
{
    tddp_launch_state *doc = &coordinator->doc;
    doc->stage = TDDP_LAUNCH_STAGE_ENDED;
    doc->ended_how = how;
    (void)snprintf(doc->ended_text, sizeof doc->ended_text, "%s", text);
    coordinator->ended_ns = coordinator->now_ns;
    coordinator->changed = true;
}

void tddp_launch_coordinator_end_round(tddp_launch_coordinator *coordinator, tddp_launch_how how,
                                       const char *text)
{
    tddp_launch_state *doc = &coordinator->doc;
    doc->over = doc->round;
    doc->over_how = how;
    (void)snprintf(doc->over_text, sizeof doc->over_text, "%s", text);
    for (int i = 0; i < coordinator->count; i++) {
        coordinator->nodes[i].in = false;
    }
    coordinator->changed = true;
    tddp_launch_coordinator_gather(coordinator);
}

bool tddp_launch_coordinator_has_restart(const tddp_launch_coordinator *coordinator)
{
    return coordinator->doc.restart < coordinator->opts.options->max_restarts;
}

/* A round is over for a reason that costs a restart; `last` is how the job ends without one. */
void tddp_launch_coordinator_charge_restart(tddp_launch_coordinator *coordinator,
                                            tddp_launch_how last, const char *text)
{
    if (tddp_launch_coordinator_has_restart(coordinator)) {
        coordinator->doc.restart++;
        tddp_launch_coordinator_end_round(coordinator, TDDP_LAUNCH_HOW_FAILED, text);
    } else {
        tddp_launch_coordinator_end_job(coordinator, last, text);
    }
}

void tddp_launch_coordinator_lose_round(tddp_launch_coordinator *coordinator, tddp_launch_how last,
                                        const char *text)
{
    if (coordinator->elastic) {
        tddp_launch_coordinator_end_round(coordinator, TDDP_LAUNCH_HOW_CHANGED, text);
    } else {
        tddp_launch_coordinator_charge_restart(coordinator, last, text);
    }
}

/* Ends the job once all of the running round are done. */
void tddp_launch_coordinator_check_done(tddp_launch_coordinator *coordinator)
{
    int in = 0;
    int done = 0;
    for (int i = 0; i < coordinator->count; i++) {
        in += coordinator->nodes[i].in;
        done += tddp_launch_participant_done(coordinator, &coordinator->nodes[i]);
    }
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_RUNNING && done == in) {
        tddp_launch_coordinator_end_job(coordinator, TDDP_LAUNCH_HOW_DONE, "");
    }
}
