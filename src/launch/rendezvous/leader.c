/*
 * The node that leads: it has the coordinator decide on what was read, writes the document, and
 * only then acts on it, as any other node. Runs on the rendezvous thread. Invariant: nobody acts on
 * a document that is not written, and who has lost the lead writes none.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "store/store_impl.h"

enum { LEAD_MS = 500 };

void tddp_launch_node_step_down(tddp_launch_node *node)
{
    tddp_launch_coordinator_free(node->coordinator);
    node->coordinator = NULL;
    node->leads = false;
}

int64_t tddp_launch_node_lead_due(const tddp_launch_node *node)
{
    return node->coordinator ? tddp_launch_coordinator_due(node->coordinator) : INT64_MAX;
}

/* A document that this node does not go on with: of a job that has ended before it came. */
static bool is_past(const tddp_launch_node *node, const tddp_launch_state *doc)
{
    return doc->stage == TDDP_LAUNCH_STAGE_ENDED && doc->started != node->started;
}

static tddp_status create_coordinator(tddp_launch_node *node)
{
    tddp_launch_state doc;
    const tddp_launch_coordinator_opts opts = {.options = node->options,
                                               .times = &node->times,
                                               .run_id = node->run_id,
                                               .where = node->where,
                                               .job = node->entry.job,
                                               .started = tddp_launch_new_generation()};
    tddp_status status = tddp_launch_coordinator_create(&opts, tddp_now_ns(), &node->coordinator);
    if (status != TDDP_OK || !node->view.state.data) {
        return status;
    }
    status = tddp_launch_state_read(node->view.state.data, node->view.state.size, &doc);
    if (status == TDDP_OK && !is_past(node, &doc)) {
        status = tddp_launch_coordinator_adopt(node->coordinator, &doc, tddp_now_ns());
    }
    tddp_launch_state_free(&doc);
    return status == TDDP_PROTOCOL ? TDDP_OK : status; /* what is no document is written over */
}

/* If the document is another than the one that is there. */
static tddp_status write_state(tddp_launch_node *node)
{
    const tddp_launch_state *doc = tddp_launch_coordinator_state(node->coordinator);
    const tddp_slice before = {node->view.state.data, node->view.state.size};
    tddp_bytes text = {0};
    tddp_status status = tddp_launch_state_write(doc, &text);
    const tddp_slice now = {text.data, text.size};
    if (status == TDDP_OK &&
        (now.size != before.size || memcmp(now.data, before.data, now.size) != 0)) {
        status = node->link.backend->put_state(&node->link, before, now);
        if (status == TDDP_OK) {
            tddp_blob_free(&node->view.state);
            status = tddp_blob_copy(now, &node->view.state);
        }
    }
    tddp_bytes_free(&text);
    return status;
}

/* Entries of nodes that have left stay until they are read. */
static tddp_status remove_entries(tddp_launch_node *node)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; i < node->view.count && status == TDDP_OK; i++) {
        const tddp_launch_entry *entry = &node->view.entries[i];
        if (entry->leaves && strcmp(entry->self.id, node->entry.self.id) != 0) {
            status = node->link.backend->remove_entry(&node->link, entry->self.id);
        }
    }
    return status;
}

static tddp_status decide(tddp_launch_node *node)
{
    tddp_status status = node->coordinator ? TDDP_OK : create_coordinator(node);
    if (status == TDDP_OK) {
        status = tddp_launch_coordinator_take(node->coordinator, node->view.entries,
                                              node->view.count, tddp_now_ns());
    }
    status = status == TDDP_OK ? write_state(node) : status;
    return status == TDDP_OK ? remove_entries(node) : status;
}

/* Where a node serves the store it leads; others try only if it is of another job. */
static bool may_try(tddp_launch_node *node)
{
    if (node->host || node->link.backend->survives) {
        return true;
    }
    node->lead_at = node->lead_at ? node->lead_at : tddp_deadline_after_ms(LEAD_MS);
    return tddp_now_ns() >= node->lead_at;
}

tddp_status tddp_launch_node_lead(tddp_launch_node *node)
{
    bool own = strcmp(node->view.leader, node->link.id) == 0;
    tddp_status status = TDDP_OK;
    if (node->leads && !own) {
        tddp_launch_node_step_down(node);
    }
    if (node->candidate && !node->leads && (own || !node->view.leader[0]) && may_try(node)) {
        status = node->link.backend->lead(&node->link);
        node->leads = status == TDDP_OK;
    }
    node->lead_at = node->view.leader[0] ? 0 : node->lead_at;
    if (node->leads) {
        memcpy(node->view.leader, node->link.id, sizeof node->view.leader);
    }
    if (node->leads) {
        status = decide(node);
    }
    if (status == TDDP_NOT_FOUND) { /* another one was quicker */
        tddp_launch_node_step_down(node);
        return TDDP_OK;
    }
    return status;
}
