/*
 * How a TCP store comes to be and ends: starting a server, connecting with patience, the hello,
 * waiting for the other workers. Any thread; a store is not shared before it is finished. One line
 * every ten seconds tells a person what is being waited for.
 */
#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "store/server.h"
#include "store/tcp.h"

enum {
    TELL_EVERY_MS = 10000,
    /* A name that cannot be found is more likely wrong than late. */
    NAME_PATIENCE_MS = 30000,
    FIRST_PAUSE_MS = 20,
    LAST_PAUSE_MS = 1000,
    WORKERS_POLL_MS = 10,
    ATTEMPT_LEAST_MS = 2000,
    REASON_BYTES = 512,
};

static const tddp_slice workers_key = {"init/", 5};

static void server_release(tddp_tcp_server *server)
{
    if (server && atomic_fetch_sub(&server->owners, 1) == 1) {
        tddp_store_server_stop(server->server);
        free(server);
    }
}

void tddp_tcp_destroy(tddp_store *store)
{
    tddp_tcp_store *tcp = (tddp_tcp_store *)store;
    if (tcp->pid == getpid()) {
        tddp_net_close(tcp->fd);
    } else {
        tddp_close(tcp->fd); /* the parent still uses the connection */
    }
    tddp_close(tcp->turn_fd);
    server_release(tcp->server);
    free(tcp->host);
    free(tcp->reach_at);
    free(tcp);
}

/* VALIDATE and PING in one write; the server answers the PING alone, with the same four bytes. With
 * a secret both ends prove it in between. */
static tddp_status say_hello(int fd, int64_t deadline_ns, int cancel_fd)
{
    bool validated;
    tddp_status status = tddp_auth_to_server(fd, deadline_ns, cancel_fd, &validated);
    if (status) {
        return status;
    }
    uint32_t magic = htole32(TDDP_WIRE_MAGIC);
    uint32_t nonce = htole32((uint32_t)getpid());
    unsigned char hello[10] = {[0] = TDDP_WIRE_VALIDATE, [5] = TDDP_WIRE_PING};
    memcpy(hello + 1, &magic, sizeof magic);
    memcpy(hello + 6, &nonce, sizeof nonce);
    size_t done = validated ? 5 : 0;
    status = tddp_net_send(fd, hello, sizeof hello, &done, deadline_ns, cancel_fd);
    uint32_t answer = 0;
    done = 0;
    if (status == TDDP_OK) {
        status = tddp_net_recv(fd, &answer, sizeof answer, &done, deadline_ns, cancel_fd);
    }
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(status, "the hello was not answered");
    }
    if (status == TDDP_NETWORK) {
        return tddp_fail(status, "the hello was not answered, %s", tddp_error_message());
    }
    if (status == TDDP_OK && answer == htole32(TDDP_AUTH_WANTED)) {
        return tddp_auth_fail_wanted();
    }
    if (status == TDDP_OK && answer != nonce) {
        return tddp_fail(TDDP_PROTOCOL, "the hello was answered with other bytes: what listens "
                                        "there is not a store of PyTorch 2.x");
    }
    return status;
}

