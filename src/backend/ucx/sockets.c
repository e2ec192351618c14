/*
 * UCX's sockets, which it doesn't tell: found among this process's by the ports at which it listens
 * here, and those at which the peers do. Called with the mutex of a rank held.
 *
 * UCX leaves them open in programs that this process executes, which would keep the connections
 * open after this process's death, so that the others would not notice it. And data that a machine
 * does not acknowledge any more would be repeated for a quarter of an hour.
 */
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "backend/ucx/ucx.h"

typedef int address_of(int fd, struct sockaddr *address, socklen_t *length);

/* In host byte order; 0: no socket of the internet, or not connected. */
static uint16_t port_of(int fd, address_of *of)
{
    struct sockaddr_storage address = {0};
    socklen_t length = sizeof address;
    if (of(fd, (struct sockaddr *)&address, &length) != 0) {
        return 0;
    }
    switch (address.ss_family) {
    case AF_INET:
        return ntohs(((struct sockaddr_in *)&address)->sin_port);
    case AF_INET6:
        return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    default:
        return 0;
    }
}

/* The next descriptor of this process; -1: there is no other. */
static int next_descriptor(DIR *folder)
{
    const struct dirent *each;
    do {
        each = readdir(folder);
    } while (each && each->d_name[0] == '.');
    return each ? atoi(each->d_name) : -1;
}

size_t tddp_ucx_listeners(int *fds, uint16_t *ports, size_t room)
{
    DIR *folder = opendir("/proc/self/fd");
    size_t count = 0;
    for (int fd; folder && count < room && (fd = next_descriptor(folder)) >= 0;) {
        int listens = 0;
        socklen_t length = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens) {
            fds[count] = fd;
            ports[count] = port_of(fd, getsockname);
            count += ports[count] > 0;
        }
    }
    if (folder) {
        (void)closedir(folder);
    }
    return count;
}

/* With too few UCX ends the process. */
tddp_status tddp_ucx_check_descriptors(int size)
{
    enum { OTHERS = 48 }; /* the worker's and UCX's own, more with each interface */
    DIR *folder = opendir("/proc/self/fd");
    rlim_t needed = (rlim_t)(size - 1) + OTHERS;
    struct rlimit limit;
    while (folder && next_descriptor(folder) >= 0) {
        needed++;
    }
    if (folder) {
        (void)closedir(folder);
    }
    if (!folder || (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < needed)) {
        return tddp_fail(TDDP_SYSTEM,
                         "connections to %d ranks need a limit of %llu open files, and it is %llu: "
                         "raise it (ulimit -n)",
                         size - 1, (unsigned long long)needed,
                         folder ? (unsigned long long)limit.rlim_cur : 0);
    }
    return TDDP_OK;
}

static bool contains(const uint16_t *ports, uint16_t port)
{
    for (size_t i = 0; port && i < TDDP_UCX_MAX_PORTS; i++) {
        if (ports[i] == port) {
            return true;
        }
    }
    return false;
}

static bool is_connection(const tddp_ucx *self, int fd)
{
    if (contains(self->ports, port_of(fd, getsockname))) {
        return true;
    }
    const uint16_t port = port_of(fd, getpeername);
    for (int rank = 0; port && rank < self->size; rank++) {
        if (contains(self->peers[rank].ports, port)) {
            return true;
        }
    }
    return false;
}

/* Best effort: without it a dead machine is noticed later. The kernel counts probes while no data
 * are in flight, and time (TCP_USER_TIMEOUT) while there are. */
static void set_up(int fd, int seconds)
{
    const int on = 1;
    const int idle = seconds / 3 > 0 ? seconds / 3 : 1;
    const int interval = seconds / 6 > 0 ? seconds / 6 : 1;
    const int probes = (seconds - idle + interval - 1) / interval;
    const int count = probes > 0 ? probes : 1;
    const int ms = seconds * 1000;
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (seconds > 0) {
        (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
        (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
        (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
        (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
        (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
    }
}

void tddp_ucx_set_up_sockets(tddp_ucx *self)
{
    DIR *folder = opendir("/proc/self/fd");
    for (int fd; folder && (fd = next_descriptor(folder)) >= 0;) {
        if (is_connection(self, fd)) {
            set_up(fd, self->peer_timeout);
        }
    }
    if (folder) {
        (void)closedir(folder);
    }
}
