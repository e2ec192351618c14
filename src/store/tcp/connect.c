/*
 * Connects a store, with retries and the hello of the protocol, reconnects it, and closes it. Any
 * thread; a store is not shared before it is open. An address that does not answer is logged every
 * ten seconds.
 */
#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/auth.h"
#include "store/tcp/tcp.h"

int64_t tddp_tcp_report_every_ms = 10000;

enum {
    /* A name that cannot be found is more likely wrong than late. */
    NAME_TIMEOUT_MS = 30000,
    FIRST_PAUSE_MS = 20,
    LAST_PAUSE_MS = 1000,
    ATTEMPT_LEAST_MS = 2000,
    REASON_BYTES = 512,
};

void tddp_tcp_server_release(tddp_tcp_server *server)
{
    if (server && atomic_fetch_sub(&server->owners, 1) == 1) {
        tddp_store_server_stop(server->server);
        free(server);
    }
}

void tddp_tcp_count(tddp_tcp_store *store, bool connected)
{
    if (store->server && store->counted != connected) {
        store->counted = connected;
        atomic_fetch_add(&store->server->connections, connected ? 1 : -1);
    }
}

void tddp_tcp_destroy(tddp_store *store)
{
    tddp_tcp_store *tcp = (tddp_tcp_store *)store;
    if (tcp->pid == getpid()) {
        tddp_tcp_count(tcp, false);
        tddp_net_close(tcp->fd);
        (void)pthread_mutex_destroy(&tcp->lock.mutex);
    } else {
        tddp_close(tcp->fd); /* the parent still uses the connection */
    }
    tddp_tcp_server_release(tcp->server);
    free(tcp->host);
    free(tcp->reach_at);
    tddp_bytes_free(&tcp->watched);
    free(tcp);
}

/* The PING's four bytes: a process id, and a bit that none has. A server of 1.13 takes the hello
 * for a SET, with the nonce's third byte as the highest of a length: thus one that no memory can
 * have, and it hangs up at once. */
