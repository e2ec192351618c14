/*
 * The connections of one rank to all others, and waiting on them.
 *
 * Gloo's waits end only by Gloo's own timeout, which closes every connection. Gloo also never ends
 * a transfer that a peer's death interrupts, or a receive from any source. Therefore a watcher
 * thread checks the peers every CHECK_INTERVAL, and wakes the waits that a lost peer or a deadline
 * concerns; the woken thread decides what to do. The watcher sleeps while no operation runs.
 */
#ifndef TDDP_GLOO_MESH_H
#define TDDP_GLOO_MESH_H

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <tddp/backend.h>
#include <tddp/meeting.h>

#include "eager_buffers.h"
#include "failure.h"
#include "liveness.h"
#include "slots.h"

namespace tddp_gloo
{

using Buffer = gloo::transport::UnboundBuffer;
using Clock = std::chrono::steady_clock;

/* Longer than any operation: this module keeps the deadlines, not Gloo. */
constexpr std::chrono::milliseconds GLOO_TIMEOUT{std::chrono::hours(24 * 365)};

Clock::time_point deadline_after(int64_t ms);

/* Gloo's text without the source location at its start. */
std::string strip_location(const std::exception &cause);

/* Largest payload that is sent with an operation's header, through memory of this module. */
constexpr size_t EAGER_BYTES = 64 * 1024;
/* Space for a header; keeps the payload behind it aligned. */
constexpr size_t HEADER_BYTES = 64;

/*
 * Gloo matches sends with receives by slots, in order for each pair. Slots of collectives'
 * payloads have the highest bit clear (see slot_of()). All others have it set: point-to-point
 * messages also contain the tag, and a number if they are large (see p2p.cc); the following use
 * the largest number.
 */
constexpr uint64_t HEADER_SLOT = ~UINT64_C(0);          /* headers of collectives */
constexpr uint64_t SENTINEL_SLOT = HEADER_SLOT - 1;     /* never sent to */
constexpr uint64_t CLOSE_NOTICE_SLOT = HEADER_SLOT - 2; /* the last message of a rank */
constexpr uint64_t CONNECTED_SLOT = HEADER_SLOT - 3;    /* the first: connected to all */
constexpr uint32_t LARGEST_NUMBER = 0x7fffffff;

/* Sent before a rank closes its connections, with the reason. */
struct CloseNotice {
    uint64_t sequence; /* of its last collective */
    uint32_t status;   /* TDDP_OK: the group was destroyed; else the failure */
    uint32_t check;    /* CLOSE_NOTICE_CHECK: it has arrived completely */
    char text[496];
};
constexpr uint32_t CLOSE_NOTICE_CHECK = 0x65796221;

/* Buffers for a peer other than the caller's. Two inboxes are used alternately: the next
 * operation's header may arrive before the current one is processed. The sentinel is a receive
 * that completes only by Gloo's exception, when the connection ends. */
struct Link {
    std::unique_ptr<char[]> memory;
    char *inbox_data[2];
    char *outbox_data;
    std::unique_ptr<Buffer> inbox[2];
    std::unique_ptr<Buffer> outbox;
    unsigned inbox_index = 0; /* of the next header */
    uint64_t sent = 0;        /* the last collective whose header was sent to the peer */
    bool sending = false;     /* a header is on its way */
    tddp_calls before = {};   /* the calls of the last operation that agreed */
    uint64_t agreed = 0;      /* that operation's number */
    std::unique_ptr<CloseNotice> close_notice_data;
    std::unique_ptr<Buffer> close_notice;
    std::unique_ptr<Buffer> sentinel;
    uint32_t messages = 0; /* large messages sent so far; see p2p.cc */
    uint64_t examined = 0; /* the collective whose header has_entered() found in an inbox */
};

/* The state of a peer. */
struct Peer {
    enum { ACTIVE, LEFT, LOST } state = ACTIVE;
    Clock::time_point since;
    uint64_t sequence = 0;        /* LEFT: its last collective */
    tddp_status status = TDDP_OK; /* LOST: the failure that it reported; TDDP_OK: none */
    std::string reason;
};

/* An operation, as its waits see it. */
struct Task {
    const tddp_op *op = nullptr;
    Clock::time_point deadline;
    bool matched = false;      /* point to point: both sides have arrived */
    bool all_partners = true;  /* headers are exchanged with all peers, or else with */
    std::vector<int> partners; /* these */

