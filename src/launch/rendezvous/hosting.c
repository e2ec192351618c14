/*
 * Whether this node serves the store where the nodes meet, and may lead there. c10d and static: if
 * the endpoint is an address of its own, or it is told to; asked before anything else, and again
 * while nobody is found, since what held the port then may be gone. A store of another job that is
 * there is as good. etcd: nothing is served, and any node may lead. Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum { LOOKUP_MS = 10 * 1000, DEFER_MS = 1000, STEP_MS = 20 };

/* Whether one of the endpoint's addresses is this machine's, and (port 0: or not) its port free. */
static bool can_listen(const tddp_launch_node *node, int port)
{
    const tddp_launch_endpoint *endpoint = &node->options->endpoints[0];
    tddp_net_address found[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    char text[TDDP_NET_TEXT_BYTES];
    if (tddp_net_resolve(endpoint->host, endpoint->port, tddp_deadline_after_ms(LOOKUP_MS),
                         tddp_cancel_fd(node->cancel), found, TDDP_NET_MAX_ADDRESSES,
                         &count) != TDDP_OK) {
        return false; /* connecting tries again, with a message */
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

static tddp_status serve(tddp_launch_node *node)
{
    const tddp_launch_endpoint *endpoint = &node->options->endpoints[0];
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = endpoint->host;
    opts.port = endpoint->port;
    tddp_status status = tddp_store_server_start(&opts, &node->host);
    if (status == TDDP_OK) {
        node->link.server = node->host;
        node->candidate = true;
    }
    return status;
}

/* Serves the endpoint if it is here and free. Else another node was quicker, or another job. */
static tddp_status serve_if_free(tddp_launch_node *node)
{
    int port = node->options->endpoints[0].port;
    tddp_status status = can_listen(node, port) ? serve(node) : TDDP_OK;
    node->candidate |= !node->host && can_listen(node, 0);
    return status == TDDP_ADDRESS_IN_USE ? TDDP_OK : status;
}

/* Whether a store is there, or will be in a moment. */
static bool find_store(tddp_launch_node *node)
{
    int64_t deadline = tddp_deadline_after_ms(DEFER_MS);
    while (node->link.backend->connect(&node->link, DEFER_MS) != TDDP_OK) {
        if (tddp_now_ns() >= deadline || (tddp_net_sleep(tddp_deadline_after_ms(STEP_MS),
                                                         tddp_cancel_fd(node->cancel)) != TDDP_OK &&
                                          !tddp_launch_node_take_requests(node))) {
            return false;
        }
    }
    return true;
}

/* Serves the endpoint, unless a store is there already. */
static tddp_status serve_unless_served(tddp_launch_node *node)
{
    tddp_status status = serve(node);
    if (status != TDDP_ADDRESS_IN_USE || node->options->backend == TDDP_LAUNCH_STATIC) {
        return status;
    }
    char *reason = tddp_copy_string(tddp_error_message());
    if (!reason) {
        return TDDP_OUT_OF_MEMORY;
    }
    bool found = find_store(node);
    bool told_to_end = node->leave || node->quit;
    node->candidate = found;
    status = found || told_to_end ? TDDP_OK : tddp_fail(TDDP_ADDRESS_IN_USE, "%s", reason);
    free(reason);
    return status;
}

/* Of nodes with ranks the first one serves: always in the static rendezvous, where that is a rule,
 * else if the endpoint is here. If the machine is another node's, that one does, but not before the
 * first had a moment to: both may be on one machine. */
static tddp_status serve_by_rank(tddp_launch_node *node)
{
    bool first = node->options->node_rank == 0;
    if (node->options->backend == TDDP_LAUNCH_STATIC) {
        return first ? serve_unless_served(node) : TDDP_OK;
    }
    if (!can_listen(node, 0)) {
        return TDDP_OK;
    }
    if (first) {
        return serve_unless_served(node);
    }
    return find_store(node) ? TDDP_OK : serve_if_free(node);
}

tddp_status tddp_launch_host_if_chosen(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->options;
    if (options->backend == TDDP_LAUNCH_ETCD) {
        node->candidate = options->conf.is_host != 0;
        return TDDP_OK;
    }
    if (options->conf.is_host == 0) {
        return TDDP_OK;
    }
    return options->conf.is_host > 0 ? serve_unless_served(node)
           : options->node_rank >= 0 ? serve_by_rank(node)
                                     : serve_if_free(node);
}

tddp_status tddp_launch_host_late(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->options;
    bool may = options->backend == TDDP_LAUNCH_C10D && options->conf.is_host != 0;
    return may && !node->host && !node->was_in ? serve_if_free(node) : TDDP_OK;
}
