/*
 * The connections of one rank to all others, and waiting on them.
 *
 * Gloo's waits end by its own timeout only, which closes every connection; a transfer that a peer's
 * death interrupts half way, and a receive from any source, are never told of it. So a watch thread
 * looks every TICK at what became of the peers, and wakes the waits that this concerns, or whose
 * time is over; they find out by themselves what to do. The watch sleeps while nothing runs.
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

#include "failure.h"
#include "header.h"
#include "liveness.h"
#include "parcels.h"

namespace tddp_gloo
{

using Buffer = gloo::transport::UnboundBuffer;
using Clock = std::chrono::steady_clock;

/* Longer than any operation: deadlines are kept here, not by Gloo. */
constexpr std::chrono::milliseconds GLOO_TIMEOUT{std::chrono::hours(24 * 365)};

Clock::time_point deadline_after(int64_t ms);

/* A text of Gloo's without the place in its source that it begins with. */
std::string plain(const std::exception &cause);

/* Bytes of payload that travel together with an operation's header, in memory of our own. */
constexpr size_t EAGER_BYTES = 64 * 1024;
/* What a header may need; keeps the payload behind it aligned. */
constexpr size_t HEADER_BYTES = 64;

/*
 * Slots, by which Gloo matches what is sent with what is received, first in, first out for each
 * pair. The payloads of collectives have the highest bit clear (see slot_of()); everything else has
 * it set: messages between two ranks their tag, and a number where they are large (see p2p.cc), and
 * the following the largest number.
 */
constexpr uint64_t HEADER_SLOT = ~UINT64_C(0);      /* headers of collectives */
constexpr uint64_t SENTINEL_SLOT = HEADER_SLOT - 1; /* nothing is ever sent there */
constexpr uint64_t FAREWELL_SLOT = HEADER_SLOT - 2; /* a rank's last words */
constexpr uint64_t GREETING_SLOT = HEADER_SLOT - 3; /* a rank's first: it is connected to all */
constexpr uint32_t LARGEST_NUMBER = 0x7fffffff;

/* What a rank tells the others before it closes its connections, so that they know why. */
struct Farewell {
    uint64_t sequence; /* of its last collective */
    uint32_t status;   /* TDDP_OK: the group was destroyed; else what failed */
    uint32_t check;    /* FAREWELL_CHECK: all of it has arrived */
    char text[496];
};
constexpr uint32_t FAREWELL_CHECK = 0x65796221;

/*
 * What goes to and from one peer outside the caller's buffers. Two inboxes take turns: while the
 * header of one operation is looked at, the next one's may arrive. The sentinel is a receive that
 * never gets anything but Gloo's exception when the connection ends.
 */
struct Link {
    std::unique_ptr<char[]> memory;
    char *inbox_data[2];
    char *outbox_data;
    std::unique_ptr<Buffer> inbox[2];
    std::unique_ptr<Buffer> outbox;
    unsigned turn = 0;      /* the inbox in which the current operation's header arrives */
    tddp_calls before = {}; /* of the last operation in which they agreed */
    uint64_t agreed = 0;    /* its number */
    std::unique_ptr<Farewell> farewell_data;
    std::unique_ptr<Buffer> farewell;
    std::unique_ptr<Buffer> sentinel;
    uint32_t messages = 0; /* large ones sent so far; see p2p.cc */
    uint64_t examined = 0; /* the collective whose header was found in an inbox by has_come() */
};

/* What became of a peer. */
struct Peer {
    enum { HERE, LEFT, LOST } state = HERE;
    Clock::time_point since;
    uint64_t sequence = 0;        /* LEFT: its last collective */
    tddp_status status = TDDP_OK; /* LOST: why it gave up; TDDP_OK: it did not say */
    std::string why;
};

/* One operation, as far as its waits must know it. */
struct Task {
    const tddp_op *op = nullptr;
    Clock::time_point deadline;
    bool matched = false; /* point to point: both ends are there, the payload is on its way */

    Task() = default;
    explicit Task(const tddp_op &it) : op(&it), deadline(deadline_after(it.timeout_ms)) {}
};

