/*
 * Beacons, probes and TCP keepalive, for the thread that creates the group; keepalive for Gloo's
 * too. Nothing here knows ranks.
 */
#include "liveness.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include <tddp/log.h>

#include "endpoint.h"
#include "failure.h"

namespace tddp_gloo
{
namespace
{

constexpr int DEFAULT_SECONDS = 15;
constexpr int MAX_SECONDS = 24 * 60 * 60;

int new_socket(const sockaddr_storage &address)
{
    return socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

/* If an option can't be set, the system's default applies, and a dead peer is noticed later. */
void set(int fd, int level, int option, int value)
{
    if (setsockopt(fd, level, option, &value, sizeof value) != 0) {
        tddp_log(TDDP_LOG_DEBUG, "gloo", "setsockopt(%d, %d): %s", level, option, strerror(errno));
    }
}

} // namespace

int peer_timeout()
{
    const char *text = getenv("TDDP_PEER_TIMEOUT");
    if (!text || !*text) {
        return DEFAULT_SECONDS;
    }
    char *end = nullptr;
    errno = 0;
    long seconds = strtol(text, &end, 10);
    if (*end || errno || seconds < 0 || seconds > MAX_SECONDS) {
        throw Failure(TDDP_INVALID_ARGUMENT, std::string("TDDP_PEER_TIMEOUT=\"") + text +
                                                 "\": expected seconds from 1 to " +
                                                 std::to_string(MAX_SECONDS) + ", or 0 for never");
    }
    return static_cast<int>(seconds);
}

/* The first probe is sent after a third of the time. The kernel counts probes while no data are
 * in flight, and time (TCP_USER_TIMEOUT) while there are; the latter also ends a connection
 * whose peer receives nothing for so long, as when its process is stopped. */
void set_keepalive(int fd, int seconds)
{
    if (seconds == 0) {
        return;
    }
    const int idle = std::max(1, seconds / 3);
    const int interval = std::max(1, seconds / 6);
    const int probes = std::max(1, (seconds - idle + interval - 1) / interval);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, probes);
    set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);
}

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
