/*
 * Checks of several flags together: refuses contradictions, and resolves what was left open (ports,
 * the number of workers, the program). Pure: one thread, no global.
 */
#include <string.h>

#include "base/base.h"
#include "launch/command/options.h"

enum {
    C10D_PORT = 29400,
    STATIC_PORT = 29500,
    ETCD_PORT = 2379,
    LEAST_ETCD_SILENCE_S =
        3, /* its leases last 2 s at least, and the coordinator waits after that */
    MOST_RUN_ID_BYTES = 256, /* in etcd's keys */
    CHECKED_WORKERS = 2,
    /* PyTorch's. */
    KEEP_ALIVE_INTERVAL_S = 5,
    KEEP_ALIVE_MAX_ATTEMPT = 3,
    SILENCE_S = 30
};

/* --- what is run ----------------------------------------------------------------------------- */

static tddp_status exclusive(const char *one, const char *other)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s cannot go with %s; leave one of them out", one,
                     other);
}

static tddp_status resolve_check(const tddp_launch_options *options)
{
    if (options->script) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--check runs a program of its own; leave out %.256s", options->script);
    }
    return options->code        ? exclusive("--check", "-e")
           : options->as_module ? exclusive("--check", "-m")
           : options->no_ruby   ? exclusive("--check", "--no-ruby")
                                : TDDP_OK;
}

static tddp_status resolve_program(tddp_launch_options *options)
{
    if (options->check) {
        return resolve_check(options);
    }
    if (options->code && options->no_ruby) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "-e is Ruby code and cannot go with --no-ruby");
    }
    if (options->as_module && options->code) {
        return exclusive("-m", "-e");
    }
    if (options->as_module && options->no_ruby) {
        return exclusive("-m", "--no-ruby");
    }
    if (options->run_path && (options->as_module || options->code)) {
        return exclusive("--run-path", options->as_module ? "-m" : "-e");
    }
    if (!options->script && !options->code) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "no %s given; expected torchrun [FLAGS] %s [ARGUMENTS]; see "
                         "torchrun --help",
                         options->as_module ? "module" : "script",
                         options->as_module ? "-m NAME" : "SCRIPT");
    }
    if (options->as_module) {
        options->module = options->script;
        options->script = NULL;
    }
    if (options->run_path) {
        options->no_ruby = false; /* as in PyTorch, where it is the stronger of the two */
    }
    return TDDP_OK;
}

/* --- where nodes meet ------------------------------------------------------------------------ */

int tddp_launch_silence_s(const tddp_launch_options *options)
{
    const tddp_launch_conf *conf = &options->conf;
    int interval =
        conf->keep_alive_interval > 0 ? conf->keep_alive_interval : KEEP_ALIVE_INTERVAL_S;
    int attempts =
        conf->keep_alive_max_attempt > 0 ? conf->keep_alive_max_attempt : KEEP_ALIVE_MAX_ATTEMPT;
    if (conf->keep_alive_interval > 0 || conf->keep_alive_max_attempt > 0) {
        return interval * attempts;
    }
    return conf->heartbeat_timeout >= 0             ? conf->heartbeat_timeout
           : options->backend == TDDP_LAUNCH_STATIC ? 0
                                                    : SILENCE_S;
}

bool tddp_launch_is_elastic(const tddp_launch_options *options)
{
    return options->min_nodes < options->max_nodes && options->backend != TDDP_LAUNCH_STATIC;
}

static tddp_status check_several_nodes(const tddp_launch_options *options)
{
    bool dynamic = options->backend != TDDP_LAUNCH_STATIC;
    if (options->min_nodes < options->max_nodes && !dynamic) {
        return tddp_fail(
            TDDP_INVALID_ARGUMENT,
            "--nnodes=%d:%d: nodes that come and go need --rdzv-backend=c10d (or etcd) "
            "and --rdzv-endpoint=HOST:PORT",
            options->min_nodes, options->max_nodes);
    }
    if (!dynamic && options->node_rank < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nnodes=%d needs --node-rank=N on each node, 0 to %d (or "
                         "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, which can do without)",
                         options->max_nodes, options->max_nodes - 1);
    }
    if (options->endpoint_count == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nnodes=%d needs the place where the nodes meet, the same on each: %s",
                         options->max_nodes,
                         dynamic ? "--rdzv-endpoint=HOST:PORT"
                                 : "--master-addr=HOST and --master-port=PORT");
    }
    for (int i = 0; i < options->endpoint_count; i++) {
        if (options->endpoints[i].port == 0) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "%.256s, port 0: expected a port from 1 to 65535, since the other "
                             "nodes must know it",
                             options->endpoints[i].host);
        }
    }
    return TDDP_OK;
}

