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
}

/* Goes on with the document that there is, but for one of a job that has ended before this node
 * came. What is no document is written over. */
static tddp_status create_coordinator(tddp_launch_node *node)
{
    const tddp_launch_coordinator_opts opts = {.options = node->link.options,
                                               .times = &node->link.times,
                                               .run_id = node->link.run_id,
                                               .where = node->where,
                                               .job = node->entry.job,
                                               .started = tddp_launch_new_generation()};
    tddp_launch_state doc = {0};
    const tddp_blob *found = &node->view.state;
    tddp_status status = tddp_launch_coordinator_create(&opts, tddp_now_ns(), &node->coordinator);
    if (status == TDDP_OK && found->data) {
        status = tddp_launch_state_read(found->data, found->size, &doc);
        if (status == TDDP_OK &&
            (doc.stage != TDDP_LAUNCH_STAGE_ENDED || doc.started == node->started)) {
            status = tddp_launch_coordinator_adopt(node->coordinator, &doc, tddp_now_ns());
        }
        tddp_launch_state_free(&doc);
    }
    return status == TDDP_PROTOCOL ? TDDP_OK : status;
}

/* If the document is another than the one that is there. */
static tddp_status write_state(tddp_launch_node *node)
{
    tddp_blob *found = &node->view.state;
    const tddp_slice before = {found->data, found->size};
    tddp_bytes text = {0};
    tddp_status status =
        tddp_launch_state_write(tddp_launch_coordinator_state(node->coordinator), &text);
    const tddp_slice now = {text.data, text.size};
    if (status == TDDP_OK &&
        (now.size != before.size || memcmp(now.data, before.data, now.size) != 0)) {
        status = node->link.backend->put_state(&node->link, before, now);
        if (status == TDDP_OK) {
            tddp_blob_free(found);
            status = tddp_blob_copy(now, found);
        }
    }
    tddp_bytes_free(&text);
    return status;
}

static tddp_status decide(tddp_launch_node *node)
{
    const tddp_launch_view *view = &node->view;
    tddp_status status =
        tddp_launch_coordinator_take(node->coordinator, view->entries, view->count, tddp_now_ns());
    status = status == TDDP_OK ? write_state(node) : status;
    /* Entries of nodes that have left stay until they are read. */
    for (int i = 0; i < view->count && status == TDDP_OK; i++) {
        const tddp_launch_entry *entry = &view->entries[i];
        if (entry->leaves && strcmp(entry->self.id, node->link.id) != 0) {
            status = node->link.backend->remove_entry(&node->link, entry->self.id);
        }
    }
    return status;
}

tddp_status tddp_launch_node_lead(tddp_launch_node *node)
{
    bool own = strcmp(node->view.leader, node->link.id) == 0;
    /* Where a node serves the store it leads; others may only if it is of another job. */
    bool may = node->candidate && !node->over && (own || !node->view.leader[0]) &&
               (node->link.server || node->link.backend->survives ||
                tddp_now_ns() >= tddp_deadline_from(node->alone_ns, LEAD_MS));
    tddp_status status = TDDP_OK;
    if (!own) {
        tddp_launch_node_step_down(node);
    }
    if (!node->coordinator && may) {
        status = node->link.backend->lead(&node->link);
        if (status == TDDP_OK) {
            memcpy(node->view.leader, node->link.id, sizeof node->view.leader);
            status = create_coordinator(node);
        }
    }
    if (status == TDDP_OK && node->coordinator) {
        status = decide(node);
    }
    if (status == TDDP_NOT_FOUND) { /* another one was quicker */
        tddp_launch_node_step_down(node);
        return TDDP_OK;
    }
    return status;
}
