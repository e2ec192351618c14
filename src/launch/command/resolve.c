/*
 * Checks of several flags together: refuses contradictions, and resolves what was left open (ports,
 * the number of workers, the program). Pure: one thread, no global.
 */
#include <string.h>

#include "base/base.h"
#include "launch/command/flags.h"

enum {
    C10D_PORT = 29400,
    STATIC_PORT = 29500,
    ETCD_PORT = 2379,
    /* Its leases last 2 s at least, and the coordinator waits after that. */
    LEAST_ETCD_SILENCE_S = 3,
    CHECKED_WORKERS = 2,
    /* PyTorch's. */
    KEEP_ALIVE_INTERVAL_S = 5,
    KEEP_ALIVE_MAX_ATTEMPT = 3,
    SILENCE_S = 30
};

/* --- what is run ----------------------------------------------------------------------------- */

static tddp_status resolve_program(tddp_launch_options *options)
{
    const struct {
        bool given;
        const char *name;
    } kinds[] = {{options->check, "--check"},
                 {options->code, "-e"},
                 {options->as_module, "-m"},
                 {options->no_ruby, "--no-ruby"},
                 {options->run_path, "--run-path"}};
    const char *kind = NULL;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].given && kind) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s cannot go with %s; leave one of them out",
                             kind, kinds[i].name);
        }
        kind = kinds[i].given ? kinds[i].name : kind;
    }
    if (options->check && options->script) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--check runs a program of its own; leave out %.256s", options->script);
    }
    if (!options->check && !options->script && !options->code) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "no %s given; expected torchrun [FLAGS] %s [ARGUMENTS]; see torchrun "
                         "--help",
                         options->as_module ? "module" : "script",
                         options->as_module ? "-m NAME" : "SCRIPT");
    }
    if (options->as_module) {
        options->module = options->script;
        options->script = NULL;
    }
    return TDDP_OK;
}

/* --- where nodes meet ------------------------------------------------------------------------ */

int tddp_launch_silence_s(const tddp_launch_options *options)
{
    int interval = options->conf.keep_alive_interval;
    int attempts = options->conf.keep_alive_max_attempt;
    if (interval > 0 || attempts > 0) {
        return (interval > 0 ? interval : KEEP_ALIVE_INTERVAL_S) *
               (attempts > 0 ? attempts : KEEP_ALIVE_MAX_ATTEMPT);
    }
    return options->conf.heartbeat_timeout >= 0     ? options->conf.heartbeat_timeout
           : options->backend == TDDP_LAUNCH_STATIC ? 0
                                                    : SILENCE_S;
}

void tddp_launch_nodes_text(const tddp_launch_options *options, char text[TDDP_LAUNCH_NODES_BYTES])
{
    (void)snprintf(text, TDDP_LAUNCH_NODES_BYTES,
                   options->min_nodes < options->max_nodes ? "%d:%d" : "%d", options->min_nodes,
                   options->max_nodes);
}

bool tddp_launch_is_elastic(const tddp_launch_options *options)
{
    return options->min_nodes < options->max_nodes && options->backend != TDDP_LAUNCH_STATIC;
}

/* What several nodes lack to find each other, or NULL. */
static const char *missing(const tddp_launch_options *options)
{
    bool is_static = options->backend == TDDP_LAUNCH_STATIC;
    bool etcd = options->backend == TDDP_LAUNCH_ETCD;
    if (is_static && options->min_nodes < options->max_nodes) {
        return "--rdzv-backend=c10d (or etcd) and --rdzv-endpoint=HOST:PORT, as nodes come and go";
    }
    if (is_static && options->node_rank < 0) {
        return "--node-rank=N on each node (or --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, "
               "which can do without)";
    }
    if (etcd && !options->run_id) {
        return "--rdzv-id=ID, that no other job in this etcd has";
    }
    if (etcd && tddp_launch_silence_s(options) < LEAST_ETCD_SILENCE_S) {
        return "a heartbeat_timeout of at least 3 s with etcd, whose leases take 2 s to run out";
    }
    if (options->endpoint_count == 0) {
        return is_static ? "--master-addr=HOST and --master-port=PORT, the same on each node"
                         : "--rdzv-endpoint=HOST:PORT, the same on each node";
    }
    for (int i = 0; i < options->endpoint_count; i++) {
        if (options->endpoints[i].port == 0) {
            return "a port from 1 to 65535 with each endpoint, as the other nodes must know it";
        }
    }
    return NULL;
}

static tddp_status resolve_endpoints(tddp_launch_options *options)
{
    bool is_static = options->backend == TDDP_LAUNCH_STATIC;
    bool etcd = options->backend == TDDP_LAUNCH_ETCD;
    bool several = options->max_nodes > 1;
    const char *etcds =
        options->endpoint_count > 1 ? "more than one --rdzv-endpoint" : options->conf.etcd_key;
    if (!etcd && etcds) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s needs --rdzv-backend=etcd; leave it out",
                         etcds);
    }
    if (is_static && options->endpoint_count == 0 && options->master_addr[0] != '\0') {
        options->endpoints[0].port = options->master_port;
        memcpy(options->endpoints[0].host, options->master_addr, sizeof options->master_addr);
        options->endpoint_count = 1;
    }
    for (int i = 0; i < options->endpoint_count; i++) {
        int port = etcd ? ETCD_PORT : !is_static ? C10D_PORT : several ? STATIC_PORT : 0;
        if (options->endpoints[i].port < 0) {
            options->endpoints[i].port = port;
        }
    }
    char nodes[TDDP_LAUNCH_NODES_BYTES];
    const char *needed = several ? missing(options) : NULL;
    tddp_launch_nodes_text(options, nodes);
    return needed ? tddp_fail(TDDP_INVALID_ARGUMENT, "--nnodes=%s needs %s", nodes, needed)
                  : TDDP_OK;
}

tddp_status tddp_launch_options_resolve(tddp_launch_options *options)
{
    tddp_status status = resolve_program(options);
    if (status != TDDP_OK) {
        return status;
    }
    if (options->node_rank >= options->max_nodes) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--node-rank=%d: expected 0 to %d, since --nnodes=%d", options->node_rank,
                         options->max_nodes - 1, options->max_nodes);
    }
    if (options->standalone && options->max_nodes > 1) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--standalone is for one node, but --nnodes=%d; leave one of them out",
                         options->max_nodes);
    }
    if (options->processes == 0) {
        options->processes = options->check && options->max_nodes == 1 ? CHECKED_WORKERS : 1;
    }
    if (options->standalone) {
        options->endpoint_count = 0;
        return TDDP_OK;
    }
    return resolve_endpoints(options);
}

/* --- once the workers are counted ------------------------------------------------------------ */

tddp_status tddp_launch_options_check_local(const tddp_launch_options *options, int local_size)
{
    const struct {
        const char *flag;
        int highest;
    } lists[] = {{"--redirects", options->redirects.highest},
                 {"--tee", options->tee.highest},
                 {"--local-ranks-filter", options->local_ranks_filter.highest}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        if (lists[i].highest >= local_size) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "%s names local rank %d: expected 0 to %d, since this node runs %d "
                             "worker%s",
                             lists[i].flag, lists[i].highest, local_size - 1, local_size,
                             local_size == 1 ? "" : "s");
        }
    }
    return TDDP_OK;
}
