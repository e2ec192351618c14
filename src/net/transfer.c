/*
 * Exact sends and receives on non-blocking sockets. Tries first and polls only when the kernel says
 * to wait, so an idle connection costs one system call a message. Progress is the caller's
 * variable: a call that timed out can be continued.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "base/base.h"
#include "net/net.h"

static tddp_status fail_connection(int fd, const char *reason)
{
    char text[TDDP_NET_TEXT_BYTES] = "the peer";
    tddp_net_address peer = {.length = sizeof peer.of};
    if (getpeername(fd, &peer.of.any, &peer.length) == 0) {
        (void)tddp_net_text(&peer, text);
    }
    return tddp_fail(TDDP_NETWORK, "connection to %s lost: %s", text, reason);
}

tddp_status tddp_net_send(int fd, const void *data, size_t size, size_t *done, int64_t deadline_ns,
                          int cancel_fd)
{
    while (*done < size) {
        ssize_t sent = send(fd, (const char *)data + *done, size - *done, MSG_NOSIGNAL);
        if (sent >= 0) {
            *done += (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            tddp_status status = tddp_net_poll(fd, POLLOUT, deadline_ns, cancel_fd);
            if (status) {
                return status;
            }
        } else if (errno != EINTR) {
            return fail_connection(fd, strerror(errno));
        }
    }
    return TDDP_OK;
}

tddp_status tddp_net_recv(int fd, void *data, size_t size, size_t *done, int64_t deadline_ns,
                          int cancel_fd)
{
    while (*done < size) {
        ssize_t got = recv(fd, (char *)data + *done, size - *done, 0);
        if (got > 0) {
            *done += (size_t)got;
        } else if (got == 0) {
            return fail_connection(fd, "the other side closed it");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            tddp_status status = tddp_net_poll(fd, POLLIN, deadline_ns, cancel_fd);
            if (status) {
                return status;
            }
        } else if (errno != EINTR) {
            return fail_connection(fd, strerror(errno));
        }
    }
    return TDDP_OK;
}

void tddp_net_close(int fd)
{
    if (fd >= 0) {
        int saved = errno;
        (void)shutdown(fd, SHUT_RDWR);
        errno = saved;
        tddp_close(fd);
    }
}
