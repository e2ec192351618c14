/*
 * What the document does to a node (state.h has it). Runs on the rendezvous thread, between
 * member.c's waits; nothing here waits but one look whether the workers' store is within reach.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    REACH_MS = 5 * 1000, /* for the workers' store, if it does not answer */
    HEAL_MS = 3 * 1000, /* and if there is no way to it: a network that is just back has none yet */
    TRY_MS = 500,
};

void tddp_launch_node_round_over(tddp_launch_node *node, tddp_launch_notification notification,
                                 const char *text)
{
    if (node->part == TDDP_LAUNCH_WORKING) {
        tddp_launch_node_notify(node, notification, "%s", text);
    } else if (node->part == TDDP_LAUNCH_ENTERING) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s", text);
    }
    node->part = TDDP_LAUNCH_AWAITING;
    node->report_failure_at = INT64_MAX;
    node->began_ns = tddp_now_ns();
}

/* --- the workers' store ---------------------------------------------------------------------- */

static void fail_round(tddp_launch_node *node, const char *text)
{
    node->entry.failed = node->entry.round;
    node->entry_changed = true;
    (void)snprintf(node->entry.text, sizeof node->entry.text, "%s", text);
}

static void begin_work(tddp_launch_node *node)
{
    node->part = TDDP_LAUNCH_WORKING;
    node->clear = false;
    tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_JOINED, "%s", "");
}

void tddp_launch_node_reach_master(tddp_launch_node *node)
{
    const tddp_launch_world *world = &node->world;
    if (world->node_rank == 0 || world->master_port == 0 ||
        node->entry.failed == node->entry.round) {
        return;
    }
    node->reach_began_ns = node->reach_began_ns ? node->reach_began_ns : tddp_now_ns();
    tddp_status reached =
        tddp_launch_address_check(world->master_addr, world->master_port, node->master_host,
                                  node->entry.self.addr, TRY_MS, node->cancel);
    int64_t limit_ms = reached == TDDP_NETWORK ? HEAL_MS : REACH_MS;
    if (reached == TDDP_OK) {
        begin_work(node);
    } else if (reached != TDDP_CANCELED &&
               tddp_now_ns() >= tddp_deadline_from(node->reach_began_ns, limit_ms)) {
        fail_round(node, tddp_error_message());
    }
}

/* Rank 0 has made it, and starts as soon as the others know where it is. */
static void take_master(tddp_launch_node *node, const tddp_launch_state *doc)
{
    if (doc->master_port == 0 || node->world.master_port != 0) {
        return;
    }
    (void)snprintf(node->world.master_addr, sizeof node->world.master_addr, "%s", doc->master_addr);
    node->world.master_port = doc->master_port;
    if (node->world.node_rank == 0) {
        begin_work(node);
    } else {
        tddp_launch_node_reach_master(node);
    }
}

/* --- this node's place --------------------------------------------------------------------------
 */

/* Ranks go by node, then by local rank; within a role the same. */
static void take_place(tddp_launch_node *node, const tddp_launch_state *doc, int rank)
{
    tddp_launch_world world = {
        .node_rank = rank,
        .nodes = doc->count,
        .local_size = node->local_size,
        .round = doc->round,
        .restart = doc->restart,
        .max_restarts = node->options->max_restarts,
        .generation = doc->generation,
    };
    for (int i = 0; i < doc->count; i++) {
        const tddp_launch_member *other = &doc->members[i];
        int before = i < rank ? other->local_size : 0;
        bool same_role = strcmp(other->role, doc->members[rank].role) == 0;
        world.size += other->local_size;
        world.base_rank += before;
        world.role_size += same_role ? other->local_size : 0;
        world.role_base_rank += same_role ? before : 0;
    }
    node->world = world;
    node->entry.round = doc->round;
    node->entry.rank = rank;
    (void)snprintf(node->master_host, sizeof node->master_host, "%s", doc->members[0].host);
}

/* Where the others find what listens here. */
static tddp_status choose_address(tddp_launch_node *node, const tddp_launch_state *doc)
{
    tddp_launch_entry *entry = &node->entry;
    if (node->options->local_addr[0] != '\0') {
        memcpy(entry->master_addr, entry->self.addr, sizeof entry->master_addr);
        return TDDP_OK;
    }
    const char **others = tddp_alloc_array((size_t)doc->count, sizeof *others);
    if (!others) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int i = 0; i < doc->count; i++) {
        others[i] = doc->members[i].addr;
    }
    tddp_launch_address_choose(entry->self.addr, others, (size_t)doc->count, node->cancel,
                               entry->master_addr);
    free(others);
    return TDDP_OK;
}

static tddp_status open_workers_store(tddp_launch_node *node, const tddp_launch_state *doc)
{
    tddp_launch_entry *entry = &node->entry;
    tddp_store_server_stop(node->workers);
    node->workers = NULL;
    tddp_status status = choose_address(node, doc);
    if (status != TDDP_OK) {
        return status;
    }
    entry->master_round = doc->round;
    entry->master_port = 0;
    if (node->host && node->options->local_addr[0] == '\0') {
        /* The port that the user knows, which may be the only one that a firewall lets through:
         * there the workers share the store where the nodes meet. */
        entry->master_port = tddp_store_server_port(node->host);
        return node->link.backend->clear(&node->link);
    }
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = entry->master_addr;
    status = tddp_store_server_start(&opts, &node->workers);
    if (status == TDDP_OK) {
        entry->master_port = tddp_store_server_port(node->workers);
    }
    return status;
}

