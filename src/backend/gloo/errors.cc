/*
 * Describes failed operations, and reports them to the peers. Runs on the threads of those
 * operations, and on threads that abort or destroy the group.
 *
 * Invariant: only abort() and has_entered() close connections, and the peers are told why, once,
 * before that.
 */
#include <algorithm>
#include <cstring>

#include "mesh.h"

namespace tddp_gloo
{
namespace
{

constexpr std::chrono::milliseconds BRIEF_WAIT{1};
constexpr int MAX_CHECKS = 100;

/* The order in which lost peers are considered the root cause: processes that ended without a
 * report, then peers that reported a failure, then peers that reported another lost rank. */
int cause_priority(const Peer &peer)
{
    return peer.status == TDDP_OK ? 0 : peer.status == TDDP_PEER_LOST ? 2 : 1;
}

std::string rank_list(const std::vector<std::string> &numbers)
{
    std::string text;
    for (const std::string &each : numbers) {
        text += (text.empty() ? "rank " : ", rank ") + each;
    }
    return text;
}

} // namespace

bool closed_by_ourselves(const std::string &gloo_text)
{
    /* Gloo's text for all connections after a wait timed out; see Mesh::has_entered(). */
    return gloo_text.find("Application timeout") != std::string::npos;
}

/* Does not wait for delivery: if a connection is too full, the peer sees only its end. */
void Mesh::send_close_notice(tddp_status status, const std::string &text) noexcept
{
    try {
        std::call_once(close_notice_sent_, [&] {
            std::unique_lock<std::mutex> lock(mutex_);
            if (aborted_ || !links_ready_) {
                return;
            }
            close_notice_data_.sequence = sequence_;
            close_notice_data_.status = status;
            close_notice_data_.check = CLOSE_NOTICE_CHECK;
            text.copy(close_notice_data_.text, sizeof close_notice_data_.text - 1);
            lock.unlock();
            for (int peer = 0; peer < size; peer++) {
                try {
                    if (peer != rank) {
                        close_notice_->send(peer, CLOSE_NOTICE_SLOT, 0, sizeof close_notice_data_);
                    }
                } catch (const std::exception &) {
                    /* The peer is gone. */
                }
            }
        });
    } catch (const std::exception &) {
        /* Best effort. */
    }
}

/* --- descriptions ---------------------------------------------------------------------------- */

/* "lost rank 2 (why); also lost: rank 1", with the root cause first. */
std::string Mesh::describe_lost() const
{
    std::vector<int> lost;
    for (int peer = 0; peer < size; peer++) {
        if (peers_[static_cast<size_t>(peer)].state == Peer::LOST) {
            lost.push_back(peer);
        }
    }
    auto peer_at = [&](int at) -> const Peer & { return peers_[static_cast<size_t>(at)]; };
    std::stable_sort(lost.begin(), lost.end(), [&](int one, int other) {
        int first = cause_priority(peer_at(one));
        int second = cause_priority(peer_at(other));
        return first != second ? first < second : peer_at(one).since < peer_at(other).since;
    });
    std::string text;
    if (!lost.empty()) {
        const Peer &cause = peer_at(lost[0]);
        text = "lost " + rank_text(lost[0]) +
               (cause.status == TDDP_OK ? " (" + cause.reason + ")"
                                        : ", which gave up: " + cause.reason);
    }
    for (size_t i = 1; i < lost.size(); i++) {
        text += (i == 1 ? "; also lost: " : ", ") + rank_text(lost[i]);
    }
    return text;
}

/* Reports the peers that are lost or have left. */
void Mesh::observe_lost() const
{
    for (int peer = 0; peer < size; peer++) {
        const Peer &one = peers_[static_cast<size_t>(peer)];
        tddp_observation seen = {};
        seen.kind = one.state == Peer::ACTIVE ? TDDP_OBSERVED_NOTHING
                    : one.state == Peer::LEFT ? TDDP_OBSERVED_LEFT
                    : one.status == TDDP_OK   ? TDDP_OBSERVED_CLOSED
                                              : TDDP_OBSERVED_FAILED;
        seen.rank = rank_name(peer);
        seen.sequence = one.sequence;
        seen.status = one.status;
        seen.text = one.reason.c_str();
        seen.seen_ns = std::chrono::nanoseconds(one.since.time_since_epoch()).count();
        tddp_observe(&observer_, &seen);
    }
}

std::string Mesh::describe_failure(tddp_status status, const Waiter &waiter) const
{
    const tddp_op &op = *waiter.task->op;
    const bool any = waiter.peer == TDDP_ANY_SOURCE;
    if (status == TDDP_PEER_LOST) {
        observe_lost();
        std::string text = describe_lost();
        for (int peer = 0; peer < size; peer++) {
            const Peer &one = peers_[static_cast<size_t>(peer)];
            bool late = !tddp_op_is_p2p(op.kind) && one.sequence < op.sequence;
            if (one.state == Peer::LEFT && (any || late || peer == waiter.peer)) {
                text += (text.empty() ? "" : "; ") + rank_text(peer) + " has left the group";
            }
        }
        return text;
    }
    const int64_t timeout_ms = op.part_of ? op.part_of->timeout_ms : op.timeout_ms;
    std::string text = "not done after " + std::to_string(timeout_ms) + " ms; ";
    if (!tddp_op_is_p2p(op.kind)) {
        return text + rank_text(waiter.peer) + " has not done its part";
    }
    const char *verb = op.kind == TDDP_OP_SEND ? "receive" : "send";
    if (waiter.task->matched) {
        return text + rank_text(waiter.peer) + " has begun to " + verb +
               " this message, but has not finished";
    }
    return text + (any ? "no rank" : rank_text(waiter.peer)) + (any ? " has" : " has not") +
           (op.kind == TDDP_OP_SEND ? " received" : " sent") + (any ? " one" : " it") +
           " with tag " + std::to_string(op.tag);
}

/* --- failed operations ----------------------------------------------------------------------- */

/* Gloo has failed an operation with this peer, or with any. */
void Mesh::fail_lost(const Task &task, int peer, const std::string &reason)
{
    std::unique_lock<std::mutex> lock(mutex_);
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted: " + reason);
    }
    if (closed_by_ourselves(reason)) {
        throw Failure(TDDP_GROUP_FAILED, "aborted, as another operation failed: " + first_failure_);
    }
    update_peers();
    if (peer != TDDP_ANY_SOURCE) {
        Peer &one = peers_[static_cast<size_t>(peer)];
        /* Gloo reports to one buffer after the other: the sentinel may be a moment later. */
        for (int i = 0; i < MAX_CHECKS && one.state == Peer::ACTIVE; i++) {
            lock.unlock();
            std::this_thread::sleep_for(BRIEF_WAIT);
            lock.lock();
            update_peers();
        }
        if (one.state == Peer::ACTIVE) {
            one.state = Peer::LOST;
            one.since = Clock::now();
            one.reason = reason;
            inactive_count_++;
        }
    }
    std::string text = describe_failure(TDDP_PEER_LOST, {&task, nullptr, peer, false});
    lock.unlock();
    text = text.empty() ? reason : text;
    fail(task, TDDP_PEER_LOST, text);
}

