/*
 * UCX's sockets, which it doesn't tell: those that this process has since its worker was made. With
 * the rank's mutex held, or before others know it.
 *
 * UCX leaves them open in programs that this process executes, and data that a machine does not
 * acknowledge any more would be repeated for a quarter of an hour. Another thread's socket of the
 * same moment gets the same, which does it no harm.
 */
#include <dirent.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "backend/ucx/ucx.h"

static bool is_of_the_internet(int fd)
{
    int domain = 0;
    socklen_t length = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
           (domain == AF_INET || domain == AF_INET6);
}

/* Those whose numbers have no bit count as old. */
static bool is_old(const tddp_ucx *self, int fd)
{
    return (size_t)fd >= 8 * sizeof self->old_sockets || self->old_sockets[fd / 8] >> fd % 8 & 1;
}

/* The next socket of this process; -1: there is no other. */
static int next_socket(DIR *folder)
{
    for (const struct dirent *each; folder && (each = readdir(folder));) {
        if (each->d_name[0] != '.' && is_of_the_internet(atoi(each->d_name))) {
            return atoi(each->d_name);
        }
    }
    return -1;
}

static void end_list(DIR *folder)
{
    if (folder) {
        (void)closedir(folder);
    }
}

void tddp_ucx_note_sockets(tddp_ucx *self)
{
    DIR *folder = opendir("/proc/self/fd");
    for (int fd; (fd = next_socket(folder)) >= 0;) {
        if (!is_old(self, fd)) {
            self->old_sockets[fd / 8] |= (unsigned char)(1u << fd % 8);
        }
    }
    end_list(folder);
}

void tddp_ucx_set_up_sockets(const tddp_ucx *self)
{
    DIR *folder = opendir("/proc/self/fd");
    for (int fd; (fd = next_socket(folder)) >= 0;) {
        if (!is_old(self, fd)) {
            tddp_transport_set_up_socket(fd, self->peer_timeout);
        }
    }
    end_list(folder);
}
