/*
 * The life of the connections, and transfers on them. Entered by the threads of the group's
 * operations, by those that abort and destroy it, and by Gloo's, which calls the observer.
 */
#include "transport.h"

#include <fcntl.h>

#include <cstddef>
#include <thread>

#include <tddp/log.h>

#include "failure.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

/* For data that the kernel still has to deliver when a group ends. */
constexpr milliseconds SEND_TIMEOUT{2000};
/* The same after a failure, for which others may wait. */
constexpr milliseconds FAILED_SEND_TIMEOUT{100};

std::vector<int> names_in(const tddp_backend_opts &opts)
{
    /* Older cores don't pass names. */
    if (opts.size < offsetof(tddp_backend_opts, names) + sizeof opts.names || !opts.names) {
        return {};
    }
    return {opts.names, opts.names + opts.world_size};
}

tddp_observer observer_in(const tddp_backend_opts &opts)
{
    const bool known = opts.size >= offsetof(tddp_backend_opts, observer) + sizeof opts.observer;
    return known ? opts.observer : tddp_observer{};
}

} // namespace

Transport::Transport(const tddp_backend_opts &opts)
    : rank(opts.rank), size(opts.world_size), names_(names_in(opts)), observer_(observer_in(opts)),
      peers_(static_cast<size_t>(opts.world_size))
{
    const bool has_events = opts.size >= offsetof(tddp_backend_opts, events) + sizeof opts.events;
    events_ = has_events ? opts.events : nullptr;
    if (!events_) {
        Failure::check(tddp_eventcount_create(&events_));
        owns_events_ = true;
    }
}

Transport::~Transport()
{
    close();
    own_transfers_.clear();
    /* The connections refer to the device. */
    context_.reset();
    device_.reset();
    if (owns_events_) {
        tddp_eventcount_free(events_);
    }
}

std::string Transport::rank_text(int peer) const
{
    return "rank " + std::to_string(rank_name(peer));
}

/* --- what Gloo tells ------------------------------------------------------------------------- */

/* Gloo's sockets would stay open in programs that this process executes. Such a program would keep
 * the connections open after this process's death, and the others would not notice it. */
void Transport::connected(int peer, int fd) noexcept
{
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    set_keepalive(fd, peer_timeout_);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        peers_[static_cast<size_t>(peer)].state = Peer::ACTIVE;
    }
    wake_connecting();
}

void Transport::closed(int peer, const std::exception_ptr &reason) noexcept
{
    if (!closing_) {
        std::lock_guard<std::mutex> lock(mutex_);
        Peer &one = peers_[static_cast<size_t>(peer)];
        one.state = Peer::LOST;
        one.since = Clock::now();
        one.reason = reason;
        if (one.notice.check == CLOSE_NOTICE_CHECK) {
            one.sequence = one.notice.sequence;
            one.status = static_cast<tddp_status>(one.notice.status);
            one.state = one.status == TDDP_OK ? Peer::LEFT : Peer::LOST;
        }
    }
    ended_++;
    moved();
}

void Transport::moved() noexcept
{
    tddp_eventcount_notify(events_);
    wake_connecting();
}

void Transport::wake_connecting() noexcept
{
    if (connecting_) {
        std::lock_guard<std::mutex> lock(mutex_);
        changes_++;
        changed_.notify_all();
    }
}

/* --- transfers ------------------------------------------------------------------------------- */

Transfer *Transport::send(int peer, uint64_t tag, const void *data, size_t bytes)
{
    /* Gloo has one pointer type for both directions; a send doesn't write. */
    auto transfer =
        std::make_unique<Transfer>(context_, const_cast<void *>(data), bytes, peer, false);
    try {
        transfer->send(peer, tag, 0, bytes);
    } catch (const std::bad_alloc &) {
        throw; /* no fault of the peer's */
    } catch (const std::exception &cause) {
        fail_ended(peer, 0, strip_location(cause));
    }
    return transfer.release();
}