/* In a collective, a header that has not been processed may show the cause: a mismatch. */
void Mesh::fail(const Task &task, tddp_status status, const std::string &text)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        first_failure_ = text;
    }
    if (status == TDDP_TIMEOUT) {
        send_close_notice(status, text);
    }
    if (tddp_op_is_p2p(task.op->kind)) {
        throw Failure(status, text);
    }
    for (int peer : partners_in(task)) {
        Link &one = link(peer);
        if (one.agreed == task.op->sequence) {
            continue;
        }
        bool may_close = status == TDDP_TIMEOUT || is_inactive(peer);
        if (may_close ? has_entered(task, peer) : has_header(task, peer)) {
            tddp_calls now;
            now.mine = tddp_call_of(task.op, rank, peer);
            memcpy(&now.theirs, one.inbox_data[one.inbox_index], sizeof now.theirs);
            if (!tddp_calls_agree(&now.mine, &now.theirs)) {
                Failure::check(
                    tddp_calls_mismatch(rank_name(rank), rank_name(peer), &now, &one.before));
            }
        }
    }
    throw Failure(status, status == TDDP_TIMEOUT ? text + entered_and_missing(task) : text);
}

bool Mesh::is_inactive(int peer)
{
    std::lock_guard<std::mutex> lock(mutex_);
    return peers_[static_cast<size_t>(peer)].state != Peer::ACTIVE;
}

/* Whether a peer's header for this collective has arrived. Only for a failed operation: Gloo
 * can't tell without waiting, and a wait in vain closes the connections, except of a peer that
 * is gone. */
bool Mesh::has_entered(const Task &task, int peer)
{
    Link &one = link(peer);
    if (one.agreed == task.op->sequence || one.examined == task.op->sequence) {
        return true;
    }
    Buffer &inbox = *one.inbox[one.inbox_index];
    try {
        /* The watcher may have woken the first wait. */
        if (inbox.waitRecv(nullptr, BRIEF_WAIT) || inbox.waitRecv(nullptr, BRIEF_WAIT)) {
            one.examined = task.op->sequence;
            return true;
        }
    } catch (const std::exception &) {
    }
    return false;
}

/* The same for a peer that is still active, without closing its connection. */
bool Mesh::has_header(const Task &task, int peer)
{
    Link &one = link(peer);
    int source = peer;
    if (one.examined != task.op->sequence &&
        wait_briefly({&task, one.inbox[one.inbox_index].get(), peer, true}, &source)) {
        one.examined = task.op->sequence;
    }
    return one.examined == task.op->sequence;
}

std::vector<int> Mesh::partners_in(const Task &task) const
{
    std::vector<int> partners = task.partners;
    for (int peer = 0; task.all_partners && peer < size; peer++) {
        if (peer != rank) {
            partners.push_back(peer);
        }
    }
    return partners;
}

/* "; entered: rank 1, rank 3; not entered: rank 2 (last in barrier, operation 4)" */
std::string Mesh::entered_and_missing(const Task &task)
{
    if (!task.all_partners) {
        return ": slow, stuck, in another operation, or waiting for a rank that is?";
    }
    std::vector<std::string> here;
    std::vector<std::string> missing;
    for (int peer : partners_in(task)) {
        std::string number = std::to_string(rank_name(peer));
        const tddp_call &last = link(peer).before.theirs;
        if (has_entered(task, peer)) {
            here.push_back(number);
        } else if (last.sequence > 0) {
            missing.push_back(number + " (last in " +
                              tddp_op_name(static_cast<tddp_op_kind>(last.kind)) + ", operation " +
                              std::to_string(last.sequence) + ")");
        } else {
            missing.push_back(number);
        }
    }
    std::string text = here.empty() ? "" : "; entered: " + rank_list(here);
    text += missing.empty() ? "" : "; not entered: " + rank_list(missing);
    return text + ": slow, stuck, or in another operation?";
}

} // namespace tddp_gloo
