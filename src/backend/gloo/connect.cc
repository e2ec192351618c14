/*
 * Connects this rank to all others through the group's store. Runs on the thread that creates the
 * group.
 *
 * Gloo's own rendezvous differs between its versions, cannot be interrupted, and resolves the
 * host's name. Devices, pairs and their addresses are the same in all versions since 2022.
 */
#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "device.h"
#include "endpoint.h"
#include "failure.h"
#include "transport.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

/* While this rank waits for others: between two checks whether those live, and of its token. */
constexpr int CHECK_MS = 300;
constexpr milliseconds TOKEN_CHECK{20};
/* A peer's beacon is probed after PROBE_AFTER. The peer counts as dead when its beacon has been
 * closed for CONNECT_GRACE, since it may just have finished connecting. */
constexpr milliseconds PROBE_AFTER{200};
constexpr milliseconds CONNECT_GRACE{1000};
/* For the reason that a lost rank gave. */
constexpr int REASON_MS = 200;
/* Longer than any group needs to connect. */
constexpr milliseconds LONGEST{std::chrono::hours(24 * 365)};

Clock::time_point deadline_after(int64_t ms)
{
    return Clock::now() + std::min(milliseconds(ms), LONGEST);
}

tddp_wait until(Clock::time_point deadline, tddp_cancel *cancel)
{
    auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    return tddp_wait{left > 0 ? left : 0, cancel};
}

/* A socket for each other rank, and a few of Gloo's. With too few, connections would fail one by
 * one, and later whatever this process opens. */
void check_descriptor_limit(int size)
{
    constexpr rlim_t OTHERS = 16;
    rlim_t open = 0;
    rlimit limit = {};
    std::unique_ptr<DIR, int (*)(DIR *)> folder(opendir("/proc/self/fd"), closedir);
    while (const dirent *each = folder ? readdir(folder.get()) : nullptr) {
        open += each->d_name[0] != '.';
    }
    const rlim_t needed = open + static_cast<rlim_t>(size - 1) + OTHERS;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < needed) {
        throw Failure(TDDP_SYSTEM, "connections to " + std::to_string(size - 1) +
                                       " ranks need a limit of " + std::to_string(needed) +
                                       " open files, and it is " + std::to_string(limit.rlim_cur) +
                                       ": raise it (ulimit -n)");
    }
}

using Meeting = std::unique_ptr<tddp_meeting, void (*)(tddp_meeting *)>;

tddp_meeting_opts meeting_of(const tddp_backend_opts &opts)
{
    tddp_meeting_opts made = {};
    made.store = opts.store;
    made.name = "gloo";
    made.rank = opts.rank;
    made.world_size = opts.world_size;
    made.sender = TDDP_MEETING_ALL;
    made.names = opts.names;
    made.check = opts.check;
    made.data = opts.check_data;
    made.check_ms = CHECK_MS;
    return made;
}

Meeting open_meeting(const tddp_meeting_opts &opts)
{
    tddp_meeting *made = nullptr;
    Failure::check(tddp_meeting_open(&opts, &made));
    return {made, tddp_meeting_close};
}

/* The reason that a lost rank gave; empty if it had no time to. */
std::string failure_reason_of(tddp_meeting *meeting, int peer)
{
    const char *reason = tddp_meeting_await_failure(meeting, peer, REASON_MS);
    return reason ? std::string(": ") + reason : std::string();
}

/* Whether a peer that should connect has ended. */
class DeathWatch
{
  public:
    DeathWatch(int peer, const Endpoint &endpoint)
        : peer_(peer), beacon_(endpoint.beacon()), alive_at_(Clock::now())
    {
    }

    int peer() const
    {
        return peer_;
    }
    bool has_ended()
    {
        const auto now = Clock::now();
        if (now - alive_at_ < PROBE_AFTER) {
            return false;
        }
        if (!probe_) {
            probe_ = std::make_unique<Probe>(beacon_);
        }
        if (!probe_->closed()) {
            alive_at_ = now - PROBE_AFTER;
        }
        return now - alive_at_ >= PROBE_AFTER + CONNECT_GRACE;
    }