static uint32_t hello_nonce(void)
{
    return htole32((uint32_t)getpid() | UINT32_C(0x00800000));
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
    uint32_t nonce = hello_nonce();
    unsigned char hello[10] = {[0] = TDDP_WIRE_VALIDATE, [5] = TDDP_WIRE_PING};
    memcpy(hello + 1, &magic, sizeof magic);
    memcpy(hello + 6, &nonce, sizeof nonce);
    size_t sent = validated ? 5 : 0;
    uint32_t answer = 0;
    status = tddp_auth_ask(fd, hello + sent, sizeof hello - sent, &answer, sizeof answer,
                           deadline_ns, cancel_fd);
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

tddp_status tddp_tcp_attempt_once(const tddp_tcp_store *tcp, tddp_tcp_attempt *attempt)
{
    int64_t deadline_ns = attempt->deadline_ns;
    int cancel_fd = attempt->cancel_fd;
    tddp_net_address addresses[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    int fd;
    attempt->hung_up = false;
    tddp_status status = tddp_net_resolve(tcp->reach_at, tcp->port, deadline_ns, cancel_fd,
                                          addresses, TDDP_NET_MAX_ADDRESSES, &count);
    if (status) {
        return status;
    }
    attempt->name_known = true;
    status = tddp_net_connect_any(addresses, count, deadline_ns, cancel_fd, &fd);
    if (status) {
        return status;
    }
    status = tddp_tcp_is_legacy(tcp) ? tddp_tcp_legacy_hello(fd, deadline_ns, cancel_fd)
                                     : say_hello(fd, deadline_ns, cancel_fd);
    if (status) {
        attempt->hung_up = status == TDDP_NETWORK;
        tddp_net_close(fd);
        return status;
    }
    attempt->fd = fd;
    return TDDP_OK;
}

/* One connection, in the dialect of the server. */
static tddp_status connect_once(tddp_tcp_store *tcp, tddp_tcp_attempt *attempt)
{
    if (!tcp->traits.dialect) {
        tcp->traits.dialect = &tddp_wire_2x;
    }
    tddp_status status = tddp_tcp_attempt_once(tcp, attempt);
    if (!attempt->hung_up) {
        return status;
    }
    if (tddp_tcp_is_legacy(tcp)) {
        tcp->traits = (tddp_tcp_traits){0}; /* another server may be there the next time */
        return status;
    }
    /* With a secret there is no older dialect to fall back to: it cannot prove one. */
    return tddp_auth_wanted() ? status : tddp_tcp_legacy_connect(tcp, attempt);
}

tddp_status tddp_tcp_reconnect(tddp_tcp_store *store, int64_t deadline_ns, int cancel_fd)
{
    tddp_tcp_attempt a = {.deadline_ns = deadline_ns, .cancel_fd = cancel_fd, .fd = -1};
    tddp_tcp_count(store, false);
    tddp_net_close(store->fd);
    store->fd = -1;
    store->watch_sent = false;
    tddp_status status = tddp_tcp_attempt_once(store, &a);
    if (status == TDDP_OK) {
        store->fd = a.fd;
        tddp_tcp_count(store, true);
    }
    return status;
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

static void report(const tddp_tcp_store *tcp, int64_t start_ns, int64_t now, const char *reason,
                   int64_t *report_at)
{
    if (now >= *report_at) {
        tddp_log(TDDP_LOG_WARN, "store", "the %s does not answer after %lld s: %s", tcp->name,
                 (long long)((now - start_ns) / TDDP_NS_PER_S), reason);
        *report_at = now + tddp_tcp_report_every_ms * TDDP_NS_PER_MS;
    }
}

/* Tries until it succeeds, or there is no more point or time. */
static tddp_status connect_with_retries(tddp_tcp_store *tcp, const tddp_store_call *call)
{
    int64_t start = tddp_now_ns();
    int64_t report_at = start + tddp_tcp_report_every_ms * TDDP_NS_PER_MS;
    int64_t pause_ms = FIRST_PAUSE_MS;
    int cancel_fd = tddp_store_call_cancel_fd(call);
    tddp_tcp_attempt a = {.cancel_fd = cancel_fd, .fd = -1};
    char reason[REASON_BYTES] = "";
    for (;;) {
        /* An attempt ends when a line is due, but has two seconds at least. */
        a.deadline_ns =
            earlier(later(report_at, tddp_deadline_after_ms(ATTEMPT_LEAST_MS)), call->deadline_ns);
        tddp_status status = connect_once(tcp, &a);
        tcp->fd = a.fd;
        if (status == TDDP_OK || status == TDDP_CANCELED || status == TDDP_OUT_OF_MEMORY) {
            return status;
        }
        if (status != TDDP_NETWORK && status != TDDP_TIMEOUT) {
            return tddp_fail(status, "%s: %s", tcp->name, tddp_error_message());
        }
        /* The reason of an earlier attempt says more than the timeout of the last one. */
        if (status == TDDP_NETWORK || !*reason) {
            snprintf(reason, sizeof reason, "%.500s", tddp_error_message());
        }
        int64_t now = tddp_now_ns();
        if (now >= call->deadline_ns ||
            (!a.name_known && now - start >= NAME_TIMEOUT_MS * TDDP_NS_PER_MS)) {
            return give_up(tcp, start, reason);
        }
        report(tcp, start, now, reason, &report_at);
        int64_t pause_end =
            earlier(earlier(now + pause_ms * TDDP_NS_PER_MS, report_at), call->deadline_ns);
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
    return TDDP_OK;
}

tddp_status tddp_tcp_connect(const char *host, const char *reach_at, int port,
                             tddp_tcp_server *server, int64_t timeout_ms,
                             const tddp_tcp_traits *traits, const tddp_store_call *call,
                             tddp_tcp_store **out)
{
    tddp_tcp_store *tcp = tddp_alloc(sizeof *tcp);
    if (!tcp) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store_init(&tcp->base, &tddp_tcp_ops, "TCP store", timeout_ms);
    (void)pthread_mutex_init(&tcp->lock.mutex, NULL);
    tcp->pid = getpid();
    tcp->fd = -1;
    if (traits) {
        tcp->traits = *traits;
    }
    tddp_status status = fill(tcp, host, reach_at, port);
    if (status == TDDP_OK) {
        status = connect_with_retries(tcp, call);
    }
    if (status) {
        tddp_tcp_destroy(&tcp->base);
        return status;
    }
    if (server) {
        atomic_fetch_add(&server->owners, 1);
        tcp->server = server;
        tddp_tcp_count(tcp, true);
    }
    *out = tcp;
    return TDDP_OK;
}
