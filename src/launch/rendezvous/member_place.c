/*
 * This node's place in a round: its ranks, and on rank 0's node the store for the workers of all.
 * Ranks go by node, then by local rank; within a role the same. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"

static int find_slot(const tddp_launch_message *round, int slot)
{
    for (int i = 0; i < round->count; i++) {
        if (round->members[i].slot == slot) {
            return i;
        }
    }
    return -1;
}

bool tddp_launch_place_take(tddp_launch_node *node, const tddp_launch_message *round)
{
    int rank = find_slot(round, node->slot);
    if (rank < 0) {
        return false;
    }
    tddp_launch_world world = {
        .node_rank = rank,
        .nodes = round->count,
        .local_size = node->local_size,
        .round = round->round,
        .restart = round->restart,
        .max_restarts = node->options->max_restarts,
        /* A coordinator's term grows by more than the rounds that it starts. */
        .generation = node->leader.term + round->round,
    };
    for (int i = 0; i < round->count; i++) {
        const tddp_launch_member *other = &round->members[i];
        int before = i < rank ? other->local_size : 0;
        bool same_role = strcmp(other->role, round->members[rank].role) == 0;
        world.size += other->local_size;
        world.base_rank += before;
        world.role_size += same_role ? other->local_size : 0;
        world.role_base_rank += same_role ? before : 0;
    }
    node->world = world;
    node->round = round->round;
    node->self.round = round->round;
    node->self.restart = round->restart;
    node->self.last_rank = rank;
    node->self.nodes = round->count;
    (void)snprintf(node->master_host, sizeof node->master_host, "%s", round->members[0].host);
    return true;
}

/* --- the workers' store ---------------------------------------------------------------------- */

/* Where the others find what listens here. */
static tddp_status choose_address(const tddp_launch_node *node, const tddp_launch_message *round,
                                  char address[TDDP_LAUNCH_ADDRESS_BYTES])
{
    if (node->options->local_addr) {
        (void)snprintf(address, TDDP_LAUNCH_ADDRESS_BYTES, "%s", node->self.addr);
        return TDDP_OK;
    }
    const char **others = tddp_alloc_array((size_t)round->count, sizeof *others);
    if (!others) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int i = 0; i < round->count; i++) {
        others[i] = round->members[i].addr;
    }
    tddp_launch_address_choose(node->self.addr, others, (size_t)round->count, node->cancel,
                               address);
    free(others);
    return TDDP_OK;
}

/* The static rendezvous promises its own port: there the first round's workers share the store
 * where the nodes meet. */
static bool shares_store(const tddp_launch_node *node)
{
    return node->options->backend == TDDP_LAUNCH_STATIC && node->world.round == 0 && node->host;
}

tddp_status tddp_launch_place_open_store(tddp_launch_node *node, const tddp_launch_message *round)
{
    tddp_launch_event event = {
        .kind = TDDP_LAUNCH_EVENT_MASTER, .slot = node->slot, .round = round->round};
    tddp_status status = choose_address(node, round, event.addr);
    if (status != TDDP_OK) {
        return status;
    }
    if (shares_store(node)) {
        event.port = tddp_launch_host_port(node->host);
    } else if (node->workers) {
        event.port = tddp_store_server_port(node->workers);
    } else {
        tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
        opts.host = event.addr;
        status = tddp_store_server_start(&opts, &node->workers);
        if (status != TDDP_OK) {
            return status;
        }
        event.port = tddp_store_server_port(node->workers);
    }
    return tddp_launch_node_push(node, &event);
}
