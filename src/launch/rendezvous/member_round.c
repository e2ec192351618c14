/*
 * What the document does to a node (state.h has it). Runs on the rendezvous thread, between
 * member.c's waits; nothing here waits but one look whether the workers' store is within reach.
 */
#include <stdio.h>
#include <string.h>

#include "launch/rendezvous/member.h"

/* For the workers' store, and for one look whether it is within reach. */
enum { REACH_MS = 5 * 1000, TRY_MS = 500 };

void tddp_launch_node_round_over(tddp_launch_node *node, tddp_launch_notification notification,
                                 const char *text)
{
    text = text ? text : "this node was silent, or cut off: the other nodes go on without it";
    if (node->part == TDDP_LAUNCH_WORKING) {
        tddp_launch_node_notify(node, notification, "%s", text);
    } else if (node->part == TDDP_LAUNCH_ENTERING) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s", text);
    }
    if (node->part == TDDP_LAUNCH_ENTERING || node->cleared) {
        node->entry.ready = node->entry.round + 1;
    }
    node->part = TDDP_LAUNCH_AWAITING;
    node->cleared = false;
    node->failure_ns = INT64_MAX;
}

static void fail_round(tddp_launch_node *node, const char *text)
{
    node->entry.failed = node->entry.round;
    (void)snprintf(node->entry.text, sizeof node->entry.text, "%s", text);
}

/* Rank 0 has made the workers' store, and starts as soon as the others know where it is; they start
 * once they reach it. */
static void take_master(tddp_launch_node *node, const tddp_launch_state *doc)
{
    tddp_launch_world *world = &node->world;
    tddp_status status = TDDP_OK;
    if (doc->master_port == 0 || node->entry.failed == node->entry.round) {
        return;
    }
    if (world->master_port == 0) {
        (void)snprintf(world->master_addr, sizeof world->master_addr, "%s", doc->master_addr);
        world->master_port = doc->master_port;
        node->reach_until_ns = tddp_deadline_after_ms(REACH_MS);
    }
    if (world->node_rank > 0) {
        status =
            tddp_launch_address_check(world->master_addr, world->master_port, doc->members[0].host,
                                      node->entry.self.addr, TRY_MS, node->link.cancel);
    }
    if (status == TDDP_OK) {
        node->part = TDDP_LAUNCH_WORKING;
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_JOINED, "%s", "");
    } else if (status != TDDP_CANCELED && tddp_now_ns() >= node->reach_until_ns) {
        fail_round(node, tddp_error_message());
    }
}

/* --- rounds ---------------------------------------------------------------------------------- */

