/*
 * UCX's sockets, which it doesn't tell: those that this process has since its worker was made. Runs
 * on the thread that creates the group.
 *
 * UCX leaves them open in programs that this process executes, which would keep the connections
 * open after this process's death, so that the others would not notice it. And data that a machine
 * does not acknowledge any more would be repeated for a quarter of an hour. Another thread's socket
 * of the same moment gets the same, which does it no harm.
 */
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "backend/ucx/ucx.h"

/* The next descriptor of this process; -1: there is no other. */
static int next_descriptor(DIR *folder)
{
    const struct dirent *each;
    do {
        each = folder ? readdir(folder) : NULL;
    } while (each && each->d_name[0] == '.');
    return each ? atoi(each->d_name) : -1;
}

static void close_folder(DIR *folder)
{
    if (folder) {
        (void)closedir(folder);
    }
}

tddp_status tddp_ucx_list_descriptors(tddp_ucx_descriptors *out)
{
    DIR *folder = opendir("/proc/self/fd");
    for (int fd; (fd = next_descriptor(folder)) >= 0; out->count++) {
        if (fd >= out->room) {
            const int room = 2 * fd + 64;
            char *grown = realloc(out->is_open, (size_t)room);
            if (!grown) {
                close_folder(folder);
                return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
            }
            memset(grown + out->room, 0, (size_t)(room - out->room));
            out->is_open = grown;
            out->room = room;
        }
        out->is_open[fd] = 1;
    }
    close_folder(folder);
    return TDDP_OK;
}

tddp_status tddp_ucx_check_descriptors(const tddp_ucx_descriptors *open, int size)
{
    enum { OTHERS = 48 }; /* the worker's and UCX's own, more with each interface */
    const rlim_t needed = (rlim_t)(open->count + size - 1 + OTHERS);
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < needed) {
        return tddp_fail(TDDP_SYSTEM,
                         "connections to %d ranks need a limit of %llu open files, and it is %llu: "
                         "raise it (ulimit -n)",
                         size - 1, (unsigned long long)needed, (unsigned long long)limit.rlim_cur);
    }
    return TDDP_OK;
}

static bool is_of_the_internet(int fd)
{
    int domain = 0;
    socklen_t length = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
           (domain == AF_INET || domain == AF_INET6);
}

/* Best effort: without it a dead machine is noticed later. The kernel counts probes while no data
 * are in flight, and time (TCP_USER_TIMEOUT) while there are. */
static void set_up(int fd, int seconds)
{
    const int idle = seconds / 3 > 0 ? seconds / 3 : 1;
    const int interval = seconds / 6 > 0 ? seconds / 6 : 1;
    const int probes = (seconds - idle + interval - 1) / interval;
    const int options[][3] = {{SOL_SOCKET, SO_KEEPALIVE, 1},
                              {IPPROTO_TCP, TCP_KEEPIDLE, idle},
                              {IPPROTO_TCP, TCP_KEEPINTVL, interval},
                              {IPPROTO_TCP, TCP_KEEPCNT, probes > 0 ? probes : 1},
                              {IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000}};
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    for (size_t i = 0; seconds > 0 && i < sizeof options / sizeof *options; i++) {
        (void)setsockopt(fd, options[i][0], options[i][1], &options[i][2], sizeof(int));
    }
}

void tddp_ucx_set_up_sockets(const tddp_ucx_descriptors *before, int seconds)
{
    DIR *folder = opendir("/proc/self/fd");
    for (int fd; (fd = next_descriptor(folder)) >= 0;) {
        const bool is_old = fd < before->room && before->is_open[fd];
        if (!is_old && is_of_the_internet(fd)) {
            set_up(fd, seconds);
        }
    }
    close_folder(folder);
}
