/*
 * The transport: one rank's connections to all others of its group, and the messages on them.
 * Nothing here waits, except to connect and to close. Any thread.
 *
 * Invariants: the lock is the last one that a thread takes: Gloo is never called with it held. A
 * peer whose connection has ended stays so. Connections that this rank closes itself are no loss of
 * a peer.
 */
#ifndef TDDP_GLOO_TRANSPORT_H
#define TDDP_GLOO_TRANSPORT_H

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <tddp/transport.h>

#include "connection.h"
#include "liveness.h"

namespace tddp_gloo
{

using Clock = std::chrono::steady_clock;

class Transport final : public Observer
{
  public:
    /* Listens. */
    explicit Transport(const tddp_backend_opts &opts);
    /* Every transfer has been released. */
    ~Transport() override;
    Transport(const Transport &) = delete;
    Transport &operator=(const Transport &) = delete;

    const int rank;
    const int size;

    /* What include/tddp/transport.h says. These throw Failure. */
    const std::string &address() const
    {
        return address_;
    }
    void connect(const tddp_slice *addresses, const tddp_wait &wait, int *peer);
    Transfer *send(int peer, uint64_t tag, const void *data, size_t bytes);
    Transfer *recv(int peer, uint64_t tag, void *data, size_t bytes);
    bool test(Transfer &transfer, int *source);
    void close(std::chrono::milliseconds limit);

    /* How many connections have ended. */
    const std::atomic<unsigned> &ended() const
    {
        return ended_;
    }

  private:
    /* The observer's. */
    void connected(int peer, int fd) noexcept override;
    void closed(int peer, const std::exception_ptr &reason) noexcept override;
    void moved() noexcept override;

    int first_unconnected() const; /* with the lock held */
    bool has_ended(int peer);
    [[noreturn]] void fail_ended(int peer);
    void await_sent(std::chrono::milliseconds limit);
    template <typename Visit> void each_peer(Visit visit)
    {
        for (int peer = 0; peer < size; peer++) {
            if (peer != rank) {
                visit(peer);
            }
        }
    }

    struct Peer {
        enum { CONNECTING, ACTIVE, ENDED } state = CONNECTING;
        std::exception_ptr reason; /* ENDED: Gloo's */
    };

    struct tddp_eventcount *const events_;
    int peer_timeout_ = 0; /* seconds */
    std::shared_ptr<tcp::Device> device_;
    std::shared_ptr<Context> context_;
    std::string address_;
    Beacon beacon_;
    std::once_flag closed_;
    std::atomic<bool> closing_{false};
    std::atomic<unsigned> ended_{0};

    std::mutex mutex_;                /* guards the following */
    std::condition_variable changed_; /* a state */
    std::vector<Peer> peers_;
};

} // namespace tddp_gloo

#endif