/* Ranks go by node, then by local rank; within a role the same. */
static void take_place(tddp_launch_node *node, const tddp_launch_state *doc, int rank)
{
    tddp_launch_world world = {
        .node_rank = rank,
        .nodes = doc->count,
        .local_size = node->entry.self.local_size,
        .round = doc->round,
        .restart = doc->restart,
        .max_restarts = node->link.options->max_restarts,
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
    node->part = TDDP_LAUNCH_ENTERING;
}

static tddp_status open_workers_store(tddp_launch_node *node, const tddp_launch_state *doc)
{
    tddp_launch_entry *entry = &node->entry;
    bool given = node->link.options->local_addr[0] != '\0';
    /* The port that the user knows, which may be the only one that a firewall lets through: there
     * the workers share the store where the nodes meet. */
    bool share = node->link.server && !given;
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = entry->master_addr;
    tddp_store_server_stop(node->workers);
    node->workers = NULL;
    /* Where the others find what listens here. */
    tddp_launch_address_choose(entry->self.addr, doc->members, given ? 0 : doc->count,
                               node->link.cancel, entry->master_addr);
    tddp_status status = share ? node->link.backend->clear(&node->link)
                               : tddp_store_server_start(&opts, &node->workers);
    entry->master_round = doc->round;
    entry->master_port =
        status == TDDP_OK ? tddp_store_server_port(share ? node->link.server : node->workers) : 0;
    return status;
}

/* What this node is to do: to leave a round, to enter one, to start its workers. */
static tddp_status take_round(tddp_launch_node *node, const tddp_launch_state *doc)
{
    int rank = tddp_launch_state_rank(doc, node->entry.self.id);
    bool running = doc->stage == TDDP_LAUNCH_STAGE_RUNNING && rank >= 0;
    bool over = doc->over >= node->entry.round && doc->text[0];
    bool failed = over && doc->how != TDDP_LAUNCH_HOW_CHANGED;
    tddp_status status = TDDP_OK;
    if (node->part != TDDP_LAUNCH_AWAITING && !(running && doc->round == node->entry.round)) {
        tddp_launch_node_round_over(
            node, failed ? TDDP_LAUNCH_NOTIFICATION_FAILED : TDDP_LAUNCH_NOTIFICATION_CHANGED,
            over ? doc->text : NULL);
    }
    if (node->part == TDDP_LAUNCH_AWAITING && running && doc->round > node->entry.round) {
        take_place(node, doc, rank);
        status = rank == 0 ? open_workers_store(node, doc) : TDDP_OK;
    }
    if (status != TDDP_OK && status != TDDP_OUT_OF_MEMORY) {
        fail_round(node, tddp_error_message());
        return TDDP_OK;
    }
    if (status == TDDP_OK && node->part == TDDP_LAUNCH_ENTERING) {
        take_master(node, doc);
    }
    if (node->part == TDDP_LAUNCH_AWAITING && node->entry.ready > node->entry.round && rank >= 0 &&
        node->entry.ready <= doc->round) {
        node->entry.ready = doc->round + 1; /* that one was over before this node has seen it */
    }
    return status;
}

/* --- the document ---------------------------------------------------------------------------- */

/* It is refused, or a spare. */
static void take_note(tddp_launch_node *node, const tddp_launch_state *doc)
{
    const char *text = "";
    bool refused = false;
    for (int i = 0; i < doc->note_count; i++) {
        if (strcmp(doc->notes[i].id, node->entry.self.id) == 0) {
            text = doc->notes[i].text;
            refused = doc->notes[i].refused;
        }
    }
    if (strcmp(node->spare_text, text) != 0) {
        (void)snprintf(node->spare_text, sizeof node->spare_text, "%s", text);
        if (text[0]) {
            tddp_launch_node_notify(
                node, refused ? TDDP_LAUNCH_NOTIFICATION_ERROR : TDDP_LAUNCH_NOTIFICATION_STATUS,
                "%s", text);
        }
    }
}

static tddp_status take_document(tddp_launch_node *node, const tddp_launch_state *doc)
{
    bool known = node->started == doc->started;
    take_note(node, doc);
    if (!node->over && node->entry.round >= 0 && !known && !node->link.backend->survives &&
        tddp_launch_is_elastic(node->link.options)) {
        tddp_launch_node_lose_job(node, "another one is there now");
    } else if (!node->over && node->entry.round >= 0 && !known) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR,
                                "the job has ended while this node was cut off, and another one "
                                "with its --rdzv-id has begun");
    }
    if (node->over) {
        return TDDP_OK;
    }
    if (doc->report > node->reported && known) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_STATUS, "%s", doc->status);
    }
    node->reported = doc->report;
    node->entry.probe = doc->probe;
    if (doc->stage != TDDP_LAUNCH_STAGE_ENDED) {
        node->started = doc->started;
        return take_round(node, doc);
    }
    if (known) { /* else it is left from a job before this one */
        node->entry.ended = true;
        tddp_launch_node_notify(node,
                                doc->how == TDDP_LAUNCH_HOW_DONE ? TDDP_LAUNCH_NOTIFICATION_DONE
                                : doc->how == TDDP_LAUNCH_HOW_STOPPED
                                    ? TDDP_LAUNCH_NOTIFICATION_STOPPED
                                    : TDDP_LAUNCH_NOTIFICATION_ENDED,
                                "%s", doc->text);
    }
    return TDDP_OK;
}

tddp_status tddp_launch_node_follow(tddp_launch_node *node)
{
    tddp_launch_state doc;
    const tddp_blob *found = &node->view.state;
    if (!found->data) {
        return TDDP_OK;
    }
    tddp_status status = tddp_launch_state_read(found->data, found->size, &doc);
    if (status == TDDP_OK) {
        status = take_document(node, &doc);
        node->followed = true;
        tddp_launch_state_free(&doc);
    }
    return status;
}