/* `*name_known` becomes true once the host has an address. */
static tddp_status connect_once(const tddp_tcp_store *tcp, int64_t deadline_ns, int cancel_fd,
                                bool *name_known, int *out)
{
    tddp_net_address addresses[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    int fd;
    tddp_status status = tddp_net_resolve(tcp->reach_at, tcp->port, deadline_ns, cancel_fd,
                                          addresses, TDDP_NET_MAX_ADDRESSES, &count);
    if (status) {
        return status;
    }
    *name_known = true;
    status = tddp_net_connect_any(addresses, count, deadline_ns, cancel_fd, &fd);
    if (status) {
        return status;
    }
    status = say_hello(fd, deadline_ns, cancel_fd);
    if (status) {
        tddp_net_close(fd);
        return status;
    }
    *out = fd;
    return TDDP_OK;
}

static int64_t earlier(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static tddp_status give_up(const tddp_tcp_store *tcp, int64_t start_ns, const char *reason)
{
    double seconds = (double)(tddp_now_ns() - start_ns) / (double)TDDP_NS_PER_S;
    return tddp_fail(TDDP_NETWORK,
                     "cannot reach the %s, tried for %.1f s: %s (is its process running, and is "
                     "this the right host and port?)",
                     tcp->name, seconds, reason);
}

static void tell(const tddp_tcp_store *tcp, int64_t start_ns, int64_t now, const char *reason,
                 int64_t *tell_at)
{
    if (now >= *tell_at) {
        tddp_log(TDDP_LOG_WARN, "store", "the %s does not answer after %lld s: %s", tcp->name,
                 (long long)((now - start_ns) / TDDP_NS_PER_S), reason);
        *tell_at = now + TELL_EVERY_MS * TDDP_NS_PER_MS;
    }
}

/* Tries until it succeeds, or there is no more point or time. */
static tddp_status connect_patiently(const tddp_tcp_store *tcp, const tddp_store_call *call,
                                     int *out)
{
    int64_t start = tddp_now_ns();
    int64_t tell_at = start + TELL_EVERY_MS * TDDP_NS_PER_MS;
    int64_t pause_ms = FIRST_PAUSE_MS;
    int cancel_fd = tddp_store_call_cancel_fd(call);
    bool name_known = false;
    char reason[REASON_BYTES] = "";
    for (;;) {
        /* An attempt ends when a line is due, but has two seconds at least. */
        int64_t until =
            earlier(later(tell_at, tddp_deadline_after_ms(ATTEMPT_LEAST_MS)), call->deadline_ns);
        tddp_status status = connect_once(tcp, until, cancel_fd, &name_known, out);
        if (status == TDDP_OK || status == TDDP_CANCELED || status == TDDP_OUT_OF_MEMORY) {
            return status;
        }
        if (status != TDDP_NETWORK && status != TDDP_TIMEOUT) {
            return tddp_fail(status, "%s: %s", tcp->name, tddp_error_message());
        }
        /* That the last attempt ran out of time says less than why those before it failed. */
        if (status == TDDP_NETWORK || !*reason) {
            snprintf(reason, sizeof reason, "%.500s", tddp_error_message());
        }
        int64_t now = tddp_now_ns();
        if (now >= call->deadline_ns ||
            (!name_known && now - start >= NAME_PATIENCE_MS * TDDP_NS_PER_MS)) {
            return give_up(tcp, start, reason);
        }
        tell(tcp, start, now, reason, &tell_at);
        int64_t pause_end =
            earlier(earlier(now + pause_ms * TDDP_NS_PER_MS, tell_at), call->deadline_ns);
        if (tddp_net_sleep(pause_end, cancel_fd)) {
            return TDDP_CANCELED;
        }
        pause_ms = earlier(pause_ms * 3 / 2, LAST_PAUSE_MS);
    }
}

static tddp_status fill(tddp_tcp_store *tcp, const char *host, const char *reach_at, int port)
{
    tcp->host = tddp_copy_string(host);
    tcp->reach_at = tcp->host ? tddp_copy_string(reach_at) : NULL;
    if (!tcp->reach_at) {
        return TDDP_OUT_OF_MEMORY;
    }
    tcp->port = port;
    bool bare_v6 = strchr(host, ':') && *host != '[';
    snprintf(tcp->name, sizeof tcp->name, bare_v6 ? "store [%.120s]:%d" : "store %.120s:%d", host,
             port);
    tcp->turn_fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    return tcp->turn_fd < 0 ? tddp_fail_errno("eventfd") : TDDP_OK;
}

tddp_status tddp_tcp_connect(const char *host, const char *reach_at, int port,
                             tddp_tcp_server *server, int64_t timeout_ms,
                             const tddp_store_call *call, tddp_tcp_store **out)
{
    tddp_tcp_store *tcp = tddp_alloc(sizeof *tcp);
    if (!tcp) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store_init(&tcp->base, &tddp_tcp_ops, timeout_ms);
    tcp->pid = getpid();
    tcp->fd = -1;
    tcp->turn_fd = -1;
    tddp_status status = fill(tcp, host, reach_at, port);
    if (status == TDDP_OK) {
        status = connect_patiently(tcp, call, &tcp->fd);
    }
    if (status) {
        tddp_tcp_destroy(&tcp->base);
        return status;
    }
    if (server) {
        atomic_fetch_add(&server->owners, 1);
        tcp->server = server;
    }
    *out = tcp;
    return TDDP_OK;
}

static tddp_status count_in(tddp_tcp_store *tcp, int64_t delta, const tddp_store_call *call,
                            int64_t *count)
{
    return tddp_tcp_add(tcp, workers_key, false, delta, call, count);
}

/* Counts in; the server's own process stays until all have. */
static tddp_status wait_for_workers(tddp_tcp_store *tcp, const tddp_tcp_store_opts *opts,
                                    const tddp_store_call *call)
{
    int64_t start = tddp_now_ns();
    int64_t tell_at = start + TELL_EVERY_MS * TDDP_NS_PER_MS;
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
        if (now >= tell_at) {
            tddp_log(TDDP_LOG_WARN, "store",
                     "waiting for %lld of %d workers at the %s, %lld s so far",
                     (long long)(opts->world_size - joined), opts->world_size, tcp->name,
                     (long long)((now - start) / TDDP_NS_PER_S));
            tell_at = now + TELL_EVERY_MS * TDDP_NS_PER_MS;
        }
        int64_t pause_end = now + WORKERS_POLL_MS * TDDP_NS_PER_MS;
        status = tddp_net_sleep(pause_end, tddp_store_call_cancel_fd(call));
        status = status ? status : count_in(tcp, 0, call, &joined);
    }
    return status;
}

static tddp_status check_options(const tddp_tcp_store_opts *opts, tddp_store **out)
{
    if (!opts || !out || opts->size < sizeof *opts) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "TCP store: expected options with their size set to %zu, and a result",
                         sizeof *opts);
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
        return status;
    }
    *out = server;
    return TDDP_OK;
}

tddp_status tddp_tcp_store_open(const tddp_tcp_store_opts *opts, const tddp_wait *wait,
                                tddp_store **out)
{
    tddp_status status = check_options(opts, out);
    if (status) {
        return status;
    }
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
    status = tddp_tcp_connect(opts->host, reach_at, port, server, timeout_ms, &call, &tcp);
    server_release(server); /* the store has its own share now */
    if (status) {
        return status;
    }
    if (opts->world_size > 0 && opts->wait_for_workers) {
        status = wait_for_workers(tcp, opts, &call);
    }
    if (status) {
        tddp_store_release(&tcp->base);
        return status;
    }
    *out = &tcp->base;
    return TDDP_OK;
}
