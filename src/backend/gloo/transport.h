/*
 * The transport: one rank's connections to all others of its group, and the messages on them.
 * Nothing here waits, except to connect and to end. Any thread.
 *
 * Invariants: the lock is the last one that a thread takes but for the observer's: Gloo is never
 * called with it held. A
 * peer whose connection has ended stays so. Connections that this rank closes itself are no loss of
 * a peer.
 */
#ifndef TDDP_GLOO_TRANSPORT_H
#define TDDP_GLOO_TRANSPORT_H

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <tddp/meeting.h>
#include <tddp/transport.h>

#include "connection.h"
#include "liveness.h"

namespace tddp_gloo
{

using Clock = std::chrono::steady_clock;

/* Tags of the transport's own messages; all others are its user's. */
constexpr uint64_t CLOSE_NOTICE_TAG = ~UINT64_C(0);      /* a rank's last message */
constexpr uint64_t CONNECTED_TAG = CLOSE_NOTICE_TAG - 1; /* its first: connected to all */

/* Sent before a rank closes its connections, with the reason. */
struct CloseNotice {
    uint64_t sequence; /* of its last collective */
    uint32_t status;   /* TDDP_OK: the group was destroyed; else the failure */
    char text[492];
    uint32_t check; /* CLOSE_NOTICE_CHECK: it has arrived completely */
};
constexpr uint32_t CLOSE_NOTICE_CHECK = 0x65796221;

/* A rank, as far as this one can see. */
struct Peer {
    enum { CONNECTING, ACTIVE, LEFT, LOST } state = CONNECTING;
    Clock::time_point since;      /* LEFT, LOST */
    uint64_t sequence = 0;        /* LEFT: its last collective */
    tddp_status status = TDDP_OK; /* LOST: the failure that it reported; TDDP_OK: none */
    std::exception_ptr reason;    /* LOST: Gloo's */
    CloseNotice notice = {};      /* Gloo writes here until the connection has ended */

    /* LOST: why, as it has reported or Gloo has it. */
    std::string why() const;
};

class Transport final : public Observer
{
  public:
    explicit Transport(const tddp_backend_opts &opts);
    /* Every transfer has been released. */
    ~Transport() override;
    Transport(const Transport &) = delete;
    Transport &operator=(const Transport &) = delete;

    const int rank;
    const int size;

    /* connect.cc: blocks until every rank is connected to all others. Before it waits for that, and
     * a peer may end, it calls `is_connected`: this rank is. */
    void connect(const tddp_backend_opts &opts, const tddp_wait *wait,
                 const std::function<void()> &is_connected);

    /* What include/tddp/transport.h says. These throw Failure. */
    Transfer *send(int peer, uint64_t tag, const void *data, size_t bytes);
    Transfer *recv(int peer, uint64_t tag, void *data, size_t bytes);
    bool test(Transfer &transfer, int *source);
    void release(Transfer *transfer) noexcept;
    void check_peer(int peer, uint64_t sequence);
    struct tddp_eventcount *events() const
    {
        return events_;
    }

    /* The number of the last collective, for the close notice. */
    void set_sequence(uint64_t sequence)
    {
        sequence_ = sequence;
    }

    /* Tells the peers, once, why this rank takes no further part. */
    void report(tddp_status status, const std::string &text) noexcept;
    /* Ends all transfers, current and later ones. */
    void abort();
    /* Closes the connections, for the end. */
    void close();

    /* Null: the ranks' own numbers. */
    const int *names() const
    {
        return names_.empty() ? nullptr : names_.data();
    }
    const tddp_observer &observer() const
    {
        return observer_;
    }
    int rank_name(int peer) const
    {
        return names_.empty() ? peer : names_[static_cast<size_t>(peer)];
    }
    /* "rank 3" */
    std::string rank_text(int peer) const;

  private:
    /* The observer's. */
    void connected(int peer, int fd) noexcept override;
    void closed(int peer, const std::exception_ptr &reason) noexcept override;
    void moved() noexcept override;

    /* connect.cc */
    void open(const tddp_backend_opts &opts, tddp_meeting *meeting, Clock::time_point deadline,
              tddp_cancel *cancel);
    void await_connections(tddp_meeting *meeting, Clock::time_point deadline, tddp_cancel *cancel);
    int first_unconnected() const;
    [[noreturn]] void fail_connecting(tddp_meeting *meeting, int peer, tddp_status status,
                                      const std::string &error);
    void expect_notices();
    void exchange_connected(tddp_meeting *meeting, Clock::time_point deadline, tddp_cancel *cancel);
    void exchange_bytes(std::set<int> &missing, Clock::time_point deadline, tddp_cancel *cancel);

    /* peers.cc; the first two with the lock held. */
    tddp_status state_of(int peer, uint64_t sequence, Clock::time_point now) const;
    bool observe(int peer, uint64_t sequence, tddp_observation *cause, std::string *text) const;
    [[noreturn]] void fail_ended(int peer, uint64_t sequence, const std::string &reason);

    bool has_ended(int peer);
    template <typename Visit> void each_peer(Visit visit)
    {
        for (int peer = 0; peer < size; peer++) {
            if (peer != rank) {
                visit(peer);
            }
        }
    }
    void wake_connecting() noexcept;
    void await_sent(std::chrono::milliseconds limit);
    void close_connections();

    const std::vector<int> names_; /* empty: the ranks' own numbers */
    const tddp_observer observer_;
    struct tddp_eventcount *events_ = nullptr;
    bool owns_events_ = false;
    int peer_timeout_ = 0; /* seconds */
    std::shared_ptr<tcp::Device> device_;
    std::shared_ptr<Context> context_;
    std::vector<std::unique_ptr<Transfer>> own_transfers_; /* of notices */
    CloseNotice notice_ = {};
    Beacon beacon_;
    std::once_flag reported_;
    std::once_flag closed_;
    std::atomic<bool> connecting_{true};
    std::atomic<bool> notices_expected_{false}; /* by this rank, so others' are too */
    std::atomic<bool> aborted_{false};
    std::atomic<bool> canceled_{false}; /* a transfer, so connections may end by this rank */
    std::atomic<bool> closing_{false};  /* by this rank */
    std::atomic<uint64_t> sequence_{0};
    std::atomic<unsigned> ended_{0};   /* connections */
    std::atomic<unsigned> changes_{0}; /* while connecting */

    std::mutex mutex_;                /* guards the following */
    std::condition_variable changed_; /* while connecting */
    std::vector<Peer> peers_;
    std::string failure_; /* the first that this rank has reported */
};

} // namespace tddp_gloo

#endif