/* Whether a text of Gloo's speaks of connections that one of our own waits has closed. */
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

    /* Any thread: all operations under way and to come fail soon. */
    void abort();
    /* Tells the peers, once, why this rank's connections will close; at the end, or when an
     * operation has failed and the group will. */
    void say_farewell(tddp_status status, const std::string &text) noexcept;

    /* Around each collective. */
    void begin(const tddp_op &op);
    void end();
    /* Around waits of other operations: the watch looks at them meanwhile. */
    void enter();
    void leave();

    /* All these throw Failure, with the peer's rank in its text. */
    std::unique_ptr<Buffer> buffer(void *data, size_t bytes);
    void send(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
              size_t bytes);
    void recv(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
              size_t bytes);
    void wait_send(const Task &task, Buffer &buffer, int peer);
    /* `peer` may be TDDP_ANY_SOURCE; returns whose it was. */
    int wait_recv(const Task &task, Buffer &buffer, int peer);

    /* The same for the collective that runs. */
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

    /* Fails if a peer is lost, if `peer` has left, or if nobody is left for TDDP_ANY_SOURCE. */
    void check_peers(const Task &task, int peer);

    Link &link(int peer)
    {
        return links_[static_cast<size_t>(peer)];
    }

    /* Posts the receive of the next header but one; see Link. */
    void post_inbox(int peer, unsigned which);

    /* Fails if a peer's call, as it came from it, and this rank's do not agree. */
    void compare(const tddp_op &op, int peer, const char *header);

    /* What a rank is called in messages. */
    int name(int peer) const
    {
        return names_.empty() ? peer : names_[static_cast<size_t>(peer)];
    }
    /* "rank 3" */
    std::string called(int peer) const
    {
        return "rank " + std::to_string(name(peer));
    }

    /* Memory for messages between two ranks. */
    Parcels parcels;

    /* Memory that lasts, for what arrives. Contents are lost when it grows. */
    char *scratch(size_t bytes);

  private:
    /* A wait under way, in the list of those that the watch may wake. */
    struct Waiter {
        const Task *task;
        Buffer *buffer;
        int peer;
        bool receives;
        bool brief = false; /* to be woken at the next tick but one in any case */
        Clock::time_point since = {};
    };
    enum class Outcome { DONE, WOKEN, FAILED };

    /* connect.cc */
    void open(const tddp_backend_opts &opts, Clock::time_point deadline, tddp_cancel *cancel);
    void publish(tddp_store *store, const tddp_wait *wait);
    void await_peer(int peer, const std::vector<char> &beacon);
    bool awaited_is_dead();
    void connect_pair(tddp_store *store, int peer, Clock::time_point deadline, tddp_cancel *cancel);
    void make_links();
    void set_up_sockets(int seconds);
    void greet(tddp_store *store, Clock::time_point deadline, tddp_cancel *cancel);

    /* mesh.cc */
    int wait(const Task &task, Buffer &buffer, int peer, bool receives);
    Outcome wait_once(Waiter &waiter, int *source, std::string *why);
    bool settle(const Waiter &waiter, int *source);
    bool look_again(Waiter waiter, int *source);
    std::vector<int> peers_here();
    bool is_gone(int peer);

    /* ends.cc */
    [[noreturn]] void lost(const Task &task, int peer, const std::string &why);
    [[noreturn]] void fail(const Task &task, tddp_status status, const std::string &text);
    bool has_come(const Task &task, int peer);
    bool look_for_header(const Task &task, int peer);
    std::string attendance(const Task &task);
    /* With the lock held: */
    std::string explain(tddp_status status, const Waiter &waiter) const;
    std::string who_is_gone() const;

    /* watch.cc */
    void start_watch();
    void stop_watch();
    void watch();
    void look_at_waits(Clock::time_point now);
    bool connecting_must_end(Clock::time_point now);
    void close_pairs();
    /* With the lock held: */
    void look_at_peers();
    void look_at_peer(int peer);
    tddp_status verdict(const Waiter &waiter, Clock::time_point now) const;

    const std::vector<int> names_; /* empty: as they are numbered */
    std::shared_ptr<gloo::transport::Device> device_;
    std::shared_ptr<gloo::transport::Context> context_;
    std::vector<Link> links_;
    std::unique_ptr<char[]> scratch_;
    size_t scratch_bytes_ = 0;
    Task current_; /* the collective that runs */
    std::atomic<bool> aborted_{false};
    std::once_flag closed_;
    std::once_flag farewell_said_;
    Farewell farewell_data_ = {};
    std::vector<int> sockets_; /* of the pairs; Gloo's to close */
    std::unique_ptr<Buffer> farewell_;
    bool published_ = false; /* the others know this rank's addresses */
    Beacon beacon_;

    std::thread watch_thread_;
    std::mutex mutex_; /* guards what follows */
    std::condition_variable changed_;
    bool stop_ = false;
    bool asleep_ = false;
    bool hurry_ = false;    /* a brief waiter has come */
    bool linked_ = false;   /* `links_` are complete */
    int busy_ = 0;          /* operations under way, and connecting */
    uint64_t sequence_ = 0; /* of the last collective */
    std::vector<Waiter *> waiters_;
    std::vector<Peer> peers_;
    int gone_ = 0;       /* of these: not HERE */
    std::string reason_; /* why the first operation that failed did */

    /* While connecting. */
    bool connecting_ = false;
    tddp_cancel *cancel_ = nullptr;
    Clock::time_point connect_deadline_;
    int awaited_ = -1; /* the peer to which a connection is made */
    sockaddr_storage awaited_beacon_ = {};
    Clock::time_point awaited_since_;
    std::unique_ptr<Probe> probe_;
    bool awaited_is_dead_ = false;
};

} // namespace tddp_gloo

#endif