/* --master-addr and --master-port are an endpoint too, unless one was given. */
static tddp_status take_master(tddp_launch_options *options)
{
    tddp_launch_endpoint *endpoint = &options->endpoints[0];
    if (!tddp_launch_endpoint_read(options->master_addr, endpoint) || endpoint->port >= 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--master-addr=%.256s: expected an address or a host's name; the port is "
                         "--master-port",
                         options->master_addr);
    }
    endpoint->port = options->master_port;
    options->endpoint_count = 1;
    return TDDP_OK;
}

static tddp_status check_etcd(const tddp_launch_options *options)
{
    int silence_s = tddp_launch_silence_s(options);
    if (!options->run_id || strlen(options->run_id) > MOST_RUN_ID_BYTES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--rdzv-backend=etcd needs --rdzv-id=ID, at most %d bytes, that no other "
                         "job in this etcd has",
                         MOST_RUN_ID_BYTES);
    }
    if (silence_s < LEAST_ETCD_SILENCE_S) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--rdzv-conf: a node that counts as lost after %d s: expected at least "
                         "%d s with --rdzv-backend=etcd, whose leases take 2 s to run out",
                         silence_s, LEAST_ETCD_SILENCE_S);
    }
    return TDDP_OK;
}

static tddp_status check_backend(const tddp_launch_options *options)
{
    bool etcd = options->backend == TDDP_LAUNCH_ETCD;
    if (etcd && options->max_nodes > 1) {
        return check_etcd(options);
    }
    if (!etcd && options->endpoint_count > 1) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--rdzv-endpoint: %d endpoints need --rdzv-backend=etcd; expected one",
                         options->endpoint_count);
    }
    if (!etcd && options->conf.etcd_key) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--rdzv-conf: %s needs --rdzv-backend=etcd; leave it out",
                         options->conf.etcd_key);
    }
    return TDDP_OK;
}

static tddp_status resolve_endpoints(tddp_launch_options *options)
{
    bool is_static = options->backend == TDDP_LAUNCH_STATIC;
    tddp_status checked = check_backend(options);
    if (checked != TDDP_OK) {
        return checked;
    }
    if (is_static && options->endpoint_count == 0 && options->master_addr) {
        tddp_status status = take_master(options);
        if (status != TDDP_OK) {
            return status;
        }
    }
    for (int i = 0; i < options->endpoint_count; i++) {
        if (options->endpoints[i].port < 0) {
            options->endpoints[i].port = options->backend == TDDP_LAUNCH_ETCD ? ETCD_PORT
                                         : !is_static                         ? C10D_PORT
                                         : options->max_nodes > 1             ? STATIC_PORT
                                                                              : 0;
        }
    }
    return TDDP_OK;
}

static tddp_status resolve_nodes(tddp_launch_options *options)
{
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
    if (options->standalone) {
        options->endpoint_count = 0;
        return TDDP_OK;
    }
    tddp_status status = resolve_endpoints(options);
    return status == TDDP_OK && options->max_nodes > 1 ? check_several_nodes(options) : status;
}

tddp_status tddp_launch_options_resolve(tddp_launch_options *options)
{
    tddp_status status = resolve_program(options);
    if (status == TDDP_OK) {
        status = resolve_nodes(options);
    }
    if (options->processes.kind == TDDP_LAUNCH_PROCESSES_NUMBER && options->processes.number == 0) {
        bool pair = options->check && options->max_nodes == 1;
        options->processes.number = pair ? CHECKED_WORKERS : 1;
    }
    return status;
}

/* --- once the workers are counted ------------------------------------------------------------ */

static tddp_status check_highest(const char *flag, int highest, int local_size)
{
    if (highest < local_size) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s names local rank %d: expected 0 to %d, since this node runs %d worker%s",
                     flag, highest, local_size - 1, local_size, local_size == 1 ? "" : "s");
}

tddp_status tddp_launch_options_check_local(const tddp_launch_options *options, int local_size)
{
    const tddp_launch_streams *redirects = &options->redirects;
    const tddp_launch_streams *tee = &options->tee;
    const tddp_launch_ranks *ranks = &options->local_ranks_filter;
    tddp_status status = TDDP_OK;
    if (redirects->count > 0) {
        status = check_highest("--redirects", redirects->listed[redirects->count - 1].local_rank,
                               local_size);
    }
    if (status == TDDP_OK && tee->count > 0) {
        status = check_highest("--tee", tee->listed[tee->count - 1].local_rank, local_size);
    }
    if (status == TDDP_OK && ranks->count > 0) {
        status = check_highest("--local-ranks-filter", ranks->listed[ranks->count - 1], local_size);
    }
    return status;
}