  private:
    int peer_;
    sockaddr_storage beacon_;
    Clock::time_point alive_at_;
    std::unique_ptr<Probe> probe_;
};

} // namespace

void Transport::connect(const tddp_backend_opts &opts, const tddp_wait *wait,
                        const std::function<void()> &is_connected)
{
    if (size == 1) {
        is_connected();
        return;
    }
    tddp_cancel *cancel = wait ? wait->cancel : nullptr;
    const bool timed = wait && wait->timeout_ms >= 0;
    const auto deadline = deadline_after(timed ? wait->timeout_ms : opts.timeout_ms);
    const tddp_meeting_opts meeting_opts = meeting_of(opts);
    Meeting meeting{nullptr, tddp_meeting_close};
    try {
        meeting = open_meeting(meeting_opts);
        open(opts, meeting.get(), deadline, cancel);
        await_connections(meeting.get(), deadline, cancel);
        expect_notices();
        is_connected();
        exchange_connected(meeting.get(), deadline, cancel);
    } catch (const std::exception &cause) {
        report(TDDP_GROUP_FAILED, strip_location(cause));
        /* The others wait for this rank's addresses, or its connection. */
        tddp_meeting_fail(&meeting_opts, strip_location(cause).c_str());
        throw;
    }
    beacon_.close();
    connecting_ = false;
}

void Transport::open(const tddp_backend_opts &opts, tddp_meeting *meeting,
                     Clock::time_point deadline, tddp_cancel *cancel)
{
    peer_timeout_ = peer_timeout();
    check_descriptor_limit(size);
    device_ = make_device(opts);
    context_ = std::make_shared<Context>(device_, rank, size, *this);
    context_->setTimeout(milliseconds(until(deadline, nullptr).timeout_ms + 1));
    each_peer([&](int peer) { context_->createPair(peer); });
    Endpoint endpoint = Endpoint::of(*context_);
    endpoint.beacon_port = beacon_.open(endpoint.device, size);
    const std::string record = endpoint.serialise();
    const tddp_wait left = until(deadline, cancel);
    Failure::check(tddp_meeting_give(meeting, tddp_slice{record.data(), record.size()}, &left));
}

/* A peer whose connection has ended, or else the first that is not connected; the number of ranks:
 * all are. With the lock held. */
int Transport::first_unconnected() const
{
    int first = size;
    for (int peer = size - 1; peer >= 0; peer--) {
        const auto state = peers_[static_cast<size_t>(peer)].state;
        if (peer != rank && state != Peer::ACTIVE && state != Peer::CONNECTING) {
            return peer;
        }
        first = peer != rank && state == Peer::CONNECTING ? peer : first;
    }
    return first;
}

void Transport::fail_connecting(tddp_meeting *meeting, int peer, tddp_status status,
                                const std::string &error)
{
    const std::string who = rank_text(peer);
    if (status == TDDP_CANCELED) {
        throw Failure(status, "interrupted while connecting to " + who);
    }
    if (status == TDDP_TIMEOUT) {
        throw Failure(status, "no connection to " + who +
                                  " in the time given: is it alive, and can its address be reached "
                                  "from here? " +
                                  error);
    }
    const std::string reason = failure_reason_of(meeting, peer);
    if (error.empty()) {
        throw Failure(status, "lost " + who + ", which ended while connections were made" + reason);
    }
    throw Failure(status, "cannot connect to " + who + " (" + error + ")" +
                              (reason.empty() ? ": has it ended, or does a firewall stand between?"
                                              : reason));
}

