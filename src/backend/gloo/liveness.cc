/*
 * Beacons and probes, for the thread that creates the group. Nothing here knows ranks.
 */
#include "liveness.h"

#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <tddp/log.h>

#include "endpoint.h"

namespace tddp_gloo
{
namespace
{

int new_socket(const sockaddr_storage &address)
{
    return socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

} // namespace

Beacon::~Beacon()
{
    close();
}

in_port_t Beacon::open(const sockaddr_storage &near, int backlog)
{
    sockaddr_storage address = near;
    auto *bare = reinterpret_cast<sockaddr *>(&address);
    socklen_t length = size_of(address);
    in_port_t *port = port_in(address);
    if (port) {
        *port = 0;
    }
    fd_ = new_socket(address);
    if (fd_ < 0 || bind(fd_, bare, length) != 0 || listen(fd_, backlog) != 0 ||
        getsockname(fd_, bare, &length) != 0) {
        tddp_log(TDDP_LOG_DEBUG, "gloo", "no beacon: %s", strerror(errno));
        close();
        return 0;
    }
    return port ? *port : 0;
}

void Beacon::close()
{
    if (fd_ >= 0) {
        ::close(fd_);
        fd_ = -1;
    }
}

Probe::Probe(const sockaddr_storage &beacon)
{
    if (beacon.ss_family == AF_UNSPEC) {
        return;
    }
    fd_ = new_socket(beacon);
    if (fd_ >= 0 &&
        ::connect(fd_, reinterpret_cast<const sockaddr *>(&beacon), size_of(beacon)) != 0 &&
        errno != EINPROGRESS && errno != EINTR) {
        closed_ = errno == ECONNREFUSED;
    }
}

Probe::~Probe()
{
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

bool Probe::closed()
{
    if (fd_ < 0 || closed_) {
        return closed_;
    }
    /* Nothing is ever sent here: readable means closed. */
    pollfd one = {fd_, POLLIN | POLLRDHUP, 0};
    if (poll(&one, 1, 0) == 1 && one.revents) {
        int error = 0;
        socklen_t length = sizeof error;
        (void)getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
        closed_ = error == 0 || error == ECONNREFUSED || error == ECONNRESET || error == ETIMEDOUT;
        ::close(fd_);
        fd_ = -1;
    }
    return closed_;
}

} // namespace tddp_gloo
