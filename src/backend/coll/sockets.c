/*
 * What transports over TCP sockets have in common: the time after which a machine counts as dead,
 * what a connection's socket needs, the limit of open files. Any thread; keeps no state.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <tddp/transport.h>

#include "base/base.h"

enum { DEFAULT_SECONDS = 15, MAX_SECONDS = 24 * 60 * 60 };

tddp_status tddp_transport_peer_timeout(int *seconds)
{
    const char *text = getenv("TDDP_PEER_TIMEOUT");
    *seconds = DEFAULT_SECONDS;
    if (!text || !*text) {
        return TDDP_OK;
    }
    char *end = NULL;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (*end || errno || value < 0 || value > MAX_SECONDS) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "TDDP_PEER_TIMEOUT=\"%s\": expected seconds from 1 to %d, or 0 for never",
                         text, MAX_SECONDS);
    }
    *seconds = (int)value;
    return TDDP_OK;
}

static int at_least_one(int value)
{
    return value > 0 ? value : 1;
}

/* The first probe is sent after a third of the time. The kernel counts probes while no data are
 * in flight, and time (TCP_USER_TIMEOUT) while there are; the latter also ends a connection
 * whose peer receives nothing for so long, as when its process is stopped. If an option can't be
 * set, the system's default applies, and a dead peer is noticed later. */
void tddp_transport_set_up_socket(int fd, int seconds)
{
    const int idle = at_least_one(seconds / 3);
    const int interval = at_least_one(seconds / 6);
    const int options[][3] = {
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, idle},
        {IPPROTO_TCP, TCP_KEEPINTVL, interval},
        {IPPROTO_TCP, TCP_KEEPCNT, at_least_one((seconds - idle + interval - 1) / interval)},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000}};
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    for (size_t i = 0; seconds > 0 && i < sizeof options / sizeof *options; i++) {
        const int *one = options[i];
        if (setsockopt(fd, one[0], one[1], &one[2], sizeof one[2]) != 0) {
            tddp_log(TDDP_LOG_DEBUG, "backend", "setsockopt(%d, %d): %s", one[0], one[1],
                     strerror(errno));
        }
    }
}

tddp_status tddp_transport_check_descriptors(int world_size, int others)
{
    rlim_t needed = (rlim_t)(world_size - 1 + others);
    struct rlimit limit;
    DIR *folder = opendir("/proc/self/fd");
    for (const struct dirent *each; folder && (each = readdir(folder));) {
        needed += each->d_name[0] != '.';
    }
    if (folder) {
        (void)closedir(folder);
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < needed) {
        return tddp_fail(TDDP_SYSTEM,
                         "connections to %d ranks need a limit of %llu open files, and it is %llu: "
                         "raise it (ulimit -n)",
                         world_size - 1, (unsigned long long)needed,
                         (unsigned long long)limit.rlim_cur);
    }
    return TDDP_OK;
}
