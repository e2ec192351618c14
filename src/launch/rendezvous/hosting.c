/*
 * Whether this node serves the store where the nodes meet, and may lead there. c10d and static: of
 * nodes with ranks the first one (with static always, with c10d if the endpoint is here), else who
 * has the endpoint's address, is first there, or is told to. If the endpoint is another node's than
 * the first, that one serves, but not before the first had a moment to: both may be on one machine.
 * A store of another job that is there is as good. etcd: nothing is served, and any node may lead.
 * Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum { LOOKUP_MS = 10 * 1000, DEFER_MS = 1000, STEP_MS = 20 };

/* Whether one of the endpoint's addresses is this machine's. */
static bool is_here(const tddp_launch_node *node)
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
        if (tddp_net_listen(tddp_net_host_text(&found[i], text), 0, &fd) == TDDP_OK) {
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

tddp_status tddp_launch_node_host(tddp_launch_node *node, bool first)
{
    const tddp_launch_options *options = node->options;
    bool fixed = options->backend == TDDP_LAUNCH_STATIC;
    bool chosen = options->conf.is_host > 0 || (fixed && options->node_rank == 0);
    if (options->backend == TDDP_LAUNCH_ETCD) {
        node->candidate = options->conf.is_host != 0;
        return TDDP_OK;
    }
    if (options->conf.is_host == 0 || node->host || (fixed && !(chosen && first)) ||
        (!chosen && !is_here(node))) {
        return TDDP_OK;
    }
    chosen |= options->node_rank == 0;
    if (first && !chosen && options->node_rank > 0 && find_store(node)) {
        return TDDP_OK; /* the first node is on this machine, too */
    }
    tddp_status status = serve(node);
    if (status != TDDP_ADDRESS_IN_USE || (fixed && first)) {
        return status;
    }
    char *reason = tddp_copy_string(tddp_error_message());
    bool must = first && chosen && !find_store(node) && !node->leave && !node->quit;
    status = !reason ? TDDP_OUT_OF_MEMORY
             : must  ? tddp_fail(TDDP_ADDRESS_IN_USE, "%s", reason)
                     : TDDP_OK;
    node->candidate = status == TDDP_OK;
    free(reason);
    return status;
}
