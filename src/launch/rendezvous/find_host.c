/*
 * Whether this node hosts the rendezvous. c10d and static: if the endpoint is an address of its
 * own, or it is told to; asked before anything else, and again while nobody leads, since what held
 * the port then may be gone. etcd: if nobody else does. Runs on the rendezvous thread.
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

static tddp_status start_host(tddp_launch_node *node)
{
    tddp_launch_host_opts opts = {
        .options = node->options, .times = node->times, .run_id = node->run_id};
    return tddp_launch_host_start(&opts, &node->host);
}

/* Hosts the endpoint if it is here and free. */
static tddp_status host_if_free(tddp_launch_node *node)
{
    const tddp_launch_endpoint *endpoint = &node->options->endpoints[0];
    tddp_status status = can_listen(node, endpoint, endpoint->port) ? start_host(node) : TDDP_OK;
    /* Else another node of this machine was quicker: it is the host. */
    return status == TDDP_ADDRESS_IN_USE ? TDDP_OK : status;
}

/* Looks for a leader that is there or will be in a moment. */
static tddp_status find_for_a_moment(tddp_launch_node *node, tddp_launch_leader *out)
{
    tddp_launch_message end = {0};
    tddp_launch_search search = {.limit_ms = DEFER_MS};
    tddp_status status = tddp_launch_find_leader(node, &search, out, &end);
    tddp_launch_message_free(&end);
    return status;
}

/* Hosts the endpoint, unless another node of the job does already. */
static tddp_status host_unless_hosted(tddp_launch_node *node)
{
    tddp_status status = start_host(node);
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
        tddp_launch_leader_forget(node, &leader);
    } else if (status != TDDP_CANCELED) {
        status = tddp_fail(TDDP_ADDRESS_IN_USE, "%s", reason);
    }
    free(reason);
    return status == TDDP_CANCELED ? TDDP_OK : status; /* the search that follows ends for it */
}

/* Of nodes with ranks the first one hosts: always in the static rendezvous, where that is a rule,
 * else if the endpoint is here. If another node's host has it, that one does, but not before the
 * first had a moment to: both may be on one machine. */
static tddp_status host_by_rank(tddp_launch_node *node)
{
    bool first = node->options->node_rank == 0;
    if (node->options->backend == TDDP_LAUNCH_STATIC) {
        return first ? start_host(node) : TDDP_OK;
    }
    if (!can_listen(node, &node->options->endpoints[0], 0)) {
        return TDDP_OK;
    }
    if (first) {
        return host_unless_hosted(node);
    }
    tddp_launch_leader leader;
    tddp_status status = find_for_a_moment(node, &leader);
    if (status == TDDP_OK) {
        tddp_launch_leader_forget(node, &leader);
    }
    return status == TDDP_TIMEOUT ? host_if_free(node) : TDDP_OK;
}

tddp_status tddp_launch_host_if_chosen(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->options;
    if (options->backend == TDDP_LAUNCH_ETCD || options->conf.is_host == 0) {
        return TDDP_OK;
    }
    return options->conf.is_host > 0 ? host_unless_hosted(node)
           : options->node_rank >= 0 ? host_by_rank(node)
                                     : host_if_free(node);
}

tddp_status tddp_launch_host_late(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->options;
    bool may = options->backend == TDDP_LAUNCH_C10D && options->conf.is_host != 0;
    return may && !node->host && !node->was_in ? host_if_free(node) : TDDP_OK;
}

tddp_status tddp_launch_host_campaign(tddp_launch_node *node)
{
    if (node->options->conf.is_host == 0) {
        return TDDP_OK;
    }
    tddp_launch_host_stop(node->host); /* it was deposed, whether it knows or not */
    node->host = NULL;
    tddp_status status = start_host(node);
    return status == TDDP_ADDRESS_IN_USE ? TDDP_OK : status;
}
