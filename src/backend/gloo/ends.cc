/*
 * How operations end badly: what is said of it here, and to the peers. On the threads of those
 * operations, and of those who abort or destroy the group.
 *
 * Invariant: connections are closed by abort() alone, but for has_come(); before that the peers are
 * told why, once.
 */
#include <algorithm>
#include <cstring>

#include "mesh.h"

namespace tddp_gloo
{
namespace
{

constexpr std::chrono::milliseconds BRIEFLY{1};
constexpr int LOOKS = 100;

/* How sure it is that this peer is the cause, the surest first: it ended without a word; it says
 * that something failed; it says that it has lost another. */
int order_of(const Peer &peer)
{
    return peer.status == TDDP_OK ? 0 : peer.status == TDDP_PEER_LOST ? 2 : 1;
}

std::string ranks(const std::vector<std::string> &numbers)
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
    /* What Gloo says on all connections when a wait's time is over; see Mesh::has_come(). */
    return gloo_text.find("Application timeout") != std::string::npos;
}

/* Nothing waits for its arrival: where a connection is too full to take it at once, the peer only
 * sees the end. */
void Mesh::say_farewell(tddp_status status, const std::string &text) noexcept
{
    try {
        std::call_once(farewell_said_, [&] {
            std::unique_lock<std::mutex> lock(mutex_);
            if (aborted_ || !linked_) {
                return;
            }
            farewell_data_.sequence = sequence_;
            farewell_data_.status = status;
            farewell_data_.check = FAREWELL_CHECK;
            text.copy(farewell_data_.text, sizeof farewell_data_.text - 1);
            lock.unlock();
            for (int peer = 0; peer < size; peer++) {
                try {
                    if (peer != rank) {
                        farewell_->send(peer, FAREWELL_SLOT, 0, sizeof farewell_data_);
                    }
                } catch (const std::exception &) {
                    /* It is gone: nobody to tell. */
                }
            }
        });
    } catch (const std::exception &) {
        /* Only a courtesy. */
    }
}

/* --- words ----------------------------------------------------------------------------------- */

/* "lost rank 2 (why); gone as well: rank 1", the likely cause first. */
std::string Mesh::who_is_gone() const
{
    std::vector<int> gone;
    for (int peer = 0; peer < size; peer++) {
        if (peers_[static_cast<size_t>(peer)].state == Peer::LOST) {
            gone.push_back(peer);
        }
    }
    auto peer_at = [&](int at) -> const Peer & { return peers_[static_cast<size_t>(at)]; };
    std::stable_sort(gone.begin(), gone.end(), [&](int one, int other) {
        int first = order_of(peer_at(one));
        int second = order_of(peer_at(other));
        return first != second ? first < second : peer_at(one).since < peer_at(other).since;
    });
    std::string text;
    if (!gone.empty()) {
        const Peer &cause = peer_at(gone[0]);
        text = "lost " + called(gone[0]) +
               (cause.status == TDDP_OK ? " (" + cause.why + ")" : ", which gave up: " + cause.why);
    }
    for (size_t i = 1; i < gone.size(); i++) {
        text += (i == 1 ? "; gone as well: " : ", ") + called(gone[i]);
    }
    return text;
}

std::string Mesh::explain(tddp_status status, const Waiter &waiter) const
{
    const tddp_op &op = *waiter.task->op;
    const bool any = waiter.peer == TDDP_ANY_SOURCE;
    if (status == TDDP_PEER_LOST) {
        std::string text = who_is_gone();
        for (int peer = 0; peer < size; peer++) {
            const Peer &one = peers_[static_cast<size_t>(peer)];
            bool late = !tddp_op_is_p2p(op.kind) && one.sequence < op.sequence;
            if (one.state == Peer::LEFT && (any || late || peer == waiter.peer)) {
                text += (text.empty() ? "" : "; ") + called(peer) + " has left the group";
            }
        }
        return text;
    }
    const int64_t timeout_ms = op.part_of ? op.part_of->timeout_ms : op.timeout_ms;
    std::string text = "not done after " + std::to_string(timeout_ms) + " ms; ";
    if (!tddp_op_is_p2p(op.kind)) {
        return text + called(waiter.peer) + " has not done its part";
    }
    const char *verb = op.kind == TDDP_OP_SEND ? "receive" : "send";
    if (waiter.task->matched) {
        return text + called(waiter.peer) + " has begun to " + verb +
               " this message, but is not through";
    }
    return text + (any ? "no rank" : called(waiter.peer)) + (any ? " has" : " has not") +
           (op.kind == TDDP_OP_SEND ? " received" : " sent") + (any ? " one" : " it") +
           " with tag " + std::to_string(op.tag);
}

/* --- bad ends -------------------------------------------------------------------------------- */

/* Gloo has failed to do something with this peer, or with any. */
void Mesh::lost(const Task &task, int peer, const std::string &why)
{
    std::unique_lock<std::mutex> lock(mutex_);
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted: " + why);
    }
    if (closed_by_ourselves(why)) {
        throw Failure(TDDP_GROUP_FAILED, "aborted, as another operation failed: " + reason_);
    }
    look_at_peers();
    if (peer != TDDP_ANY_SOURCE) {
        Peer &one = peers_[static_cast<size_t>(peer)];
        /* Gloo tells one buffer after the other: the sentinel's turn comes in a moment. */
        for (int i = 0; i < LOOKS && one.state == Peer::HERE; i++) {
            lock.unlock();
            std::this_thread::sleep_for(BRIEFLY);
            lock.lock();
            look_at_peers();
        }
        if (one.state == Peer::HERE) {
            one.state = Peer::LOST;
            one.since = Clock::now();
            one.why = why;
            gone_++;
        }
    }
    std::string text = explain(TDDP_PEER_LOST, {&task, nullptr, peer, false});
    lock.unlock();
    text = text.empty() ? why : text;
    fail(task, TDDP_PEER_LOST, text);
}

