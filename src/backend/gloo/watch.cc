/*
 * The watch: what became of the peers, and waking the waits that this concerns. Its thread lives as
 * long as the mesh and sleeps while nothing runs; peers are looked at by other threads too.
 *
 * Invariants: a waiter is in the list only while its buffer is alive, and whoever wakes it holds
 * the lock. A peer that was gone once stays gone; what Gloo says of connections that this rank has
 * closed itself does not count. Only one thread at a time touches a sentinel: waking it and then
 * waiting on it comes back at once, with its exception if the connection has ended.
 */
#include <algorithm>
#include <cstring>

#include <gloo/transport/pair.h>

#include <tddp/log.h>

#include "mesh.h"
#include "signals.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

constexpr milliseconds TICK{50};
/* While a brief waiter is there. */
constexpr milliseconds SHORT_TICK{10};
/* A peer may end as soon as it has done its part: what it sent to others may let them do theirs. */
constexpr milliseconds GRACE{300};
/* A peer that is waited for while connecting is looked at after the first, and counts as dead when
 * its beacon has been gone for the second, for it may just have finished. */
constexpr milliseconds PATIENCE{200};
constexpr milliseconds FINISHING{1000};

} // namespace

/* --- peers ----------------------------------------------------------------------------------- */

void Mesh::look_at_peers()
{
    for (int peer = 0; linked_ && peer < size; peer++) {
        if (peer != rank && peers_[static_cast<size_t>(peer)].state == Peer::HERE) {
            look_at_peer(peer);
        }
    }
}

void Mesh::look_at_peer(int peer)
{
    Peer &one = peers_[static_cast<size_t>(peer)];
    try {
        Buffer &sentinel = *link(peer).sentinel;
        sentinel.abortWaitRecv();
        sentinel.waitRecv(nullptr, GLOO_TIMEOUT);
        return;
    } catch (const std::exception &cause) {
        one.why = plain(cause);
    }
    if (closed_by_ourselves(one.why)) {
        return;
    }
    /* Gloo is done with this connection, and with the memory. */
    const Farewell &words = *link(peer).farewell_data;
    one.state = Peer::LOST;
    one.since = Clock::now();
    gone_++;
    if (words.check == FAREWELL_CHECK) {
        one.sequence = words.sequence;
        one.status = static_cast<tddp_status>(words.status);
        if (one.status == TDDP_OK) {
            one.state = Peer::LEFT;
        } else {
            one.why.assign(words.text, strnlen(words.text, sizeof words.text));
        }
    }
}

/* --- waits ----------------------------------------------------------------------------------- */

tddp_status Mesh::verdict(const Waiter &waiter, Clock::time_point now) const
{
    if (aborted_) {
        return TDDP_GROUP_FAILED;
    }
    const tddp_op &op = *waiter.task->op;
    for (int peer = 0; gone_ > 0 && peer < size; peer++) {
        const Peer &one = peers_[static_cast<size_t>(peer)];
        bool late =
            one.state == Peer::LEFT && !tddp_op_is_p2p(op.kind) && one.sequence < op.sequence;
        bool dead = one.state == Peer::LOST && now - one.since >= GRACE;
        if (one.state != Peer::HERE && (peer == waiter.peer || late || dead)) {
            return TDDP_PEER_LOST;
        }
    }
    if (waiter.peer == TDDP_ANY_SOURCE && gone_ == size - 1) {
        return TDDP_PEER_LOST;
    }
    return now >= waiter.task->deadline ? TDDP_TIMEOUT : TDDP_OK;
}

void Mesh::look_at_waits(Clock::time_point now)
{
    for (Waiter *each : waiters_) {
        bool wake = each->brief ? now - each->since >= SHORT_TICK : verdict(*each, now) != TDDP_OK;
        if (wake) {
            each->receives ? each->buffer->abortWaitRecv() : each->buffer->abortWaitSend();
        }
    }
}

/* --- the thread ------------------------------------------------------------------------------ */

void Mesh::enter()
{
    std::lock_guard<std::mutex> lock(mutex_);
    busy_++;
    if (asleep_) {
        changed_.notify_one();
    }
}

void Mesh::leave()
{
    std::lock_guard<std::mutex> lock(mutex_);
    busy_--;
}

void Mesh::start_watch()
{
    SignalsBlocked blocked;
    try {
        watch_thread_ = std::thread([this] { watch(); });
    } catch (const std::exception &cause) {
        throw Failure(TDDP_SYSTEM, std::string("cannot start a thread: ") + cause.what());
    }
}

void Mesh::stop_watch()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        changed_.notify_one();
    }
    if (watch_thread_.joinable()) {
        watch_thread_.join();
    }
}

/* The lock is free while this looks at a deadline or a beacon, but for a moment. */
bool Mesh::connecting_must_end(Clock::time_point now)
{
    if ((cancel_ && tddp_cancel_triggered(cancel_)) || now >= connect_deadline_) {
        return true;
    }
    if (awaited_ < 0 || now - awaited_since_ < PATIENCE) {
        return false;
    }
    if (!probe_) {
        probe_ = std::make_unique<Probe>(awaited_beacon_);
    }
    if (!probe_->over()) {
        awaited_since_ = now - PATIENCE;
    }
    awaited_is_dead_ = now - awaited_since_ >= PATIENCE + FINISHING;
    return awaited_is_dead_;
}

void Mesh::watch()
{
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
        if (busy_ == 0) {
            asleep_ = true;
            changed_.wait(lock, [this] { return stop_ || busy_ > 0; });
            asleep_ = false;
            continue;
        }
        bool brief = std::any_of(waiters_.begin(), waiters_.end(),
                                 [](const Waiter *each) { return each->brief; });
        hurry_ = false;
        changed_.wait_for(lock, brief ? SHORT_TICK : TICK, [this] { return stop_ || hurry_; });
        Clock::time_point now = Clock::now();
        look_at_peers();
        look_at_waits(now);
        /* Gloo's connect cannot be interrupted, but a pair that is closed ends it. */
        if (connecting_ && connecting_must_end(now)) {
            connecting_ = false;
            lock.unlock();
            close_pairs();
            lock.lock();
        }
    }
}

/* The peers learn of it at once: their receives end with a closed connection. */
void Mesh::close_pairs()
{
    std::call_once(closed_, [this] {
        for (int peer = 0; context_ && peer < size; peer++) {
            if (peer != rank) {
                try {
                    context_->getPair(peer)->close();
                } catch (const std::exception &cause) {
                    tddp_log(TDDP_LOG_DEBUG, "gloo", "closing rank %d: %s", name(peer),
                             cause.what());
                }
            }
        }
    });
}

} // namespace tddp_gloo