    Task() = default;
    explicit Task(const tddp_op &it) : op(&it), deadline(deadline_after(it.timeout_ms)) {}
};

/* Whether Gloo's text is about connections that this rank's own wait has closed. */
bool closed_by_ourselves(const std::string &gloo_text);

class Mesh
{
  public:
    explicit Mesh(const tddp_backend_opts &opts);
    ~Mesh();
    Mesh(const Mesh &) = delete;
    Mesh &operator=(const Mesh &) = delete;

    const int rank;
    const int size;

    void connect(const tddp_backend_opts &opts, const tddp_wait *wait);

    /* Any thread. Current and later operations fail soon. */
    void abort();
    /* Tells the peers, once, why this rank's connections will close: the end of the group, or a
     * failure. */
    void send_close_notice(tddp_status status, const std::string &text) noexcept;

    /* Enclose each collective. It may be interrupted, and begun once more. */
    void begin(const tddp_op &op);
    void end();
    bool resumed() const
    {
        return resumed_;
    }
    /* Within it: only these peers send headers. */
    void limit_partners(std::vector<int> partners);
    /* Enclose waits of other operations: the watcher is active meanwhile. */
    void begin_wait();
    void end_wait();

    /* These throw Failure, with the peer's rank in the text. */
    std::unique_ptr<Buffer> buffer(void *data, size_t bytes);
    void send(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
              size_t bytes);
    void recv(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
              size_t bytes);
    void wait_send(const Task &task, Buffer &buffer, int peer);
    /* `peer` may be TDDP_ANY_SOURCE; returns the source. */
    int wait_recv(const Task &task, Buffer &buffer, int peer);

    /* The same for the running collective. */
    void send(Buffer &buffer, int peer, uint64_t slot, size_t offset, size_t bytes)
    {
        send(current_, buffer, peer, slot, offset, bytes);
    }
    void recv(Buffer &buffer, int peer, uint64_t slot, size_t offset, size_t bytes)
    {
        recv(current_, buffer, peer, slot, offset, bytes);
    }
    void wait_send(Buffer &buffer, int peer)
    {
        wait_send(current_, buffer, peer);
    }
    void wait_recv(Buffer &buffer, int peer)
    {
        (void)wait_recv(current_, buffer, peer);
    }

    /* Fails if a peer is lost, if `peer` has left, or if no source is left for TDDP_ANY_SOURCE. */
    void check_peers(const Task &task, int peer);

    /* Fails if a peer is lost, or if this one has left; -1: any. Any thread. */
    void check_peers(int peer);

    Link &link(int peer)
    {
        return links_[static_cast<size_t>(peer)];
    }

    /* Posts the receive of a later header; see Link. */
    void post_inbox(int peer, unsigned which);

    void wait_header(int peer);

    /* Returns soon after Gloo's thread has written something other than 0 to this word of a posted
     * buffer, or after a moment, or if nothing awaits the operation at once. Only a hint, which
     * saves the caller's thread from sleeping and being woken. */
    void spin_until_arrival(const tddp_op &op, const uint64_t *word);

    /* Fails if a peer's call, in its header, and this rank's do not agree. */
    void compare(const tddp_op &op, int peer, const char *header);

    /* A rank's number in messages. */
    int rank_name(int peer) const
    {
        return names_.empty() ? peer : names_[static_cast<size_t>(peer)];
    }
    /* "rank 3" */
    std::string rank_text(int peer) const
    {
        return "rank " + std::to_string(rank_name(peer));
    }

    /* For point-to-point messages. */
    EagerBuffers eager_buffers;

    /* Reused memory for received data. Its contents are lost when it grows. */
    char *scratch(size_t bytes);

