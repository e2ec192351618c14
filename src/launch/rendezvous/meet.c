/*
 * How a node gets to the store where all meet, and to its rank. Runs on the rendezvous thread.
 *
 * Keys, below torchrun/RUN_ID/ (watch.c and join.c have the rest):
 *
 *   job          "nodes=2 restarts=0", by the host: what all nodes must agree on
 *   claim/RANK   "HOST pid PID" of the node that holds the rank
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tddp/store.h>

#include "launch/guard/guard.h"
#include "launch/rendezvous/nodes.h"
#include "net/net.h"

enum {
    DEFAULT_STATIC_PORT = 29500,
    DEFAULT_C10D_PORT = 29400,
    LOOKUP_MS = 10 * 1000,
    SAY_EVERY_MS = 10 * 1000
};

tddp_slice tddp_launch_slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

tddp_wait tddp_launch_wait(const tddp_launch_nodes *nodes, int64_t timeout_ms)
{
    return (tddp_wait){timeout_ms, nodes->cancel};
}

tddp_wait tddp_launch_short_wait(void)
{
    return (tddp_wait){TDDP_LAUNCH_ANSWER_MS, NULL};
}

static void find_endpoint(tddp_launch_nodes *nodes)
{
    const tddp_launch_options *options = nodes->options;
    bool dynamic = options->backend == TDDP_LAUNCH_C10D;
    const tddp_launch_endpoint *endpoint = &options->endpoints[0];
    bool given = options->endpoint_count > 0;
    (void)snprintf(nodes->host, sizeof nodes->host, "%s",
                   given ? endpoint->host : options->master_addr);
    nodes->port = endpoint->port >= 0 ? endpoint->port : -1;
    if (nodes->port < 0 && !dynamic) {
        nodes->port = options->master_port;
    }
    if (nodes->port < 0) {
        nodes->port = dynamic ? DEFAULT_C10D_PORT : DEFAULT_STATIC_PORT;
    }
}

/* Whether one of the endpoint's addresses is this machine's and its port free. */
static bool may_host(const tddp_launch_nodes *nodes)
{
    tddp_net_address found[8];
    size_t count;
    char text[TDDP_NET_TEXT_BYTES];
    if (tddp_net_resolve(nodes->host, nodes->port, tddp_deadline_after_ms(LOOKUP_MS),
                         tddp_cancel_fd(nodes->cancel), found, 8, &count) != TDDP_OK) {
        return false; /* the client tries again, with a message */
    }
    for (size_t i = 0; i < count; i++) {
        int fd;
        if (tddp_net_listen(tddp_net_host_text(&found[i], text), nodes->port, &fd) == TDDP_OK) {
            tddp_close(fd);
            return true;
        }
    }
    return false;
}

static tddp_status start_server(tddp_launch_nodes *nodes)
{
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = nodes->host;
    opts.port = nodes->port;
    return tddp_store_server_start(&opts, &nodes->server);
}

/* Becomes the host if this node is to be it. */
static tddp_status host_if_chosen(tddp_launch_nodes *nodes)
{
    const tddp_launch_options *options = nodes->options;
    bool told = options->conf.is_host >= 0 || options->node_rank >= 0;
    bool chosen = options->conf.is_host >= 0 ? options->conf.is_host == 1
                  : options->node_rank >= 0  ? options->node_rank == 0
                                             : may_host(nodes);
    if (!chosen) {
        return TDDP_OK;
    }
    tddp_status status = start_server(nodes);
    if (status == TDDP_ADDRESS_IN_USE && !told) {
        return TDDP_OK; /* another node of this machine was quicker: it is the host */
    }
    nodes->hosting = status == TDDP_OK;
    return status;
}

static tddp_status connect_store(tddp_launch_nodes *nodes)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = nodes->hosting ? tddp_store_server_address(nodes->server) : nodes->host;
    opts.port = nodes->port;
    opts.wait_for_workers = 0;
    opts.timeout_ms = (int64_t)nodes->options->conf.join_timeout * 1000;
    tddp_wait wait = tddp_launch_wait(nodes, opts.timeout_ms);
    tddp_store *plain;
    tddp_status status = tddp_tcp_store_open(&opts, &wait, &plain);
    if (status != TDDP_OK) {
        return status;
    }
    char *prefix = tddp_format("torchrun/%s", nodes->run_id);
    status = prefix ? tddp_prefix_store_create(prefix, plain, &nodes->store) : TDDP_OUT_OF_MEMORY;
    free(prefix);
    tddp_store_release(plain);
    return status;
}

