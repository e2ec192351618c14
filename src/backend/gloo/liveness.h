/*
 * How a peer's end is noticed that nobody tells: while connections are made, by a beacon; later, by
 * the kernel's own questions on connections where nothing is heard.
 */
#ifndef TDDP_GLOO_LIVENESS_H
#define TDDP_GLOO_LIVENESS_H

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <vector>

namespace tddp_gloo
{

/*
 * Seconds after which a machine that does not answer counts as gone: TDDP_PEER_TIMEOUT, or 15. 0:
 * only the system's own limits count, which may be hours. Throws TDDP_INVALID_ARGUMENT.
 */
int peer_timeout();

/* Sets a connection up so that it ends after so many seconds without an answer. */
void end_when_silent(int fd, int seconds);

/*
 * Waits until peers' systems have all that was written to these connections, or the time is over.
 * A connection closed with bytes in it that nobody read is reset, and then what has not left yet is
 * lost.
 */
void wait_until_sent(const std::vector<int> &fds, std::chrono::milliseconds limit);

/*
 * A socket that listens as long as its rank is making connections. Nobody accepts: the system
 * connects those who come, and lets go of them when the socket is closed or the process ends.
 */
class Beacon
{
  public:
    Beacon() = default;
    ~Beacon();
    Beacon(const Beacon &) = delete;
    Beacon &operator=(const Beacon &) = delete;

    /* On the same network address as `near`. Without a beacon, should this fail, others wait for
     * their deadline. */
    void open(const sockaddr_storage &near, int visitors);
    void close();

    /* Family AF_UNSPEC: it is not open. */
    const sockaddr_storage &address() const
    {
        return address_;
    }

  private:
    int fd_ = -1;
    sockaddr_storage address_ = {};
};

/* A connection to another rank's beacon. */
class Probe
{
  public:
    explicit Probe(const sockaddr_storage &beacon);
    ~Probe();
    Probe(const Probe &) = delete;
    Probe &operator=(const Probe &) = delete;

    /* Whether the beacon is gone. Does not block. */
    bool over();

  private:
    int fd_ = -1;
    bool over_ = false;
};

} // namespace tddp_gloo

#endif