Transfer *Transport::recv(int peer, uint64_t tag, void *data, size_t bytes)
{
    auto transfer = std::make_unique<Transfer>(context_, data, bytes, peer, true);
    try {
        if (peer == TDDP_ANY_SOURCE) {
            std::vector<int> sources;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                each_peer([&](int each) {
                    if (peers_[static_cast<size_t>(each)].state == Peer::ACTIVE) {
                        sources.push_back(each);
                    }
                });
            }
            transfer->recv(sources, tag, 0, bytes);
        } else {
            transfer->recv(peer, tag, 0, bytes);
        }
    } catch (const std::bad_alloc &) {
        throw; /* no fault of the peer's */
    } catch (const std::exception &cause) {
        fail_ended(peer, 0, strip_location(cause));
    }
    return transfer.release();
}

/* A connection ends after its last completion: it is looked at first. */
bool Transport::test(Transfer &transfer, int *source)
{
    bool ended = false;
    if (ended_ > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        ended =
            closing_ || (transfer.peer == TDDP_ANY_SOURCE
                             ? state_of(transfer.peer, 0, Clock::now()) != TDDP_OK
                             : peers_[static_cast<size_t>(transfer.peer)].state != Peer::ACTIVE);
    }
    if (transfer.is_complete(source)) {
        return true;
    }
    if (ended) {
        fail_ended(transfer.peer, 0, "");
    }
    return false;
}

/* A connection on which a message without memory comes later ends then (connection.h): peers that
 * wait have been told why before that. */
void Transport::release(Transfer *transfer) noexcept
{
    int source;
    const bool any = transfer->peer == TDDP_ANY_SOURCE;
    if (!transfer->is_complete(&source) && (any || !has_ended(transfer->peer))) {
        canceled_ = true;
    }
    delete transfer;
}

bool Transport::has_ended(int peer)
{
    std::lock_guard<std::mutex> lock(mutex_);
    return peers_[static_cast<size_t>(peer)].state != Peer::ACTIVE;
}

/* --- the end --------------------------------------------------------------------------------- */

/* Does not wait for delivery: if a connection is too full, the peer sees only its end. */
void Transport::report(tddp_status status, const std::string &text) noexcept
{
    try {
        std::call_once(reported_, [&] {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                failure_ = text;
            }
            if (!notices_expected_ || closing_) {
                return;
            }
            notice_.sequence = sequence_;
            notice_.status = status;
            notice_.check = CLOSE_NOTICE_CHECK;
            text.copy(notice_.text, sizeof notice_.text - 1);
            each_peer([&](int peer) {
                try {
                    own_transfers_.emplace_back(
                        send(peer, CLOSE_NOTICE_TAG, &notice_, sizeof notice_));
                } catch (const std::exception &) {
                    /* The peer is gone. */
                }
            });
        });
    } catch (const std::exception &) {
        /* Best effort. */
    }
}

void Transport::abort()
{
    report(TDDP_GROUP_FAILED, "its group was destroyed while operations were under way");
    if (!aborted_) {
        await_sent(FAILED_SEND_TIMEOUT);
    }
    aborted_ = true;
    close_connections();
}

void Transport::close()
{
    report(TDDP_OK, "");
    if (!aborted_) {
        await_sent(SEND_TIMEOUT);
    }
    close_connections();
}

/* Closing a connection that has unread input resets it, and output that was not acknowledged is
 * lost. */
void Transport::await_sent(milliseconds limit)
{
    constexpr milliseconds POLL_INTERVAL{1};
    const auto end = Clock::now() + limit;
    each_peer([&](int peer) {
        Connection *one = closing_ || !context_ ? nullptr : context_->connection(peer);
        while (one && !one->is_sent() && Clock::now() < end) {
            std::this_thread::sleep_for(POLL_INTERVAL);
        }
    });
}

/* The peers notice at once. */
void Transport::close_connections()
{
    std::call_once(closed_, [this] {
        closing_ = true;
        for (int peer = 0; context_ && peer < size; peer++) {
            /* Where making them failed, some are missing. */
            Connection *one = context_->connection(peer);
            try {
                if (one) {
                    one->close();
                }
            } catch (const std::exception &cause) {
                tddp_log(TDDP_LOG_DEBUG, "gloo", "closing %s: %s", rank_text(peer).c_str(),
                         cause.what());
            }
        }
    });
    tddp_eventcount_notify(events_);
}

} // namespace tddp_gloo
