/*
 * Connects this rank to all others through the group's store. Runs on the thread that creates the
 * group.
 *
 * Gloo's own rendezvous differs between its versions, cannot be interrupted, and resolves the
 * host's name. Devices, pairs and their addresses are the same in all versions since 2022.
 */
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include <tddp/meeting.h>

#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>

#include "device.h"
#include "endpoint.h"
#include "failure.h"
#include "mesh.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

/* While this rank waits for others' records: between two checks whether those live. */
constexpr int CHECK_MS = 300;
/* For the reason that a lost rank gave. */
constexpr int REASON_MS = 200;

tddp_wait until(Clock::time_point deadline, tddp_cancel *cancel)
{
    auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    return tddp_wait{left > 0 ? left : 0, cancel};
}

tddp_slice slice(const std::string &text)
{
    return tddp_slice{text.data(), text.size()};
}

/* A socket's local address and port, to be compared; empty if it has none. */
std::string socket_key(const sockaddr_storage &address)
{
    std::string text;
    if (address.ss_family == AF_INET) {
        const auto &v4 = reinterpret_cast<const sockaddr_in &>(address);
        text.assign(reinterpret_cast<const char *>(&v4.sin_addr), sizeof v4.sin_addr);
        text.append(reinterpret_cast<const char *>(&v4.sin_port), sizeof v4.sin_port);
    } else if (address.ss_family == AF_INET6) {
        const auto &v6 = reinterpret_cast<const sockaddr_in6 &>(address);
        text.assign(reinterpret_cast<const char *>(&v6.sin6_addr), sizeof v6.sin6_addr);
        text.append(reinterpret_cast<const char *>(&v6.sin6_port), sizeof v6.sin6_port);
    }
    return text;
}

/* Calls `visit` with each descriptor of this process. */
template <typename Visit> void each_descriptor(Visit visit)
{
    std::unique_ptr<DIR, int (*)(DIR *)> folder(opendir("/proc/self/fd"), closedir);
    while (const dirent *each = folder ? readdir(folder.get()) : nullptr) {
        if (each->d_name[0] != '.') {
            visit(atoi(each->d_name));
        }
    }
}

/* A socket for each other rank, and a few of Gloo's. With too few, connections would fail one by
 * one, and later whatever this process opens. */
void check_descriptor_limit(int size)
{
    constexpr rlim_t OTHERS = 16;
    rlim_t open = 0;
    rlimit limit = {};
    each_descriptor([&](int) { open++; });
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

} // namespace

void Mesh::connect(const tddp_backend_opts &opts, const tddp_wait *wait)
{
    if (size == 1) {
        return;
    }
    bool timed = wait && wait->timeout_ms >= 0;
    Clock::time_point deadline = deadline_after(timed ? wait->timeout_ms : opts.timeout_ms);
    const tddp_meeting_opts meeting_opts = meeting_of(opts);
    Meeting meeting{nullptr, tddp_meeting_close};
    try {
        meeting = open_meeting(meeting_opts);
        open(opts, meeting.get(), deadline, wait ? wait->cancel : nullptr);
    } catch (const std::exception &cause) {
        /* The others wait for this rank's addresses, or its connection. */
        tddp_meeting_fail(&meeting_opts, strip_location(cause).c_str());
        throw;
    }
}

void Mesh::open(const tddp_backend_opts &opts, tddp_meeting *meeting, Clock::time_point deadline,
                tddp_cancel *cancel)
{
    const int seconds = peer_timeout();
    check_descriptor_limit(size);
    device_ = make_device(opts);
    context_ = device_->createContext(rank, size);
    context_->setTimeout(milliseconds(until(deadline, nullptr).timeout_ms + 1));
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            context_->createPair(peer);
        }
    }
    Endpoint endpoint = Endpoint::of(*context_);
    endpoint.beacon_port = beacon_.open(endpoint.device, size);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        connecting_ = true;
        cancel_ = cancel;
        connect_deadline_ = deadline;
        active_++;
    }
    start_watcher();
    const std::string record = endpoint.serialise();
    const tddp_wait left = until(deadline, cancel);
    Failure::check(tddp_meeting_give(meeting, slice(record), &left));
    connect_pairs(meeting, deadline, cancel);
    make_links();
    set_up_sockets(seconds);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        links_ready_ = true;
    }
    exchange_connected(meeting, deadline, cancel);
    beacon_.close();
    std::lock_guard<std::mutex> lock(mutex_);
    connecting_ = false;
    cancel_ = nullptr;
    probe_.reset();
    active_--;
}

/* Sets the peer that the watcher checks while this thread connects to it; -1: none. */
void Mesh::set_connecting_to(int peer, const sockaddr_storage &beacon)
{
    std::lock_guard<std::mutex> lock(mutex_);
    connecting_to_ = peer;
    peer_checked_at_ = Clock::now();
    peer_beacon_ = beacon;
    probe_.reset();
}

bool Mesh::connecting_peer_died()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return connecting_peer_died_;
}

void Mesh::connect_pairs(tddp_meeting *meeting, Clock::time_point deadline, tddp_cancel *cancel)
{
    const tddp_wait left = until(deadline, cancel);
    Failure::check(tddp_meeting_await(meeting, &left));
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            connect_pair(meeting, peer, deadline, cancel);
        }
    }
}

