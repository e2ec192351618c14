/*
 * What this rank knows of its peers, and the texts of operations that a lost one ends. Runs on the
 * threads of those operations.
 */
#include <algorithm>

#include "failure.h"
#include "transport.h"

namespace tddp_gloo
{
namespace
{

/* A peer may end as soon as it has done its part: what it sent to others may complete their
 * operations. */
constexpr std::chrono::milliseconds GRACE{300};

/* The order in which lost peers are considered the root cause: processes that ended without a
 * report, then peers that reported a failure, then peers that reported another lost rank. */
int cause_priority(const Peer &peer)
{
    return peer.status == TDDP_OK ? 0 : peer.status == TDDP_PEER_LOST ? 2 : 1;
}

} // namespace

std::string Peer::why() const
{
    if (status != TDDP_OK) {
        return {notice.text, strnlen(notice.text, sizeof notice.text)};
    }
    try {
        if (reason) {
            std::rethrow_exception(reason);
        }
    } catch (const std::exception &cause) {
        return strip_location(cause);
    }
    return "its connection has ended";
}

tddp_status Transport::state_of(int waited, uint64_t sequence, Clock::time_point now) const
{
    if (aborted_ || closing_) {
        return TDDP_GROUP_FAILED;
    }
    int active = 0;
    for (int peer = 0; peer < size; peer++) {
        const Peer &one = peers_[static_cast<size_t>(peer)];
        if (peer == rank || one.state == Peer::ACTIVE) {
            active += peer != rank;
            continue;
        }
        const bool late = one.state == Peer::LEFT && one.sequence < sequence;
        const bool dead = one.state == Peer::LOST && now - one.since >= GRACE;
        if (peer == waited || late || dead) {
            return canceled_ ? TDDP_GROUP_FAILED : TDDP_PEER_LOST;
        }
    }
    return active > 0 || size == 1 ? TDDP_OK : canceled_ ? TDDP_GROUP_FAILED : TDDP_PEER_LOST;
}

/* "lost rank 2 (why); also lost: rank 1; rank 0 has left the group", with the root cause first. */
std::string Transport::describe_ended(int waited, uint64_t sequence) const
{
    std::vector<int> lost;
    for (int peer = 0; peer < size; peer++) {
        if (peers_[static_cast<size_t>(peer)].state == Peer::LOST) {
            lost.push_back(peer);
        }
    }
    auto peer_at = [&](int at) -> const Peer & { return peers_[static_cast<size_t>(at)]; };
    std::stable_sort(lost.begin(), lost.end(), [&](int one, int other) {
        const int first = cause_priority(peer_at(one));
        const int second = cause_priority(peer_at(other));
        return first != second ? first < second : peer_at(one).since < peer_at(other).since;
    });
    std::string text;
    for (size_t i = 0; i < lost.size(); i++) {
        const Peer &one = peer_at(lost[i]);
        text += (i == 0 ? "lost " : i == 1 ? "; also lost: " : ", ") + rank_text(lost[i]);
        if (i == 0) {
            text +=
                one.status == TDDP_OK ? " (" + one.why() + ")" : ", which gave up: " + one.why();
        }
    }
    for (int peer = 0; peer < size; peer++) {
        const Peer &one = peer_at(peer);
        const bool concerns =
            waited == TDDP_ANY_SOURCE || peer == waited || one.sequence < sequence;
        if (one.state == Peer::LEFT && concerns) {
            text += (text.empty() ? "" : "; ") + rank_text(peer) + " has left the group";
        }
    }
    return text;
}

void Transport::check_peer(int peer, uint64_t sequence)
{
    std::unique_lock<std::mutex> lock(mutex_);
    const tddp_status status = state_of(peer, sequence, Clock::now());
    if (status == TDDP_PEER_LOST) {
        throw Failure(status, describe_ended(peer, sequence));
    }
    lock.unlock();
    if (status) {
        fail_ended(peer, "");
    }
}

/* A transfer of this peer, or of any, has ended. */
void Transport::fail_ended(int peer, const std::string &reason)
{
    std::unique_lock<std::mutex> lock(mutex_);
    if ((closing_ || canceled_) && !aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted, as another operation failed: " + failure_);
    }
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, peer == TDDP_ANY_SOURCE
                                             ? "aborted while waiting for any rank"
                                             : "aborted while waiting for " + rank_text(peer));
    }
    const std::string text = describe_ended(peer, 0);
    throw Failure(TDDP_PEER_LOST,
                  text.empty() ? "lost " + rank_text(peer) + " (" + reason + ")" : text);
}

} // namespace tddp_gloo
