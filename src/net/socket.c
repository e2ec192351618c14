/*
 * Sockets: waiting for them, connecting, listening, accepting. Any thread; no state. Every socket
 * is CLOEXEC and non-blocking from its first moment, so all waiting is in tddp_net_poll() with its
 * deadline. transfer.c sends and receives.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "net/net.h"

enum { KEEPALIVE_IDLE_S = 30, KEEPALIVE_EVERY_S = 10, KEEPALIVE_PROBES = 6 };

tddp_status tddp_net_poll(int fd, short events, int64_t deadline_ns, int cancel_fd)
{
    /* poll(2) skips negative descriptors. */
    struct pollfd entries[] = {{.fd = fd, .events = events}, {.fd = cancel_fd, .events = POLLIN}};
    for (;;) {
        int ready = poll(entries, 2, tddp_deadline_poll_ms(deadline_ns));
        if (ready < 0 && errno != EINTR) {
            return tddp_fail_errno("poll");
        }
        if (ready > 0 && entries[1].revents) {
            return tddp_fail(TDDP_CANCELED, "interrupted while waiting for the network");
        }
        if (ready > 0) {
            return TDDP_OK;
        }
        if (ready == 0 && tddp_deadline_poll_ms(deadline_ns) == 0) {
            return tddp_fail(TDDP_TIMEOUT, "timed out waiting for the network");
        }
    }
}

tddp_status tddp_net_sleep(int64_t deadline_ns, int cancel_fd)
{
    tddp_status status = tddp_net_poll(-1, 0, deadline_ns, cancel_fd);
    return status == TDDP_TIMEOUT ? TDDP_OK : status;
}

static void set_option(int fd, int level, int option, int value)
{
    /* These tune a connection that works without them too. */
    (void)setsockopt(fd, level, option, &value, sizeof value);
}

static void tune_stream(int fd)
{
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_EVERY_S);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_PROBES);
}

static bool same_address(const tddp_net_address *a, const tddp_net_address *b)
{
    char text_a[TDDP_NET_TEXT_BYTES];
    char text_b[TDDP_NET_TEXT_BYTES];
    return strcmp(tddp_net_text(a, text_a), tddp_net_text(b, text_b)) == 0;
}

/* A connect to a free local port may by chance be given that very port and meet itself. It would
 * echo every byte and keep the real server from binding the port. */
static bool connected_to_itself(int fd)
{
    tddp_net_address local;
    tddp_net_address peer;
    return tddp_net_local(fd, &local) == TDDP_OK && tddp_net_peer(fd, &peer) == TDDP_OK &&
           same_address(&local, &peer);
}

static int finish_connect(int fd)
{
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length)) {
        return errno;
    }
    if (!error && connected_to_itself(fd)) {
        struct linger at_once = {.l_onoff = 1};
        (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        return ECONNREFUSED;
    }
    return error;
}

static tddp_status connect_once(const tddp_net_address *to, int64_t deadline_ns, int cancel_fd,
                                int *out)
{
    char text[TDDP_NET_TEXT_BYTES];
    int fd = socket(to->of.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        /* A system without IPv6 is no fault of the caller: another address may do. */
        return errno == EAFNOSUPPORT ? tddp_fail(TDDP_NETWORK, "cannot connect to %s: %s",
                                                 tddp_net_text(to, text), strerror(errno))
                                     : tddp_fail_errno("socket");
    }
    tune_stream(fd);
    tddp_status status = TDDP_OK;
    int error = connect(fd, &to->of.any, to->length) ? errno : 0;
    if (error == EINPROGRESS || error == EINTR || error == 0) {
        status = tddp_net_poll(fd, POLLOUT, deadline_ns, cancel_fd);
        error = status == TDDP_OK ? finish_connect(fd) : 0;
    }
    if (status == TDDP_TIMEOUT) {
        status = tddp_fail(status, "timed out connecting to %s", tddp_net_text(to, text));
    } else if (error) {
        status = tddp_fail(TDDP_NETWORK, "cannot connect to %s: %s", tddp_net_text(to, text),
                           strerror(error));
    }
    if (status) {
        tddp_close(fd);
        errno = error;
        return status;
    }
    *out = fd;
    return TDDP_OK;
}

