/*
 * The connections of one rank to all others, and waiting on them.
 *
 * Gloo's waits end by its own timeout only, which closes every connection, and a transfer that a
 * peer's death interrupts half way is never reported. So a watch thread wakes a wait that lasts
 * every TICK; the waiter then looks for an abort, its deadline and lost peers, and goes on. The
 * watch sleeps while no operation runs.
 */
#ifndef TDDP_GLOO_MESH_H
#define TDDP_GLOO_MESH_H

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

#include "header.h"

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
/* Where headers go. No operation's payload has this slot: its lower bits are those of a phase. */
constexpr uint64_t HEADER_SLOT = ~UINT64_C(0);

/*
 * What goes to and from one peer outside the caller's buffers. Two inboxes take turns: while the
 * header of one operation is looked at, the next one's may arrive. The posted one is also the
 * sentinel that learns of the peer's end.
 */
struct Link {
    std::unique_ptr<char[]> memory;
    char *inbox_data[2];
    char *outbox_data;
    std::unique_ptr<Buffer> inbox[2];
    std::unique_ptr<Buffer> outbox;
    unsigned turn = 0; /* the inbox in which the current operation's header arrives */
    Told before = {};  /* the headers of the operation before */
};

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

    /* Any thread: the running and all later operations fail soon. */
    void abort();

    /* Around each operation: sets its deadline. */
    void begin(int64_t timeout_ms);
    void end();

    /* These throw Failure, with the peer's rank in its text. */
    std::unique_ptr<Buffer> buffer(void *data, size_t bytes);
    void send(Buffer &buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
    void recv(Buffer &buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
    void wait_send(Buffer &buffer, int peer);
    void wait_recv(Buffer &buffer, int peer);

    Link &link(int peer)
    {
        return links_[static_cast<size_t>(peer)];
    }

    /* Posts the receive of the next header but one; see Link. */
    void post_inbox(int peer, unsigned which);

    /* Memory that lasts, for what arrives. Contents are lost when it grows. */
    char *scratch(size_t bytes);

  private:
    void open(const tddp_backend_opts &opts, Clock::time_point deadline, tddp_cancel *cancel);
    void publish(tddp_store *store, const tddp_wait *wait);
    void connect_pairs(tddp_store *store, Clock::time_point deadline, tddp_cancel *cancel);
    void make_links();
    void close_on_exec();
    void close_pairs();
    void watch();
    void start_watch();
    void stop_watch();
    bool wait_once(Buffer &buffer, int peer, bool receives);
    bool done_after_all(Buffer &buffer, bool receives);
    void wait(Buffer &buffer, int peer, bool receives);
    bool is_gone(int peer);
    [[noreturn]] void lost(int peer, const std::string &why);

    std::shared_ptr<gloo::transport::Device> device_;
    std::shared_ptr<gloo::transport::Context> context_;
    std::vector<Link> links_;
    std::unique_ptr<char[]> scratch_;
    size_t scratch_bytes_ = 0;
    Clock::time_point deadline_;
    int64_t timeout_ms_ = 0;
    std::atomic<bool> aborted_{false};
    std::once_flag closed_;
    bool published_ = false; /* the others know this rank's addresses */

    std::thread watch_thread_;
    std::mutex mutex_; /* guards what follows */
    std::condition_variable changed_;
    bool stop_ = false;
    bool busy_ = false;
    bool asleep_ = false;
    Buffer *waited_ = nullptr; /* what the progress thread waits on now */
    bool waited_receives_ = false;
    tddp_cancel *cancel_ = nullptr; /* while connecting */
};

} // namespace tddp_gloo

#endif
