/*
 * Connects this rank to every other through the group's store. Runs on the thread that makes the
 * group.
 *
 * This is done here rather than by Gloo's rendezvous, which differs between Gloo's versions, cannot
 * be interrupted, and looks at this host's name. Devices, pairs and their addresses are the same
 * from 2022 on.
 */
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>

#include <tddp/log.h>

#include "device.h"
#include "failure.h"
#include "mesh.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

tddp_wait until(Clock::time_point deadline, tddp_cancel *cancel)
{
    auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    return tddp_wait{left > 0 ? left : 0, cancel};
}

/* Begins what a rank leaves in place of its addresses; no length of an address looks so. */
const char FAILED_MARK[] = "failed: ";

std::string key_of(int rank)
{
    return "gloo/" + std::to_string(rank);
}

/* What a rank leaves that fails when the others know its addresses. */
std::string failure_key_of(int rank)
{
    return key_of(rank) + "/failed";
}

tddp_slice slice(const std::string &text)
{
    return tddp_slice{text.data(), text.size()};
}

/* Addresses one after the other, each behind its length; in a rank's own place that of its beacon.
 */
void append(std::string &all, const std::vector<char> &address)
{
    uint32_t length = static_cast<uint32_t>(address.size());
    all.append(reinterpret_cast<const char *>(&length), sizeof length);
    all.append(address.data(), address.size());
}

std::vector<char> extract(const tddp_blob &all, int which)
{
    size_t at = 0;
    for (int i = 0;; i++) {
        uint32_t length;
        if (all.size - at < sizeof length) {
            throw Failure(TDDP_PROTOCOL, "a rank's addresses in the store are cut short");
        }
        memcpy(&length, all.data + at, sizeof length);
        at += sizeof length;
        if (all.size - at < length) {
            throw Failure(TDDP_PROTOCOL, "a rank's addresses in the store are cut short");
        }
        if (i == which) {
            return std::vector<char>(all.data + at, all.data + at + length);
        }
        at += length;
    }
}

/* The address and port at which a socket begins, in a form to compare; empty if it has none. */
std::string place(const sockaddr_storage &address)
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

/* What a rank that is gone has left as its reason; empty if it had no time to. */
std::string reason_of(tddp_store *store, int peer)
{
    tddp_wait brief = {200, nullptr};
    tddp_blob blob = {};
    if (tddp_store_get(store, slice(failure_key_of(peer)), &brief, &blob) != TDDP_OK) {
        return {};
    }
    std::string text = ": " + std::string(blob.data, blob.size);
    tddp_blob_free(&blob);
    return text;
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
        /* The others wait for our addresses, or for us: they get the reason instead. */
        std::string text = published_ ? plain(cause) : FAILED_MARK + plain(cause);
        std::string key = published_ ? failure_key_of(rank) : key_of(rank);
        tddp_wait brief = {1000, nullptr};
        if (tddp_store_set(opts.store, slice(key), slice(text), &brief)) {
            tddp_log(TDDP_LOG_DEBUG, "gloo", "%s", tddp_error_message());
        }
        throw;
    }
}

void Mesh::open(const tddp_backend_opts &opts, Clock::time_point deadline, tddp_cancel *cancel)
{
    const int seconds = peer_timeout();
    device_ = make_device(opts);
    context_ = device_->createContext(rank, size);
    context_->setTimeout(milliseconds(until(deadline, nullptr).timeout_ms + 1));
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            context_->createPair(peer);
        }
    }
    auto *own = dynamic_cast<const gloo::transport::tcp::Address *>(
        &context_->getPair(rank == 0 ? 1 : 0)->address());
    if (own) {
        beacon_.open(own->getSockaddr(), size);
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        connecting_ = true;
        cancel_ = cancel;
        connect_deadline_ = deadline;
        busy_++;
    }
    start_watch();
    tddp_wait left = until(deadline, cancel);
    publish(opts.store, &left);
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            connect_pair(opts.store, peer, deadline, cancel);
        }
    }
    make_links();
    set_up_sockets(seconds);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        linked_ = true;
    }
    greet(opts.store, deadline, cancel);
    beacon_.close();
    std::lock_guard<std::mutex> lock(mutex_);
    connecting_ = false;
    cancel_ = nullptr;
    probe_.reset();
    busy_--;
}

void Mesh::publish(tddp_store *store, const tddp_wait *wait)
{
    const char *beacon = reinterpret_cast<const char *>(&beacon_.address());
    std::string all;
    for (int peer = 0; peer < size; peer++) {
        append(all, peer == rank ? std::vector<char>(beacon, beacon + sizeof beacon_.address())
                                 : context_->getPair(peer)->address().bytes());
    }
    Failure::check(tddp_store_set(store, slice(key_of(rank)), slice(all), wait));
    published_ = true;
}

