/*
 * What this rank has seen of its peers, for operations that a lost one ends. Runs on the threads of
 * those operations.
 */
#include "failure.h"
#include "transport.h"

namespace tddp_gloo
{
namespace
{

/* A peer may end as soon as it has done its part: what it sent to others may complete their
 * operations. */
constexpr std::chrono::milliseconds GRACE{300};

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

/* Reports what this rank has seen of the peers that have ended; false: none has that concerns the
 * wait. */
bool Transport::observe(int waited, uint64_t sequence, tddp_observation *cause,
                        std::string *text) const
{
    *cause = {};
    for (int peer = 0; peer < size; peer++) {
        const Peer &one = peers_[static_cast<size_t>(peer)];
        const bool late = waited == TDDP_ANY_SOURCE || peer == waited || one.sequence < sequence;
        if (peer == rank || one.state == Peer::ACTIVE || (one.state == Peer::LEFT && !late)) {
            continue;
        }
        const std::string why = one.why();
        tddp_observation seen = {};
        seen.kind = one.state == Peer::LEFT ? TDDP_OBSERVED_LEFT
                    : one.status == TDDP_OK ? TDDP_OBSERVED_CLOSED
                                            : TDDP_OBSERVED_FAILED;
        seen.rank = rank_name(peer);
        seen.sequence = one.sequence;
        seen.status = one.status;
        seen.text = why.c_str();
        seen.seen_ns = std::chrono::nanoseconds(one.since.time_since_epoch()).count();
        tddp_observe(&observer_, &seen);
        if (tddp_observation_precedes(&seen, cause)) {
            *cause = seen;
            *text = why;
            cause->text = text->c_str();
        }
    }
    return cause->kind != TDDP_OBSERVED_NOTHING;
}

void Transport::check_peer(int peer, uint64_t sequence)
{
    std::unique_lock<std::mutex> lock(mutex_);
    const tddp_status status = state_of(peer, sequence, Clock::now());
    lock.unlock();
    if (status) {
        fail_ended(peer, sequence, "");
    }
}

/* What this rank waits for, from this peer or from any, will not come. */
void Transport::fail_ended(int peer, uint64_t sequence, const std::string &reason)
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
    tddp_observation cause;
    std::string text;
    if (observe(peer, sequence, &cause, &text)) {
        Failure::check(tddp_observation_fail(&cause));
    }
    throw Failure(TDDP_PEER_LOST,
                  "lost " + (peer == TDDP_ANY_SOURCE ? "all other ranks" : rank_text(peer)) + " (" +
                      reason + ")");
}

} // namespace tddp_gloo
