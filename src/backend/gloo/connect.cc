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

/* While this rank waits for others' records: between two looks at whether they are there. */
constexpr milliseconds CHECK_INTERVAL{300};
/* So many ranks' records are fetched by one request. */
constexpr int FETCHED_AT_ONCE = 1024;

tddp_wait until(Clock::time_point deadline, tddp_cancel *cancel)
{
    auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    return tddp_wait{left > 0 ? left : 0, cancel};
}

std::string key_of(int rank)
{
    return "gloo/" + std::to_string(rank);
}

/* Where a rank publishes a failure after its addresses. */
std::string failure_key_of(int rank)
{
    return key_of(rank) + "/failed";
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

/* Values from the store. */
class Blobs
{
  public:
    explicit Blobs(size_t count) : blobs_(count) {}
    ~Blobs()
    {
        for (tddp_blob &each : blobs_) {
            tddp_blob_free(&each);
        }
    }
    Blobs(const Blobs &) = delete;
    Blobs &operator=(const Blobs &) = delete;

    tddp_blob *data()
    {
        return blobs_.data();
    }
    tddp_slice operator[](size_t which) const
    {
        return {blobs_[which].data, blobs_[which].size};
    }

  private:
    std::vector<tddp_blob> blobs_;
};

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

/* Waits for other ranks' values. */
void fetch(const tddp_backend_opts &opts, const std::vector<tddp_slice> &keys,
           Clock::time_point deadline, tddp_cancel *cancel, tddp_blob *values)
{
    const tddp_backend_opts *all = opts.size < sizeof opts ? nullptr : &opts; /* older cores */
    tddp_status status;
    do {
        const auto check_at = Clock::now() + CHECK_INTERVAL;
        const bool checks = all && all->check && check_at < deadline;
        const tddp_wait wait = until(checks ? check_at : deadline, cancel);
        status = tddp_store_multi_get(opts.store, keys.data(), keys.size(), &wait, values);
        if (status != TDDP_TIMEOUT || !checks) {
            break;
        }
        status = all->check(all->check_data);
    } while (status == TDDP_OK);
    Failure::check(status);
}

/* The reason that a lost rank published; empty if it had no time to. */
std::string failure_reason_of(tddp_store *store, int peer)
{
    const std::string key = failure_key_of(peer);
    tddp_wait brief = {200, nullptr};
    Blobs value(1);
    if (tddp_store_get(store, slice(key), &brief, value.data()) != TDDP_OK) {
        return {};
    }
    const char *reason = tddp_backend_published_failure(value[0]);
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
    try {
        open(opts, deadline, wait ? wait->cancel : nullptr);
    } catch (const std::exception &cause) {
        /* The others wait for this rank's addresses, or its connection: publish the reason
         * instead. */
        std::string key = published_ ? failure_key_of(rank) : key_of(rank);
        tddp_backend_publish_failure(opts.store, slice(key), strip_location(cause).c_str());
        throw;
    }
}

void Mesh::open(const tddp_backend_opts &opts, Clock::time_point deadline, tddp_cancel *cancel)
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
    tddp_wait left = until(deadline, cancel);
    Failure::check(
        tddp_store_set(opts.store, slice(key_of(rank)), slice(endpoint.serialise()), &left));
    published_ = true;
    for (int first = 0; first < size; first += FETCHED_AT_ONCE) {
        connect_pairs(opts, first, std::min(size, first + FETCHED_AT_ONCE), deadline, cancel);
    }
    make_links();
    set_up_sockets(seconds);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        links_ready_ = true;
    }
    exchange_connected(opts.store, deadline, cancel);
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

/* Connects to the ranks from `first` to before `end`, this one left out. */
void Mesh::connect_pairs(const tddp_backend_opts &opts, int first, int end,
                         Clock::time_point deadline, tddp_cancel *cancel)
{
    std::vector<std::string> keys;
    std::vector<tddp_slice> slices;
    for (int peer = first; peer < end; peer++) {
        keys.push_back(key_of(peer));
    }
    for (const std::string &key : keys) {
        slices.push_back(slice(key));
    }
    Blobs records(slices.size());
    fetch(opts, slices, deadline, cancel, records.data());
    /* Before the first connection: closing one that another rank is just making ends that rank's
     * process, by an exception on Gloo's thread (2022 versions). */
    for (int peer = first; peer < end; peer++) {
        if (const char *reason =
                tddp_backend_published_failure(records[static_cast<size_t>(peer - first)])) {
            throw Failure(TDDP_PEER_LOST, rank_text(peer) + " could not connect: " + reason);
        }
    }
    for (int peer = first; peer < end; peer++) {
        if (peer != rank) {
            connect_pair(opts.store, peer, records[static_cast<size_t>(peer - first)], deadline,
                         cancel);
        }
    }
}

void Mesh::connect_pair(tddp_store *store, int peer, tddp_slice record, Clock::time_point deadline,
                        tddp_cancel *cancel)
{
    const Endpoint endpoint = Endpoint::parse(record);
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
                                          failure_reason_of(store, peer));
    }
    if (!error.empty()) {
        std::string reason = failure_reason_of(store, peer);
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
void Mesh::exchange_connected(tddp_store *store, Clock::time_point deadline, tddp_cancel *cancel)
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
                text += is_inactive(peer) ? failure_reason_of(store, peer) : "";
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