  private:
    /* A wait, in the list of those that the watcher may wake. */
    struct Waiter {
        const Task *task;
        Buffer *buffer;
        int peer;
        bool receives;
        bool brief = false; /* woken after BRIEF_INTERVAL in any case */
        Clock::time_point since = {};
    };
    enum class Outcome { DONE, WOKEN, FAILED };

    /* connect.cc */
    void open(const tddp_backend_opts &opts, tddp_meeting *meeting, Clock::time_point deadline,
              tddp_cancel *cancel);
    void set_connecting_to(int peer, const sockaddr_storage &beacon);
    bool connecting_peer_died();
    void connect_pairs(tddp_meeting *meeting, Clock::time_point deadline, tddp_cancel *cancel);
    void connect_pair(tddp_meeting *meeting, int peer, Clock::time_point deadline,
                      tddp_cancel *cancel);
    void make_links();
    void set_up_sockets(int seconds);
    void exchange_connected(tddp_meeting *meeting, Clock::time_point deadline, tddp_cancel *cancel);

    /* mesh.cc */
    int wait(const Task &task, Buffer &buffer, int peer, bool receives);
    Outcome wait_once(Waiter &waiter, int *source, std::string *reason);
    bool check_woken(const Waiter &waiter, int *source);
    bool wait_briefly(Waiter waiter, int *source);
    std::vector<int> active_peers();
    bool is_inactive(int peer);

    /* errors.cc */
    [[noreturn]] void fail_lost(const Task &task, int peer, const std::string &reason);
    [[noreturn]] void fail(const Task &task, tddp_status status, const std::string &text);
    std::vector<int> partners_in(const Task &task) const;
    bool has_entered(const Task &task, int peer);
    bool has_header(const Task &task, int peer);
    std::string entered_and_missing(const Task &task);
    /* With the lock held: */
    std::string describe_failure(tddp_status status, const Waiter &waiter) const;
    std::string describe_lost() const;
    void observe_lost() const;

    /* watcher.cc */
    void start_watcher();
    void stop_watcher();
    void watch_peers();
    void wake_waits(Clock::time_point now);
    bool connect_must_stop(Clock::time_point now);
    void close_pairs();
    /* With the lock held: */
    void update_peers();
    void update_peer(int peer);
    tddp_status check_wait(const Waiter &waiter, Clock::time_point now) const;

    const std::vector<int> names_; /* empty: the ranks' own numbers */
    const tddp_observer observer_;
    std::shared_ptr<gloo::transport::Device> device_;
    std::shared_ptr<gloo::transport::Context> context_;
    std::vector<Link> links_;
    std::unique_ptr<char[]> scratch_;
    size_t scratch_bytes_ = 0;
    Task current_;         /* the running collective, or the interrupted one */
    bool resumed_ = false; /* it runs for the second time */
    std::atomic<bool> aborted_{false};
    std::once_flag closed_;
    std::once_flag close_notice_sent_;
    CloseNotice close_notice_data_ = {};
    std::vector<int> sockets_; /* of the pairs; owned by Gloo */
    std::unique_ptr<Buffer> close_notice_;
    Beacon beacon_;

    std::thread watcher_thread_;
    std::mutex mutex_; /* guards the following */
    std::condition_variable changed_;
    bool stop_ = false;
    bool idle_ = false;
    bool wake_early_ = false;  /* a brief wait has begun */
    bool links_ready_ = false; /* `links_` is complete */
    int active_ = 0;           /* running operations, and connecting */
    uint64_t sequence_ = 0;    /* of the last collective */
    std::vector<Waiter *> waiters_;
    std::vector<Peer> peers_;
    int inactive_count_ = 0;    /* peers that are not ACTIVE */
    std::string first_failure_; /* text of the first failed operation */

    /* While connecting: */
    bool connecting_ = false;
    tddp_cancel *cancel_ = nullptr;
    Clock::time_point connect_deadline_;
    int connecting_to_ = -1; /* the peer, or -1 */
    sockaddr_storage peer_beacon_ = {};
    Clock::time_point peer_checked_at_;
    std::unique_ptr<Probe> probe_;
    bool connecting_peer_died_ = false;
};

} // namespace tddp_gloo

#endif