tddp_status tddp_net_connect_any(const tddp_net_address *to, size_t count, int64_t deadline_ns,
                                 int cancel_fd, int *out)
{
    tddp_status status = tddp_fail(TDDP_INVALID_ARGUMENT, "no address to connect to");
    for (size_t i = 0; i < count; i++) {
        int64_t now = tddp_now_ns();
        int64_t share = deadline_ns > now ? (deadline_ns - now) / (int64_t)(count - i) : 0;
        status = connect_once(&to[i], now + share, cancel_fd, out);
        if (status != TDDP_NETWORK && status != TDDP_TIMEOUT) {
            break;
        }
    }
    return status;
}

tddp_status tddp_net_connect_host(const char *host, int port, int64_t deadline_ns, int cancel_fd,
                                  int *out)
{
    tddp_net_address addresses[TDDP_NET_MAX_ADDRESSES];
    size_t count;
    tddp_status status = tddp_net_resolve(host, port, deadline_ns, cancel_fd, addresses,
                                          TDDP_NET_MAX_ADDRESSES, &count);
    return status ? status : tddp_net_connect_any(addresses, count, deadline_ns, cancel_fd, out);
}

static tddp_status fail_listen(int error, const char *where)
{
    tddp_status status = error == EADDRINUSE ? TDDP_ADDRESS_IN_USE : TDDP_NETWORK;
    const char *advice = error == EADDRINUSE ? " (choose another port, or 0 for a free one)" : "";
    return tddp_fail(status, "cannot listen on %s: %s%s", where, strerror(error), advice);
}

static tddp_status listen_on(const tddp_net_address *address, const char *where, int *out)
{
    int fd = socket(address->of.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return errno == EAFNOSUPPORT ? fail_listen(errno, where) : tddp_fail_errno("socket");
    }
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (address->of.any.sa_family == AF_INET6) {
        bool every = IN6_IS_ADDR_UNSPECIFIED(&address->of.v6.sin6_addr);
        set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, !every);
    }
    if (bind(fd, &address->of.any, address->length) || listen(fd, SOMAXCONN)) {
        tddp_status status = fail_listen(errno, where);
        tddp_close(fd);
        return status;
    }
    *out = fd;
    return TDDP_OK;
}

tddp_status tddp_net_listen(const char *host, int port, int *out)
{
    tddp_status status = tddp_net_check_port(port, 0);
    if (status) {
        return status;
    }
    char where[TDDP_NET_TEXT_BYTES];
    tddp_net_address address;
    if (host) {
        if (!tddp_net_parse(host, port, &address)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "cannot listen on \"%s\": expected a numeric address", host);
        }
        return listen_on(&address, tddp_net_text(&address, where), out);
    }
    (void)tddp_net_parse("::", port, &address);
    status = listen_on(&address, tddp_net_text(&address, where), out);
    if (status == TDDP_NETWORK) {
        (void)tddp_net_parse("0.0.0.0", port, &address);
        status = listen_on(&address, tddp_net_text(&address, where), out);
    }
    return status;
}

bool tddp_net_accept(int listen_fd, int *out, tddp_net_address *from)
{
    tddp_net_address address = {.length = sizeof address.of};
    int fd;
    do {
        fd = accept4(listen_fd, &address.of.any, &address.length, SOCK_CLOEXEC | SOCK_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        return false;
    }
    tune_stream(fd);
    *out = fd;
    *from = address;
    return true;
}

tddp_status tddp_net_adopt(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    int descriptor_flags = fcntl(fd, F_GETFD);
    if (flags < 0 || descriptor_flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        fcntl(fd, F_SETFD, descriptor_flags | FD_CLOEXEC) < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "descriptor %d: %s", fd, strerror(errno));
    }
    return TDDP_OK;
}

tddp_status tddp_net_local(int fd, tddp_net_address *out)
{
    tddp_net_address address = {.length = sizeof address.of};
    if (getsockname(fd, &address.of.any, &address.length)) {
        return tddp_fail_errno("getsockname");
    }
    *out = address;
    return TDDP_OK;
}

tddp_status tddp_net_peer(int fd, tddp_net_address *out)
{
    tddp_net_address address = {.length = sizeof address.of};
    if (getpeername(fd, &address.of.any, &address.length)) {
        return tddp_fail_errno("getpeername");
    }
    *out = address;
    return TDDP_OK;
}
