/*
 * This node's place in a round: its ranks, and on rank 0's node the store for the workers of all.
 * Ranks go by node, then by local rank; within a role the same. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"

void tddp_launch_place_take(tddp_launch_node *node, const tddp_launch_state *doc, int rank)
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

/* --- the workers' store ---------------------------------------------------------------------- */

/* Where the others find what listens here. */
static tddp_status choose_address(tddp_launch_node *node, const tddp_launch_state *doc)
{
    tddp_launch_entry *entry = &node->entry;
    if (node->options->local_addr) {
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

tddp_status tddp_launch_place_open_store(tddp_launch_node *node, const tddp_launch_state *doc)
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
    if (node->host && !node->options->local_addr) {
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
