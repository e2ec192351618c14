/*
 * The watcher: tracks the state of the peers, and wakes waits that it concerns. Its thread lives as
 * long as the mesh and sleeps while no operation runs. Other threads also update the peers.
 *
 * Invariants: a wait is in the list only while its buffer exists, and a thread that wakes it holds
 * the lock. A lost peer stays lost; Gloo's errors about connections that this rank closed itself
 * don't count. Only one thread at a time uses a sentinel: after waking it, waiting on it returns at
 * once, with an exception if the connection has ended.
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

constexpr milliseconds CHECK_INTERVAL{50};
/* While there is a brief wait. */
constexpr milliseconds BRIEF_INTERVAL{10};
/* A peer may end as soon as it has done its part: what it sent to others may complete their
 * operations. */
constexpr milliseconds GRACE{300};
/* While connecting, a peer's beacon is probed after PROBE_AFTER. The peer counts as dead when
 * its beacon has been closed for CONNECT_GRACE, since it may just have finished connecting. */
constexpr milliseconds PROBE_AFTER{200};
constexpr milliseconds CONNECT_GRACE{1000};

} // namespace

/* --- peers ----------------------------------------------------------------------------------- */

void Mesh::update_peers()
{
    for (int peer = 0; links_ready_ && peer < size; peer++) {
        if (peer != rank && peers_[static_cast<size_t>(peer)].state == Peer::ACTIVE) {
            update_peer(peer);
        }
    }
}

void Mesh::update_peer(int peer)
{
    Peer &one = peers_[static_cast<size_t>(peer)];
    try {
        Buffer &sentinel = *link(peer).sentinel;
        sentinel.abortWaitRecv();
        sentinel.waitRecv(nullptr, GLOO_TIMEOUT);
        return;
    } catch (const std::exception &cause) {
        one.reason = strip_location(cause);
    }
    if (closed_by_ourselves(one.reason)) {
        return;
    }
    /* Gloo no longer uses this connection, nor the memory. */
    const CloseNotice &notice = *link(peer).close_notice_data;
    one.state = Peer::LOST;
    one.since = Clock::now();
    inactive_count_++;
    if (notice.check == CLOSE_NOTICE_CHECK) {
        one.sequence = notice.sequence;
        one.status = static_cast<tddp_status>(notice.status);
        if (one.status == TDDP_OK) {
            one.state = Peer::LEFT;
        } else {
            one.reason.assign(notice.text, strnlen(notice.text, sizeof notice.text));
        }
    }
}

/* --- waits ----------------------------------------------------------------------------------- */

tddp_status Mesh::check_wait(const Waiter &waiter, Clock::time_point now) const
{
    if (aborted_) {
        return TDDP_GROUP_FAILED;
    }
    const tddp_op &op = *waiter.task->op;
    for (int peer = 0; inactive_count_ > 0 && peer < size; peer++) {
        const Peer &one = peers_[static_cast<size_t>(peer)];
        bool late =
            one.state == Peer::LEFT && !tddp_op_is_p2p(op.kind) && one.sequence < op.sequence;
        bool dead = one.state == Peer::LOST && now - one.since >= GRACE;
        if (one.state != Peer::ACTIVE && (peer == waiter.peer || late || dead)) {
            return TDDP_PEER_LOST;
        }
    }
    if (waiter.peer == TDDP_ANY_SOURCE && inactive_count_ == size - 1) {
        return TDDP_PEER_LOST;
    }
    if (op.cancel && tddp_cancel_triggered(op.cancel)) {
        return TDDP_CANCELED;
    }
    return now >= waiter.task->deadline ? TDDP_TIMEOUT : TDDP_OK;
}

void Mesh::wake_waits(Clock::time_point now)
{
    for (Waiter *each : waiters_) {
        bool wake =
            each->brief ? now - each->since >= BRIEF_INTERVAL : check_wait(*each, now) != TDDP_OK;
        if (wake) {
            each->receives ? each->buffer->abortWaitRecv() : each->buffer->abortWaitSend();
        }
    }
}

/* --- the thread ------------------------------------------------------------------------------ */

void Mesh::begin_wait()
{
    std::lock_guard<std::mutex> lock(mutex_);
    active_++;
    if (idle_) {
        changed_.notify_one();
    }
}

void Mesh::end_wait()
{
    std::lock_guard<std::mutex> lock(mutex_);
    active_--;
}

void Mesh::start_watcher()
{
    SignalsBlocked blocked;
    try {
        watcher_thread_ = std::thread([this] { watch_peers(); });
    } catch (const std::exception &cause) {
        throw Failure(TDDP_SYSTEM, std::string("cannot start a thread: ") + cause.what());
    }
}

void Mesh::stop_watcher()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        changed_.notify_one();
    }
    if (watcher_thread_.joinable()) {
        watcher_thread_.join();
    }
}

/* With the lock held; nothing here blocks. */
bool Mesh::connect_must_stop(Clock::time_point now)
{
    if ((cancel_ && tddp_cancel_triggered(cancel_)) || now >= connect_deadline_) {
        return true;
    }
    if (connecting_to_ < 0 || now - peer_checked_at_ < PROBE_AFTER) {
        return false;
    }
    if (!probe_) {
        probe_ = std::make_unique<Probe>(peer_beacon_);
    }
    if (!probe_->closed()) {
        peer_checked_at_ = now - PROBE_AFTER;
    }
    connecting_peer_died_ = now - peer_checked_at_ >= PROBE_AFTER + CONNECT_GRACE;
    return connecting_peer_died_;
}

void Mesh::watch_peers()
{
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
        if (active_ == 0) {
            idle_ = true;
            changed_.wait(lock, [this] { return stop_ || active_ > 0; });
            idle_ = false;
            continue;
        }
        bool brief = std::any_of(waiters_.begin(), waiters_.end(),
                                 [](const Waiter *each) { return each->brief; });
        wake_early_ = false;
        changed_.wait_for(lock, brief ? BRIEF_INTERVAL : CHECK_INTERVAL,
                          [this] { return stop_ || wake_early_; });
        Clock::time_point now = Clock::now();
        update_peers();
        wake_waits(now);
        /* Gloo's connect cannot be interrupted, but closing the pair ends it. */
        if (connecting_ && connect_must_stop(now)) {
            connecting_ = false;
            lock.unlock();
            close_pairs();
            lock.lock();
        }
    }
}

/* The peers notice at once: their receives fail. */
void Mesh::close_pairs()
{
    std::call_once(closed_, [this] {
        for (int peer = 0; context_ && peer < size; peer++) {
            /* Where making them failed, some are missing. */
            if (peer != rank && context_->getPair(peer)) {
                try {
                    context_->getPair(peer)->close();
                } catch (const std::exception &cause) {
                    tddp_log(TDDP_LOG_DEBUG, "gloo", "closing rank %d: %s", rank_name(peer),
                             cause.what());
                }
            }
        }
    });
}

} // namespace tddp_gloo
