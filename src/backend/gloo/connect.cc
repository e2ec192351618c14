/*
 * Makes this rank's connections. Runs on the thread that creates the group.
 *
 * Gloo's own rendezvous differs between its versions, cannot be interrupted, and resolves the
 * host's name. Devices, pairs and their addresses are the same in all versions since 2022.
 */
#include <algorithm>
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

/* While this rank waits for others: between two checks of its token. */
constexpr milliseconds TOKEN_CHECK{20};
/* A peer's beacon is probed after PROBE_AFTER. The peer counts as dead when its beacon has been
 * closed for CONNECT_GRACE, since it may just have finished connecting. */
constexpr milliseconds PROBE_AFTER{200};
constexpr milliseconds CONNECT_GRACE{1000};
/* Longer than any group needs to connect. */
constexpr milliseconds LONGEST{std::chrono::hours(24 * 365)};
/* Gloo's own files, beside the connections' sockets. */
constexpr int OTHER_FILES = 16;

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

Transport::Transport(const tddp_backend_opts &opts)
    : rank(opts.rank), size(opts.world_size), events_(opts.events),
      peers_(static_cast<size_t>(opts.world_size))
{
    Failure::check(tddp_transport_peer_timeout(&peer_timeout_));
    Failure::check(tddp_transport_check_descriptors(size, OTHER_FILES));
    device_ = make_device(opts);
    context_ = std::make_shared<Context>(device_, rank, size, *this);
    context_->setTimeout(std::min(milliseconds(opts.timeout_ms), LONGEST) + milliseconds(1));
    each_peer([&](int peer) { context_->createPair(peer); });
    Endpoint endpoint = Endpoint::of(*context_);
    endpoint.beacon_port = beacon_.open(endpoint.device, size);
    address_ = endpoint.serialise();
}

/* A peer whose connection has ended, or else the first that is not connected; the number of ranks:
 * all are. */
int Transport::first_unconnected() const
{
    int first = size;
    for (int peer = size - 1; peer >= 0; peer--) {
        const auto state = peers_[static_cast<size_t>(peer)].state;
        if (peer != rank && state == Peer::ENDED) {
            return peer;
        }
        first = peer != rank && state == Peer::CONNECTING ? peer : first;
    }
    return first;
}

/* All connect at once. */
void Transport::connect(const tddp_slice *addresses, const tddp_wait &wait, int *peer)
{
    const auto deadline = Clock::now() + std::min(milliseconds(wait.timeout_ms), LONGEST);
    each_peer([&](int each) {
        *peer = each;
        context_->connection(each)->connect(
            Endpoint::parse(addresses[each]).address_for(each, rank));
    });
    std::optional<DeathWatch> watch;
    std::unique_lock<std::mutex> lock(mutex_);
    while ((*peer = first_unconnected()) < size) {
        if (peers_[static_cast<size_t>(*peer)].state == Peer::ENDED) {
            lock.unlock();
            fail_ended(*peer);
        }
        if (!watch || watch->peer() != *peer) {
            watch.emplace(*peer, Endpoint::parse(addresses[*peer]));
        }
        if (wait.cancel && tddp_cancel_triggered(wait.cancel)) {
            throw Failure(TDDP_CANCELED, "");
        }
        if (Clock::now() >= deadline) {
            throw Failure(TDDP_TIMEOUT, "");
        }
        if (watch->has_ended()) {
            throw Failure(TDDP_PEER_LOST, "it ended while connections were made");
        }
        changed_.wait_for(lock, TOKEN_CHECK);
    }
    *peer = -1;
    beacon_.close();
}

} // namespace tddp_gloo
