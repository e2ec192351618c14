/*
 * Opens a TCP store: checks its options, starts the server that it may host, and waits for the
 * other workers. Any thread; a store is not shared before it is open. The number of missing workers
 * is logged every ten seconds. connect.c makes the connections.
 */
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "store/server/server.h"
#include "store/tcp/tcp.h"

enum { WORKERS_POLL_MS = 10 };

static const tddp_slice workers_key = {"init/", 5};

static tddp_status count_in(tddp_tcp_store *tcp, int64_t delta, const tddp_store_call *call,
                            int64_t *count)
{
    return tddp_tcp_ops.add(&tcp->base, workers_key, delta, call, count);
}

/* Increments the count of workers; the process with the server waits until all have. */
static tddp_status wait_for_workers(tddp_tcp_store *tcp, const tddp_tcp_store_opts *opts,
                                    const tddp_store_call *call)
{
    int64_t start = tddp_now_ns();
    int64_t report_at = start + tddp_tcp_report_every_ms * TDDP_NS_PER_MS;
    int64_t joined;
    tddp_status status = count_in(tcp, 1, call, &joined);
    while (status == TDDP_OK && opts->is_server && joined < opts->world_size) {
        int64_t now = tddp_now_ns();
        if (now >= call->deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT,
                             "timed out after %g s waiting for clients: %lld of %d joined (%s)",
                             (double)call->timeout_ms / 1000, (long long)joined, opts->world_size,
                             tcp->name + strlen("store "));
        }
        if (now >= report_at) {
            tddp_log(TDDP_LOG_WARN, "store",
                     "waiting for %lld of %d workers at the %s, %lld s so far",
                     (long long)(opts->world_size - joined), opts->world_size, tcp->name,
                     (long long)((now - start) / TDDP_NS_PER_S));
            report_at = now + tddp_tcp_report_every_ms * TDDP_NS_PER_MS;
        }
        int64_t pause_end = now + WORKERS_POLL_MS * TDDP_NS_PER_MS;
        status = tddp_net_sleep(pause_end, tddp_store_call_cancel_fd(call));
        status = status ? status : count_in(tcp, 0, call, &joined);
    }
    return status;
}

static tddp_status check_options(const tddp_tcp_store_opts *opts, tddp_store **out)
{
    if (!out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "TCP store: out is NULL");
    }
    if (!opts->host || !*opts->host) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "TCP store: the host is missing, expected a name or an address");
    }
    if (opts->world_size < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "TCP store: world size %d, expected 0 or more",
                         opts->world_size);
    }
    return tddp_net_check_port(opts->port, opts->is_server ? 0 : 1);
}

static tddp_status start_server(const tddp_tcp_store_opts *opts, tddp_tcp_server **out)
{
    tddp_tcp_server *server = tddp_alloc(sizeof *server);
    if (!server) {
        tddp_net_close(opts->listen_fd);
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&server->owners, 1);
    tddp_store_server_opts server_opts = TDDP_STORE_SERVER_OPTS_INIT;
    server_opts.host = opts->host;
    server_opts.port = opts->port;
    server_opts.listen_fd = opts->listen_fd;
    tddp_status status = tddp_store_server_start(&server_opts, &server->server);
    if (status) {
        free(server);
    } else {
        *out = server;
    }
    return status;
}

static tddp_status open_store(const tddp_tcp_store_opts *opts, const tddp_wait *wait,
                              tddp_store **out)
{
    tddp_status status;
    int64_t timeout_ms = opts->timeout_ms > 0 ? opts->timeout_ms : TDDP_STORE_DEFAULT_TIMEOUT_MS;
    tddp_store_call call = tddp_store_call_begin(wait, timeout_ms);
    tddp_tcp_server *server = NULL;
    if (opts->is_server) {
        status = start_server(opts, &server);
        if (status) {
            return status;
        }
    }
    int port = server ? tddp_store_server_port(server->server) : opts->port;
    /* Its own server it reaches whatever the host is called. */
    const char *reach_at = server ? tddp_store_server_address(server->server) : opts->host;
    tddp_tcp_store *tcp = NULL;
    status = tddp_tcp_connect(opts->host, reach_at, port, server, timeout_ms, NULL, &call, &tcp);
    tddp_tcp_server_release(server); /* the store has its own share now */
    if (status) {
        return status;
    }
    if (opts->world_size > 0 && opts->wait_for_workers) {
        status = wait_for_workers(tcp, opts, &call);
    }
    if (status) {
        tddp_store_release(&tcp->base);
    } else {
        *out = &tcp->base;
    }
    return status;
}

void tddp_tcp_store_opts_init(tddp_tcp_store_opts *opts, size_t size)
{
    const tddp_tcp_store_opts defaults = TDDP_TCP_STORE_OPTS_INIT;
    tddp_opts_fill(&defaults, sizeof defaults, opts, size);
}

tddp_status tddp_tcp_store_open(const tddp_tcp_store_opts *opts, const tddp_wait *wait,
                                tddp_store **out)
{
    tddp_tcp_store_opts all = TDDP_TCP_STORE_OPTS_INIT;
    tddp_status status =
        tddp_opts_read("TDDP_TCP_STORE_OPTS_INIT", opts,
                       TDDP_OPTS_UNTIL(tddp_tcp_store_opts, listen_fd), &all, sizeof all);
    status = status ? status : check_options(&all, out);
    return status ? status : open_store(&all, wait, out);
}
