/*
 * When a round may start, and which rank each node has in it. Called by council.c. A started round
 * has every member in it once, with ranks 0 to count - 1.
 */
#include <stdio.h>
#include <stdlib.h>

#include "launch/rendezvous/council_state.h"

int tddp_launch_council_members(const tddp_launch_council *council)
{
    int members = 0;
    for (int i = 0; i < council->count; i++) {
        members += council->nodes[i].standing == TDDP_LAUNCH_MEMBER;
    }
    return members;
}

int tddp_launch_council_ready(const tddp_launch_council *council)
{
    int ready = 0;
    for (int i = 0; i < council->count; i++) {
        const tddp_launch_seat *node = &council->nodes[i];
        ready += node->standing == TDDP_LAUNCH_MEMBER && node->ready;
    }
    return ready;
}

int tddp_launch_council_needed(const tddp_launch_council *council)
{
    return council->opts.elastic ? council->opts.min_nodes : council->opts.max_nodes;
}

int tddp_launch_council_returned(const tddp_launch_council *council)
{
    int returned = 0;
    for (int i = 0; i < council->count; i++) {
        const tddp_launch_seat *node = &council->nodes[i];
        returned += node->standing == TDDP_LAUNCH_MEMBER && node->round == council->round;
    }
    return returned;
}

bool tddp_launch_council_may_start(tddp_launch_council *council)
{
    int members = tddp_launch_council_members(council);
    int ready = tddp_launch_council_ready(council);
    int64_t now = council->now_ns;
    if (ready < tddp_launch_council_needed(council)) {
        council->enough_ns = 0;
        return false;
    }
    if (ready < members) {
        return false;
    }
    if (ready == council->opts.max_nodes) {
        return true;
    }
    if (council->round < 0) {
        council->enough_ns = council->enough_ns ? council->enough_ns : now;
        return now - council->enough_ns >= council->opts.last_call_ns ||
               now - council->gathering_ns >= council->opts.join_timeout_ns;
    }
    return !council->inherited || tddp_launch_council_returned(council) >= council->old_nodes ||
           now - council->last_join_ns >= council->opts.settle_ns;
}

/* --- ranks ----------------------------------------------------------------------------------- */

/* Gives a node a rank if nobody has it. */
static bool give(tddp_launch_seat **holders, int count, int rank, tddp_launch_seat *node)
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
    const tddp_launch_seat *left = *(tddp_launch_seat *const *)a;
    const tddp_launch_seat *right = *(tddp_launch_seat *const *)b;
    if (left->comer.hosting != right->comer.hosting) {
        return left->comer.hosting ? -1 : 1;
    }
    int64_t one = left->comer.node_rank < 0 ? INT32_MAX : left->comer.node_rank;
    int64_t other = right->comer.node_rank < 0 ? INT32_MAX : right->comer.node_rank;
    if (one == other) {
        one = left->slot;
        other = right->slot;
    }
    return (one > other) - (one < other);
}

static void give_rest(tddp_launch_seat **holders, tddp_launch_seat **rest, int left, int count)
{
    int rank = 0;
    qsort(rest, (size_t)left, sizeof(tddp_launch_seat *), compare_rest);
    for (int i = 0; i < left; i++) {
        while (!give(holders, count, rank, rest[i])) {
            rank++;
        }
    }
}

/* Three passes: what was asked for; what a node had in the last round; what one of its host had. */
static int rank_of_pass(const tddp_launch_council *council, const tddp_launch_seat *node, int pass)
{
    bool was_in = node->round >= 0 && node->round == council->round;
    if (pass == 0) {
        return node->comer.node_rank;
    }
    return node->comer.node_rank < 0 && (pass == 2 || was_in) ? node->rank : -1;
}

static void assign(tddp_launch_council *council, tddp_launch_seat **holders,
                   tddp_launch_seat **rest, int count)
{
    int left = 0;
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < council->count; i++) {
            tddp_launch_seat *node = &council->nodes[i];
            if (node->standing == TDDP_LAUNCH_MEMBER && !node->in) {
                (void)give(holders, count, rank_of_pass(council, node, pass), node);
            }
        }
    }
    for (int i = 0; i < council->count; i++) {
        tddp_launch_seat *node = &council->nodes[i];
        if (node->standing == TDDP_LAUNCH_MEMBER && !node->in) {
            rest[left++] = node;
        }
    }
    give_rest(holders, rest, left, count);
}