/* Whom the watch is to look at while this thread waits for a connection; -1: nobody. */
void Mesh::await_peer(int peer, const std::vector<char> &beacon)
{
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_ = peer;
    awaited_since_ = Clock::now();
    awaited_beacon_ = {};
    if (beacon.size() == sizeof awaited_beacon_) {
        memcpy(&awaited_beacon_, beacon.data(), sizeof awaited_beacon_);
    }
    probe_.reset();
}

bool Mesh::awaited_is_dead()
{
    std::lock_guard<std::mutex> lock(mutex_);
    return awaited_is_dead_;
}

void Mesh::connect_pair(tddp_store *store, int peer, Clock::time_point deadline,
                        tddp_cancel *cancel)
{
    tddp_wait left = until(deadline, cancel);
    tddp_blob blob = {};
    Failure::check(tddp_store_get(store, slice(key_of(peer)), &left, &blob));
    std::unique_ptr<tddp_blob, void (*)(tddp_blob *)> owner(&blob, tddp_blob_free);
    /* A blob is followed by a NUL. */
    if (strncmp(blob.data, FAILED_MARK, sizeof FAILED_MARK - 1) == 0) {
        throw Failure(TDDP_PEER_LOST,
                      called(peer) + " could not connect: " + (blob.data + sizeof FAILED_MARK - 1));
    }
    std::string why;
    await_peer(peer, extract(blob, peer));
    try {
        context_->getPair(peer)->connect(extract(blob, rank));
    } catch (const std::exception &cause) {
        why = plain(cause);
    }
    await_peer(-1, {});
    if (cancel && tddp_cancel_triggered(cancel)) {
        throw Failure(TDDP_CANCELED, "interrupted while connecting to " + called(peer));
    }
    if (Clock::now() >= deadline) {
        throw Failure(TDDP_TIMEOUT, "no connection to " + called(peer) +
                                        " in the time given: is it alive, and can its address be "
                                        "reached from here? " +
                                        why);
    }
    if (awaited_is_dead()) {
        throw Failure(TDDP_PEER_LOST, "lost " + called(peer) +
                                          ", which ended while connections were made" +
                                          reason_of(store, peer));
    }
    if (!why.empty()) {
        std::string reason = reason_of(store, peer);
        throw Failure(
            TDDP_PEER_LOST,
            "cannot connect to " + called(peer) + " (" + why + ")" +
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
        one.farewell_data.reset(new Farewell());
        one.farewell = buffer(one.farewell_data.get(), sizeof(Farewell));
        one.sentinel = buffer(&one.sentinel, 0);
        recv(*one.sentinel, peer, SENTINEL_SLOT, 0, 0);
        recv(*one.farewell, peer, FAREWELL_SLOT, 0, sizeof(Farewell));
        post_inbox(peer, 0);
    }
    farewell_ = buffer(&farewell_data_, sizeof farewell_data_);
}

/*
 * Nobody goes on before all are connected to all. A rank that ended at once would else be taken for
 * one that cannot be reached, and its last words would find nobody who has asked for them yet.
 */
void Mesh::greet(tddp_store *store, Clock::time_point deadline, tddp_cancel *cancel)
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
                recv(task, *theirs, peer, GREETING_SLOT, 0, 1);
                send(task, *ours, peer, GREETING_SLOT, 0, 1);
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
                text += (peer == *missing.begin() ? " " : ", ") + called(peer);
            }
        } else {
            for (int peer : missing) {
                text += is_gone(peer) ? reason_of(store, peer) : "";
            }
        }
        say_farewell(status, text);
        throw Failure(status, text);
    }
}

/*
 * Gloo leaves its sockets open in programs that this process starts. Such a program would hold the
 * connections after this process's death, and the others would wait instead of being told. Gloo
 * does not say which descriptors are its own; the addresses of its pairs tell.
 */
void Mesh::set_up_sockets(int seconds)
{
    std::set<std::string> ours;
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            auto *address = dynamic_cast<const gloo::transport::tcp::Address *>(
                &context_->getPair(peer)->address());
            if (address) {
                ours.insert(place(address->getSockaddr()));
            }
        }
    }
    std::unique_ptr<DIR, int (*)(DIR *)> folder(opendir("/proc/self/fd"), closedir);
    while (const dirent *each = folder ? readdir(folder.get()) : nullptr) {
        int fd = atoi(each->d_name);
        sockaddr_storage address = {};
        socklen_t length = sizeof address;
        if (getsockname(fd, reinterpret_cast<sockaddr *>(&address), &length) == 0 &&
            ours.count(place(address)) > 0) {
            (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
            end_when_silent(fd, seconds);
            sockets_.push_back(fd);
        }
    }
}

} // namespace tddp_gloo
