/*
 * Whether this node hosts a store for the others: at an endpoint that is an address of its own, or
 * where it is told to. Runs on the rendezvous thread, before anything else, and again while nobody
 * leads: what held the port then may be gone.
 */
#include <stdlib.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum { LOOKUP_MS = 10 * 1000, DEFER_MS = 1000 /* for another node to host */ };

/* Whether one of the endpoint's addresses is this machine's, and (port 0: or not) its port free. */
static bool can_listen(const tddp_launch_node *node, const tddp_launch_endpoint *endpoint, int port)
{
    tddp_net_address found[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    char text[TDDP_NET_TEXT_BYTES];
    if (tddp_net_resolve(endpoint->host, endpoint->port, tddp_deadline_after_ms(LOOKUP_MS),
                         tddp_cancel_fd(node->cancel), found, TDDP_NET_MAX_ADDRESSES,
                         &count) != TDDP_OK) {
        return false; /* looking for the leader tries again, with a message */
    }
    for (size_t i = 0; i < count; i++) {
        int fd;
        if (tddp_net_listen(tddp_net_host_text(&found[i], text), port, &fd) == TDDP_OK) {
            tddp_close(fd);
            return true;
        }
    }
    return false;
}

static tddp_status start_host(tddp_launch_node *node, int index)
{
    tddp_launch_host_opts opts = {
        .options = node->options,
        .times = node->times,
        .run_id = node->run_id,
        .endpoint_index = index,
        .endpoint_count = node->endpoint_count,
        .endpoints = node->endpoints,
    };
    tddp_status status = tddp_launch_host_start(&opts, &node->host);
    node->hosted = index;
    return status;
}

/* Hosts the first endpoint that is here and free, if there is one. */
static tddp_status host_free_one(tddp_launch_node *node)
{
    for (int i = 0; i < node->endpoint_count; i++) {
        if (can_listen(node, &node->endpoints[i], node->endpoints[i].port)) {
            tddp_status status = start_host(node, i);
            if (status != TDDP_ADDRESS_IN_USE) {
                return status;
            }
            /* Another node of this machine was quicker: it is the host. */
        }
    }
    return TDDP_OK;
}

/* Looks for a leader that is there or will be in a moment. */
static tddp_status find_for_a_moment(tddp_launch_node *node, tddp_launch_leader *out)
{
    tddp_launch_message end = {0};
    tddp_launch_search search = {.limit_ms = DEFER_MS, .lost = -1};
    tddp_status status = tddp_launch_find_leader(node, &search, out, &end);
    tddp_launch_message_free(&end);
    return status;
}

/* Hosts the only endpoint, unless another node of the job does already. */
static tddp_status host_only_one(tddp_launch_node *node)
{
    tddp_status status = start_host(node, 0);
    if (status != TDDP_ADDRESS_IN_USE || node->options->backend == TDDP_LAUNCH_STATIC) {
        return status;
    }
    char *reason = tddp_copy_string(tddp_error_message());
    if (!reason) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_launch_leader leader;
    status = find_for_a_moment(node, &leader);
    if (status == TDDP_OK) {
        tddp_launch_leader_forget(&leader);
    } else if (status != TDDP_CANCELED) {
        status = tddp_fail(TDDP_ADDRESS_IN_USE, "%s", reason);
    }
    free(reason);
    return status == TDDP_CANCELED ? TDDP_OK : status; /* the search that follows ends for it */
}

/* Of nodes with ranks the first one hosts the only endpoint: always in the static rendezvous, where
 * that is a rule, else if the endpoint is here. If another node's host has it, that one does, but
 * not before the first had a moment to: both may be on one machine. */
static tddp_status host_by_rank(tddp_launch_node *node)
{
    const tddp_launch_endpoint *only = &node->endpoints[0];
    bool first = node->options->node_rank == 0;
    if (node->options->backend == TDDP_LAUNCH_STATIC) {
        return first ? start_host(node, 0) : TDDP_OK;
    }
    if (!can_listen(node, only, 0)) {
        return TDDP_OK;
    }
    if (first) {
        return host_only_one(node);
    }
    tddp_launch_leader leader;
    tddp_status status = find_for_a_moment(node, &leader);
    if (status == TDDP_OK) {
        tddp_launch_leader_forget(&leader);
    }
    return status == TDDP_TIMEOUT ? host_free_one(node) : TDDP_OK;
}

tddp_status tddp_launch_host_if_chosen(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->options;
    bool only = node->endpoint_count == 1;
    if (options->conf.is_host == 0) {
        return TDDP_OK;
    }
    if (options->conf.is_host > 0 && only) {
        return host_only_one(node);
    }
    if (options->conf.is_host < 0 && only && options->node_rank >= 0) {
        return host_by_rank(node);
    }
    tddp_status status = host_free_one(node);
    if (status == TDDP_OK && !node->host && options->conf.is_host > 0) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "--rdzv-conf is_host=1: none of the endpoints is an address of this "
                           "host with a free port; give one that is, or let is_host away");
    }
    return status;
}

tddp_status tddp_launch_host_late(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->options;
    bool may = options->backend == TDDP_LAUNCH_C10D && options->conf.is_host != 0;
    return may && !node->host && !node->was_in ? host_free_one(node) : TDDP_OK;
}