void Mesh::connect_pair(tddp_meeting *meeting, int peer, Clock::time_point deadline,
                        tddp_cancel *cancel)
{
    const Endpoint endpoint = Endpoint::parse(tddp_meeting_records(meeting)[peer]);
    std::string error;
    set_connecting_to(peer, endpoint.beacon());
    try {
        context_->getPair(peer)->connect(endpoint.address_for(peer, rank));
    } catch (const std::exception &cause) {
        error = strip_location(cause);
    }
    set_connecting_to(-1, {});
    if (cancel && tddp_cancel_triggered(cancel)) {
        throw Failure(TDDP_CANCELED, "interrupted while connecting to " + rank_text(peer));
    }
    if (Clock::now() >= deadline) {
        throw Failure(TDDP_TIMEOUT, "no connection to " + rank_text(peer) +
                                        " in the time given: is it alive, and can its address be "
                                        "reached from here? " +
                                        error);
    }
    if (connecting_peer_died()) {
        throw Failure(TDDP_PEER_LOST, "lost " + rank_text(peer) +
                                          ", which ended while connections were made" +
                                          failure_reason_of(meeting, peer));
    }
    if (!error.empty()) {
        std::string reason = failure_reason_of(meeting, peer);
        throw Failure(
            TDDP_PEER_LOST,
            "cannot connect to " + rank_text(peer) + " (" + error + ")" +
                (reason.empty() ? ": has it ended, or does a firewall stand between?" : reason));
    }
}

void Mesh::make_links()
{
    static const tddp_op before_all = [] {
        tddp_op op = {};
        op.kind = TDDP_OP_BARRIER;
        return op;
    }();
    current_.op = &before_all;
    links_.resize(static_cast<size_t>(size));
    constexpr size_t bytes = HEADER_BYTES + EAGER_BYTES;
    for (int peer = 0; peer < size; peer++) {
        if (peer == rank) {
            continue;
        }
        Link &one = link(peer);
        one.memory.reset(new char[3 * bytes]);
        one.inbox_data[0] = one.memory.get();
        one.inbox_data[1] = one.memory.get() + bytes;
        one.outbox_data = one.memory.get() + 2 * bytes;
        one.inbox[0] = buffer(one.inbox_data[0], bytes);
        one.inbox[1] = buffer(one.inbox_data[1], bytes);
        one.outbox = buffer(one.outbox_data, bytes);
        one.close_notice_data.reset(new CloseNotice());
        one.close_notice = buffer(one.close_notice_data.get(), sizeof(CloseNotice));
        one.sentinel = buffer(&one.sentinel, 0);
        recv(*one.sentinel, peer, SENTINEL_SLOT, 0, 0);
        recv(*one.close_notice, peer, CLOSE_NOTICE_SLOT, 0, sizeof(CloseNotice));
        post_inbox(peer, 0);
    }
    close_notice_ = buffer(&close_notice_data_, sizeof close_notice_data_);
}

/* Waits until every rank is connected to all others. Otherwise a rank that ends at once would
 * look unreachable, and its close notice would arrive before a peer has posted the receive. */
void Mesh::exchange_connected(tddp_meeting *meeting, Clock::time_point deadline,
                              tddp_cancel *cancel)
{
    char word[2] = {};
    std::unique_ptr<Buffer> ours = buffer(&word[0], 1);
    std::unique_ptr<Buffer> theirs = buffer(&word[1], 1);
    std::set<int> missing;
    Task task = current_;
    task.deadline = deadline;
    try {
        for (int peer = 0; peer < size; peer++) {
            if (peer != rank) {
                missing.insert(peer);
                recv(task, *theirs, peer, CONNECTED_SLOT, 0, 1);
                send(task, *ours, peer, CONNECTED_SLOT, 0, 1);
            }
        }
        for (int i = 1; i < size; i++) {
            missing.erase(wait_recv(task, *theirs, TDDP_ANY_SOURCE));
            wait_send(task, *ours, TDDP_ANY_SOURCE);
        }
    } catch (const Failure &cause) {
        tddp_status status = cause.status();
        std::string text = cause.what();
        if (cancel && tddp_cancel_triggered(cancel)) {
            status = TDDP_CANCELED;
            text = "interrupted while all ranks connect";
        } else if (Clock::now() >= deadline) {
            status = TDDP_TIMEOUT;
            text = "these have not connected to all others in the time given:";
            for (int peer : missing) {
                text += (peer == *missing.begin() ? " " : ", ") + rank_text(peer);
            }
        } else {
            for (int peer : missing) {
                text += is_inactive(peer) ? failure_reason_of(meeting, peer) : "";
            }
        }
        send_close_notice(status, text);
        throw Failure(status, text);
    }
}

/* Gloo's sockets stay open in programs that this process executes. Such a program would keep the
 * connections open after this process's death, and the others would not notice it. Gloo does not
 * tell its descriptors; the addresses of its pairs identify them. */
void Mesh::set_up_sockets(int seconds)
{
    std::set<std::string> ours;
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            auto *address = dynamic_cast<const gloo::transport::tcp::Address *>(
                &context_->getPair(peer)->address());
            if (address) {
                ours.insert(socket_key(address->getSockaddr()));
            }
        }
    }
    each_descriptor([&](int fd) {
        sockaddr_storage address = {};
        socklen_t length = sizeof address;
        if (getsockname(fd, reinterpret_cast<sockaddr *>(&address), &length) == 0 &&
            ours.count(socket_key(address)) > 0) {
            (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
            set_keepalive(fd, seconds);
            sockets_.push_back(fd);
        }
    });
}

} // namespace tddp_gloo