static void fill_word(tddp_launch_word *word, tddp_launch_seat *const *holders, int count)
{
    word->count = count;
    for (int rank = 0; rank < count; rank++) {
        const tddp_launch_comer *comer = &holders[rank]->comer;
        tddp_launch_member *member = &word->members[rank];
        member->slot = holders[rank]->slot;
        member->local_size = comer->local_size;
        (void)snprintf(member->role, sizeof member->role, "%s", comer->role);
        (void)snprintf(member->host, sizeof member->host, "%s", comer->host);
        (void)snprintf(member->addr, sizeof member->addr, "%s", comer->addr);
    }
}

void tddp_launch_council_start(tddp_launch_council *council)
{
    int count = tddp_launch_council_members(council);
    tddp_launch_seat **holders = tddp_alloc_array((size_t)count, 2 * sizeof *holders);
    tddp_launch_member *members = tddp_alloc_array((size_t)count, sizeof *members);
    tddp_launch_word *word =
        holders && members ? tddp_launch_council_say(council, TDDP_LAUNCH_WORD_ROUND, "%s", "")
                           : NULL;
    if (!word) {
        free(holders);
        free(members);
        council->status = TDDP_OUT_OF_MEMORY;
        return;
    }
    assign(council, holders, holders + count, count);
    council->round++;
    council->stage = TDDP_LAUNCH_STAGE_RUNNING;
    council->master = council->finishing = false;
    council->inherited = false;
    council->enough_ns = 0;
    word->round = council->round;
    word->restart = council->restart;
    word->members = members;
    fill_word(word, holders, count);
    for (int rank = 0; rank < count; rank++) {
        holders[rank]->round = council->round;
        holders[rank]->ready = holders[rank]->done = false;
    }
    free(holders);
}

/* --- ends ------------------------------------------------------------------------------------ */

void tddp_launch_council_end_job(tddp_launch_council *council, tddp_launch_how how,
                                 const char *text)
{
    tddp_launch_word *word = tddp_launch_council_say(council, TDDP_LAUNCH_WORD_END, "%s", text);
    if (word) {
        word->how = how;
    }
    council->stage = TDDP_LAUNCH_STAGE_ENDED;
    council->ended_ns = council->now_ns;
}

void tddp_launch_council_end_round(tddp_launch_council *council, tddp_launch_how how,
                                   const char *text)
{
    tddp_launch_word *word = tddp_launch_council_say(council, TDDP_LAUNCH_WORD_OVER, "%s", text);
    if (word) {
        word->how = how;
    }
    for (int i = 0; i < council->count; i++) {
        tddp_launch_seat *node = &council->nodes[i];
        if (node->in) {
            node->in = node->done = node->ready = false;
        }
    }
    council->finishing = false;
    council->stage = TDDP_LAUNCH_STAGE_GATHERING;
    council->gathering_ns = council->now_ns;
    council->tell_ns = council->now_ns + council->opts.tell_every_ns;
}

bool tddp_launch_council_has_restart(const tddp_launch_council *council)
{
    return council->restart < council->opts.max_restarts;
}

/* A round is over for a reason that costs a restart; `last` is how the job ends without one. */
void tddp_launch_council_charge(tddp_launch_council *council, tddp_launch_how last,
                                const char *text)
{
    if (tddp_launch_council_has_restart(council)) {
        council->restart++;
        tddp_launch_council_end_round(council, TDDP_LAUNCH_HOW_FAILED, text);
    } else {
        tddp_launch_council_end_job(council, last, text);
    }
}

/* Ends the job once all of the running round are done. */
void tddp_launch_council_look_for_done(tddp_launch_council *council)
{
    int in = 0;
    int done = 0;
    for (int i = 0; i < council->count; i++) {
        in += council->nodes[i].in;
        done += council->nodes[i].in && council->nodes[i].done;
    }
    if (council->stage == TDDP_LAUNCH_STAGE_RUNNING && done == in) {
        tddp_launch_council_end_job(council, TDDP_LAUNCH_HOW_DONE, "");
    }
}