/* --- rounds ---------------------------------------------------------------------------------- */

static tddp_status enter_round(tddp_launch_node *node, const tddp_launch_state *doc, int rank)
{
    take_place(node, doc, rank);
    node->part = TDDP_LAUNCH_ENTERING;
    node->reach_began_ns = 0;
    node->entry_changed = true;
    if (rank > 0) {
        return TDDP_OK;
    }
    tddp_status status = open_workers_store(node, doc);
    if (status != TDDP_OK && status != TDDP_OUT_OF_MEMORY) {
        fail_round(node, tddp_error_message());
        return TDDP_OK;
    }
    return status;
}

/* This node's round is over, whether it ran or was about to. */
static void leave_round(tddp_launch_node *node, const tddp_launch_state *doc)
{
    bool told = doc->over >= node->entry.round && doc->text[0];
    bool failed = told && doc->how != TDDP_LAUNCH_HOW_CHANGED;
    tddp_launch_node_round_over(
        node, failed ? TDDP_LAUNCH_NOTIFICATION_FAILED : TDDP_LAUNCH_NOTIFICATION_CHANGED,
        told ? doc->text
             : "this node was silent, or cut off, for so long that the others go on without it");
}

static void take_end(tddp_launch_node *node, const tddp_launch_state *doc)
{
    static const tddp_launch_notification notification[] = {
        [TDDP_LAUNCH_HOW_DONE] = TDDP_LAUNCH_NOTIFICATION_DONE,
        [TDDP_LAUNCH_HOW_FAILED] = TDDP_LAUNCH_NOTIFICATION_ENDED,
        [TDDP_LAUNCH_HOW_STOPPED] = TDDP_LAUNCH_NOTIFICATION_STOPPED,
        [TDDP_LAUNCH_HOW_CHANGED] = TDDP_LAUNCH_NOTIFICATION_ENDED,
    };
    node->ended = true;
    tddp_launch_node_notify(node, notification[doc->how], "%s", doc->text);
}

/* --- what a node is told --------------------------------------------------------------------- */

/* False: it has no part in the job. */
static bool take_note(tddp_launch_node *node, const tddp_launch_state *doc)
{
    for (int i = 0; i < doc->note_count; i++) {
        const tddp_launch_note *note = &doc->notes[i];
        if (strcmp(note->id, node->entry.self.id) != 0) {
            continue;
        }
        if (note->refused) {
            node->refused = true;
            tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s", note->text);
            return false;
        }
        if (strcmp(node->spare_text, note->text) != 0) {
            memcpy(node->spare_text, note->text, sizeof node->spare_text);
            tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s", note->text);
        }
        return true;
    }
    node->spare_text[0] = '\0';
    return true;
}

static void take_report(tddp_launch_node *node, const tddp_launch_state *doc)
{
    bool known = node->started == doc->started;
    if (doc->report > node->reported && known) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s", doc->status);
    }
    node->reported = doc->report;
    if (node->entry.probe != doc->probe) {
        node->entry.probe = doc->probe;
        node->entry_changed = true;
    }
}

/* The job that this node was in has ended without it, and its name is another's now. */
static bool is_other_job(tddp_launch_node *node, const tddp_launch_state *doc)
{
    bool other = node->entry.round >= 0 && node->started != doc->started;
    if (other) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR,
                                "the job has ended while this node was cut off, and another "
                                "one with its --rdzv-id has begun");
    }
    return other;
}

tddp_status tddp_launch_node_follow(tddp_launch_node *node, const tddp_launch_state *doc)
{
    int rank = tddp_launch_state_rank(doc, node->entry.self.id);
    bool running = doc->stage == TDDP_LAUNCH_STAGE_RUNNING && rank >= 0;
    bool mine = running && doc->round == node->entry.round;
    if (!take_note(node, doc) || is_other_job(node, doc)) {
        return TDDP_OK;
    }
    take_report(node, doc);
    if (doc->stage != TDDP_LAUNCH_STAGE_ENDED) {
        node->was_in = true;
        node->started = doc->started;
    }
    if (doc->stage == TDDP_LAUNCH_STAGE_ENDED) {
        if (node->started == doc->started) { /* else it is left from a job before this one */
            take_end(node, doc);
        }
        return TDDP_OK;
    }
    if (node->part != TDDP_LAUNCH_AWAITING && !mine) {
        leave_round(node, doc);
    }
    if (node->part == TDDP_LAUNCH_AWAITING && running && doc->round > node->entry.round) {
        tddp_status status = enter_round(node, doc, rank);
        if (status != TDDP_OK) {
            return status;
        }
    } else if (rank >= 0 && doc->round > node->entry.round) { /* it was over before this read it */
        take_place(node, doc, rank);
        node->entry_changed = true;
    }
    if (node->part == TDDP_LAUNCH_ENTERING) {
        take_master(node, doc);
    }
    return TDDP_OK;
}