/* What a collective was told of those whose headers it has not looked at may be the cause. */
void Mesh::fail(const Task &task, tddp_status status, const std::string &text)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        reason_ = text;
    }
    if (status == TDDP_TIMEOUT) {
        say_farewell(status, text);
    }
    if (tddp_op_is_p2p(task.op->kind)) {
        throw Failure(status, text);
    }
    for (int peer = 0; peer < size; peer++) {
        Link &one = link(peer);
        if (peer == rank || one.agreed == task.op->sequence) {
            continue;
        }
        bool whole = status == TDDP_TIMEOUT || is_gone(peer);
        if (whole ? has_come(task, peer) : look_for_header(task, peer)) {
            tddp_calls now;
            now.mine = tddp_call_of(task.op, rank, peer);
            memcpy(&now.theirs, one.inbox_data[one.turn], sizeof now.theirs);
            if (!tddp_calls_agree(&now.mine, &now.theirs)) {
                Failure::check(tddp_calls_mismatch(name(rank), name(peer), &now, &one.before));
            }
        }
    }
    throw Failure(status, status == TDDP_TIMEOUT ? text + attendance(task) : text);
}

bool Mesh::is_gone(int peer)
{
    std::lock_guard<std::mutex> lock(mutex_);
    return peers_[static_cast<size_t>(peer)].state != Peer::HERE;
}

/*
 * Whether a peer's header for this collective is there. Only when the operation has failed: Gloo
 * does not tell without waiting, and closes connections when the wait was in vain, unless the peer
 * is gone.
 */
bool Mesh::has_come(const Task &task, int peer)
{
    Link &one = link(peer);
    if (one.agreed == task.op->sequence || one.examined == task.op->sequence) {
        return true;
    }
    Buffer &inbox = *one.inbox[one.turn];
    try {
        /* The first may find that the watch has woken it. */
        if (inbox.waitRecv(nullptr, BRIEFLY) || inbox.waitRecv(nullptr, BRIEFLY)) {
            one.examined = task.op->sequence;
            return true;
        }
    } catch (const std::exception &) {
    }
    return false;
}

/* The same of a peer that is still there: its connection stays open. */
bool Mesh::look_for_header(const Task &task, int peer)
{
    Link &one = link(peer);
    int source = peer;
    if (one.examined != task.op->sequence &&
        look_again({&task, one.inbox[one.turn].get(), peer, true}, &source)) {
        one.examined = task.op->sequence;
    }
    return one.examined == task.op->sequence;
}

/* "; rank 1, rank 3 have come; rank 2 (after barrier, operation 4) has not" */
std::string Mesh::attendance(const Task &task)
{
    std::vector<std::string> here;
    std::vector<std::string> missing;
    for (int peer = 0; peer < size; peer++) {
        if (peer == rank) {
            continue;
        }
        std::string number = std::to_string(name(peer));
        const tddp_call &last = link(peer).before.theirs;
        if (has_come(task, peer)) {
            here.push_back(number);
        } else if (last.sequence > 0) {
            missing.push_back(number + " (last in " +
                              tddp_op_name(static_cast<tddp_op_kind>(last.kind)) + ", operation " +
                              std::to_string(last.sequence) + ")");
        } else {
            missing.push_back(number);
        }
    }
    std::string text = here.empty() ? "" : "; come to it: " + ranks(here);
    text += missing.empty() ? "" : "; not come: " + ranks(missing);
    return text + ": slow, stuck, or in another operation?";
}

} // namespace tddp_gloo
