/*
 * The life of the connections, and transfers on them. Entered by the threads of the group's
 * operations, by those that abort and destroy it, and by Gloo's, which calls the observer.
 */
#include "transport.h"

#include <thread>

#include <tddp/log.h>

#include "failure.h"

namespace tddp_gloo
{

Transport::~Transport()
{
    close(std::chrono::milliseconds(0));
    /* The connections refer to the device. */
    context_.reset();
    device_.reset();
}

/* --- what Gloo tells ------------------------------------------------------------------------- */

void Transport::connected(int peer, int fd) noexcept
{
    tddp_transport_set_up_socket(fd, peer_timeout_);
    std::lock_guard<std::mutex> lock(mutex_);
    peers_[static_cast<size_t>(peer)].state = Peer::ACTIVE;
    changed_.notify_all();
}

void Transport::closed(int peer, const std::exception_ptr &reason) noexcept
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        peers_[static_cast<size_t>(peer)] = {Peer::ENDED, reason};
        changed_.notify_all();
    }
    ended_++;
    moved();
}

void Transport::moved() noexcept
{
    tddp_eventcount_notify(events_);
}

/* --- transfers ------------------------------------------------------------------------------- */

Transfer *Transport::send(int peer, uint64_t tag, const void *data, size_t bytes)
{
    if (closing_) {
        fail_ended(peer);
    }
    /* Gloo has one pointer type for both directions; a send doesn't write. */
    auto transfer =
        std::make_unique<Transfer>(context_, const_cast<void *>(data), bytes, peer, false);
    transfer->send(peer, tag, 0, bytes);
    return transfer.release();
}

Transfer *Transport::recv(int peer, uint64_t tag, void *data, size_t bytes)
{
    if (closing_) {
        fail_ended(peer);
    }
    auto transfer = std::make_unique<Transfer>(context_, data, bytes, peer, true);
    if (peer == TDDP_ANY_SOURCE) {
        std::vector<int> sources;
        each_peer([&](int each) {
            if (!has_ended(each)) {
                sources.push_back(each);
            }
        });
        transfer->recv(sources, tag, 0, bytes);
    } else {
        transfer->recv(peer, tag, 0, bytes);
    }
    return transfer.release();
}

/* A connection ends after its last completion: it is looked at first. */
bool Transport::test(Transfer &transfer, int *source)
{
    const bool ended = ended_ > 0 && has_ended(transfer.peer);
    if (transfer.is_complete(source)) {
        return true;
    }
    if (ended) {
        fail_ended(transfer.peer);
    }
    return false;
}

bool Transport::has_ended(int peer)
{
    if (peer == TDDP_ANY_SOURCE) {
        return closing_ || ended_ + 1 >= static_cast<unsigned>(size);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return closing_ || peers_[static_cast<size_t>(peer)].state != Peer::ACTIVE;
}

void Transport::fail_ended(int peer)
{
    if (closing_) {
        throw Failure(TDDP_GROUP_FAILED, "this rank has closed its connections");
    }
    std::unique_lock<std::mutex> lock(mutex_);
    const std::exception_ptr reason =
        peer == TDDP_ANY_SOURCE ? nullptr : peers_[static_cast<size_t>(peer)].reason;
    lock.unlock();
    try {
        if (reason) {
            std::rethrow_exception(reason);
        }
    } catch (const std::exception &cause) {
        throw Failure(TDDP_PEER_LOST, strip_location(cause));
    }
    throw Failure(TDDP_PEER_LOST, "its connection has ended");
}

/* --- the end --------------------------------------------------------------------------------- */

/* Closing a connection that has unread input resets it, and output that was not acknowledged is
 * lost. */
void Transport::await_sent(std::chrono::milliseconds limit)
{
    constexpr std::chrono::milliseconds POLL_INTERVAL{1};
    const auto end = Clock::now() + limit;
    each_peer([&](int peer) {
        Connection *one = closing_ || !context_ ? nullptr : context_->connection(peer);
        while (one && !one->is_sent() && Clock::now() < end) {
            std::this_thread::sleep_for(POLL_INTERVAL);
        }
    });
}

/* The peers notice at once. */
void Transport::close(std::chrono::milliseconds limit)
{
    await_sent(limit);
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
                tddp_log(TDDP_LOG_DEBUG, "gloo", "closing a connection: %s", cause.what());
            }
        }
    });
    moved();
}

} // namespace tddp_gloo