/* All connect at once. */
void Transport::await_connections(tddp_meeting *meeting, Clock::time_point deadline,
                                  tddp_cancel *cancel)
{
    const tddp_wait left = until(deadline, cancel);
    Failure::check(tddp_meeting_await(meeting, &left));
    each_peer([&](int peer) {
        try {
            const Endpoint endpoint = Endpoint::parse(tddp_meeting_records(meeting)[peer]);
            context_->connection(peer)->connect(endpoint.address_for(peer, rank));
        } catch (const Failure &) {
            throw;
        } catch (const std::exception &cause) {
            fail_connecting(meeting, peer, TDDP_PEER_LOST, strip_location(cause));
        }
    });
    std::optional<DeathWatch> watch;
    std::unique_lock<std::mutex> lock(mutex_);
    for (int peer; (peer = first_unconnected()) < size;) {
        if (peers_[static_cast<size_t>(peer)].state != Peer::CONNECTING) {
            const std::string why = peers_[static_cast<size_t>(peer)].why();
            lock.unlock();
            fail_connecting(meeting, peer, TDDP_PEER_LOST, why);
        }
        if (!watch || watch->peer() != peer) {
            watch.emplace(peer, Endpoint::parse(tddp_meeting_records(meeting)[peer]));
        }
        const bool canceled = cancel && tddp_cancel_triggered(cancel);
        if (canceled || Clock::now() >= deadline || watch->has_ended()) {
            lock.unlock();
            fail_connecting(meeting, peer,
                            canceled                   ? TDDP_CANCELED
                            : Clock::now() >= deadline ? TDDP_TIMEOUT
                                                       : TDDP_PEER_LOST,
                            "");
        }
        changed_.wait_for(lock, TOKEN_CHECK);
    }
}

/* A peer's notice is read once its connection has ended. */
void Transport::expect_notices()
{
    each_peer([&](int peer) {
        CloseNotice &notice = peers_[static_cast<size_t>(peer)].notice;
        own_transfers_.emplace_back(recv(peer, CLOSE_NOTICE_TAG, &notice, sizeof notice));
    });
    notices_expected_ = true;
}

/* Waits until every rank is connected to all others. Otherwise a rank that ends at once would
 * look unreachable, and its close notice would arrive before a peer has posted the receive. */
void Transport::exchange_connected(tddp_meeting *meeting, Clock::time_point deadline,
                                   tddp_cancel *cancel)
{
    std::set<int> missing;
    each_peer([&](int peer) { missing.insert(peer); });
    try {
        exchange_bytes(missing, deadline, cancel);
    } catch (const Failure &cause) {
        std::string text = cause.what();
        if (cause.status() == TDDP_CANCELED) {
            text = "interrupted while all ranks connect";
        } else if (cause.status() == TDDP_TIMEOUT) {
            text = "these have not connected to all others in the time given:";
            for (int peer : missing) {
                text += (peer == *missing.begin() ? " " : ", ") + rank_text(peer);
            }
        } else {
            for (int peer : missing) {
                text += has_ended(peer) ? failure_reason_of(meeting, peer) : "";
            }
        }
        report(cause.status(), text);
        throw Failure(cause.status(), text);
    }
}

void Transport::exchange_bytes(std::set<int> &missing, Clock::time_point deadline,
                               tddp_cancel *cancel)
{
    static const char ours = 1;
    const std::unique_ptr<char[]> theirs(new char[static_cast<size_t>(size)]);
    std::vector<std::unique_ptr<Transfer>> transfers;
    each_peer([&](int peer) {
        transfers.emplace_back(recv(peer, CONNECTED_TAG, &theirs[static_cast<size_t>(peer)], 1));
        transfers.emplace_back(send(peer, CONNECTED_TAG, &ours, 1));
    });
    for (;;) {
        const unsigned before = changes_;
        auto done = [&](const std::unique_ptr<Transfer> &each) {
            int source;
            const bool complete = test(*each, &source);
            if (complete && each->receives) {
                missing.erase(each->peer);
            }
            return complete;
        };
        transfers.erase(std::remove_if(transfers.begin(), transfers.end(), done), transfers.end());
        if (transfers.empty()) {
            return;
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            throw Failure(TDDP_CANCELED, "");
        }
        if (Clock::now() >= deadline) {
            throw Failure(TDDP_TIMEOUT, "");
        }
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, TOKEN_CHECK, [&] { return changes_ != before; });
    }
}

} // namespace tddp_gloo
