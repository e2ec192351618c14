/*
 * Detects dead peers without their help while connections are made.
 */
#ifndef TDDP_GLOO_LIVENESS_H
#define TDDP_GLOO_LIVENESS_H

#include <netinet/in.h>
#include <sys/socket.h>

namespace tddp_gloo
{

/* A socket that listens while its rank is making connections. Connections are never accepted:
 * the kernel completes them, and closes them when the socket is closed or the process ends. */
class Beacon
{
  public:
    Beacon() = default;
    ~Beacon();
    Beacon(const Beacon &) = delete;
    Beacon &operator=(const Beacon &) = delete;

    /* Listens on the same network address as `near`, and returns the port, in network byte order.
     * If that fails, it is 0, and other ranks wait until their deadline. */
    in_port_t open(const sockaddr_storage &near, int backlog);
    void close();

  private:
    int fd_ = -1;
};

/* A connection to another rank's beacon. */
class Probe
{
  public:
    explicit Probe(const sockaddr_storage &beacon);
    ~Probe();
    Probe(const Probe &) = delete;
    Probe &operator=(const Probe &) = delete;

    /* Whether the beacon is closed. Does not block. */
    bool closed();

  private:
    int fd_ = -1;
    bool closed_ = false;
};

} // namespace tddp_gloo

#endif