/* Waits for the host's word; long only if the host runs another job or none of ours. */
static tddp_status await_job(const tddp_launch_nodes *nodes, tddp_slice job)
{
    int64_t deadline = tddp_deadline_after_ms((int64_t)nodes->options->conf.join_timeout * 1000);
    for (;;) {
        int64_t left = tddp_deadline_poll_ms(deadline);
        tddp_wait wait = tddp_launch_wait(nodes, left < SAY_EVERY_MS ? left : SAY_EVERY_MS);
        tddp_status status = tddp_store_wait(nodes->store, &job, 1, &wait);
        if (status != TDDP_TIMEOUT) {
            return status;
        }
        if (tddp_now_ns() >= deadline) {
            return tddp_fail(TDDP_TIMEOUT,
                             "the store at %s:%d knows no job \"%s\"; expected the same --rdzv-id "
                             "and endpoint on all nodes",
                             nodes->host, nodes->port, nodes->run_id);
        }
        tddp_log(TDDP_LOG_WARN, "launch", "waiting at %s:%d for the job \"%s\"", nodes->host,
                 nodes->port, nodes->run_id);
    }
}

/* The host says what the job is, the others compare. */
static tddp_status agree(tddp_launch_nodes *nodes)
{
    char mine[64];
    tddp_blob theirs;
    (void)snprintf(mine, sizeof mine, "--nnodes=%d --max-restarts=%d", nodes->options->max_nodes,
                   nodes->options->max_restarts);
    tddp_slice job = tddp_launch_slice("job");
    if (nodes->hosting) {
        tddp_wait wait = tddp_launch_short_wait();
        return tddp_store_set(nodes->store, job, tddp_launch_slice(mine), &wait);
    }
    tddp_status status = await_job(nodes, job);
    if (status == TDDP_OK) {
        tddp_wait wait = tddp_launch_short_wait();
        status = tddp_store_get(nodes->store, job, &wait, &theirs);
    }
    if (status != TDDP_OK) {
        return status;
    }
    if (strcmp(theirs.data, mine) != 0) {
        status = tddp_fail(TDDP_MISMATCH,
                           "the job at %s:%d was started with %.64s, this node with %s; expected "
                           "the same on all nodes",
                           nodes->host, nodes->port, theirs.data, mine);
    }
    tddp_blob_free(&theirs);
    return status;
}

/* Claims one rank; `*holder` is who has it (free with tddp_blob_free()), `*won` whether it is us.
 */
static tddp_status claim(tddp_launch_nodes *nodes, int rank, tddp_blob *holder, bool *won)
{
    char key[32];
    char name[64] = "?";
    char mine[128];
    tddp_wait wait = tddp_launch_short_wait();
    (void)gethostname(name, sizeof name - 1);
    (void)snprintf(key, sizeof key, "claim/%d", rank);
    (void)snprintf(mine, sizeof mine, "%s pid %d", name, (int)tddp_launch_torchrun_pid());
    tddp_status status =
        tddp_store_compare_set(nodes->store, tddp_launch_slice(key), tddp_launch_slice(""),
                               tddp_launch_slice(mine), &wait, holder);
    *won = status == TDDP_OK && strcmp(holder->data, mine) == 0;
    return status;
}

static tddp_status claim_rank(tddp_launch_nodes *nodes)
{
    int given = nodes->options->node_rank;
    int first = given >= 0 ? given : 0;
    int last = given >= 0 ? given : nodes->options->max_nodes - 1;
    for (int rank = first; rank <= last; rank++) {
        tddp_blob holder;
        bool won;
        tddp_status status = claim(nodes, rank, &holder, &won);
        if (status != TDDP_OK) {
            return status;
        }
        if (won) {
            tddp_blob_free(&holder);
            nodes->rank = rank;
            return TDDP_OK;
        }
        if (given >= 0) {
            status = tddp_fail(TDDP_INVALID_ARGUMENT,
                               "--node-rank=%d is taken already by %.100s; expected another rank "
                               "on each node",
                               rank, holder.data);
        }
        tddp_blob_free(&holder);
        if (status != TDDP_OK) {
            return status;
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "the job \"%s\" at %s:%d has its %d nodes already; start more with a larger "
                     "--nnodes on all of them",
                     nodes->run_id, nodes->host, nodes->port, nodes->options->max_nodes);
}

tddp_status tddp_launch_nodes_meet(tddp_launch_nodes *nodes)
{
    find_endpoint(nodes);
    tddp_status status = host_if_chosen(nodes);
    if (status == TDDP_OK) {
        status = connect_store(nodes);
    }
    /* The host claims before it opens the job to the others, so that unnumbered it becomes 0. */
    if (status == TDDP_OK && nodes->hosting) {
        status = claim_rank(nodes);
    }
    if (status == TDDP_OK) {
        status = agree(nodes);
    }
    if (status == TDDP_OK && !nodes->hosting) {
        status = tddp_launch_nodes_arrive(nodes);
    }
    if (status == TDDP_OK && !nodes->hosting) {
        status = claim_rank(nodes);
    }
    return status;
}

void tddp_launch_nodes_close(tddp_launch_nodes *nodes)
{
    tddp_store_release(nodes->store);
    tddp_store_server_stop(nodes->workers);
    tddp_store_server_stop(nodes->server);
    nodes->store = NULL;
    nodes->workers = nodes->server = NULL;
}
