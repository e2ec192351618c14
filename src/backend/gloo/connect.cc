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

tddp_slice slice(const std::string &text)
{
    return tddp_slice{text.data(), text.size()};
}

/* Addresses one after the other, each behind its length; a rank's own is empty. */
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
        /* The others wait for our addresses: they get the reason instead. */
        if (!published_) {
            std::string text = FAILED_MARK + plain(cause);
            tddp_wait brief = {1000, nullptr};
            if (tddp_store_set(opts.store, slice(key_of(rank)), slice(text), &brief)) {
                tddp_log(TDDP_LOG_DEBUG, "gloo", "%s", tddp_error_message());
            }
        }
        throw;
    }
}

void Mesh::open(const tddp_backend_opts &opts, Clock::time_point deadline, tddp_cancel *cancel)
{
    device_ = make_device(opts);
    context_ = device_->createContext(rank, size);
    context_->setTimeout(milliseconds(until(deadline, nullptr).timeout_ms + 1));
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank) {
            context_->createPair(peer);
        }
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        cancel_ = cancel;
        busy_ = true;
    }
    start_watch();
    tddp_wait left = until(deadline, cancel);
    publish(opts.store, &left);
    connect_pairs(opts.store, deadline, cancel);
    make_links();
    close_on_exec();
    std::lock_guard<std::mutex> lock(mutex_);
    cancel_ = nullptr;
    busy_ = false;
}

void Mesh::publish(tddp_store *store, const tddp_wait *wait)
{
    std::string all;
    for (int peer = 0; peer < size; peer++) {
        append(all,
               peer == rank ? std::vector<char>() : context_->getPair(peer)->address().bytes());
    }
    Failure::check(tddp_store_set(store, slice(key_of(rank)), slice(all), wait));
    published_ = true;
}

void Mesh::connect_pairs(tddp_store *store, Clock::time_point deadline, tddp_cancel *cancel)
{
    for (int peer = 0; peer < size; peer++) {
        if (peer == rank) {
            continue;
        }
        tddp_wait left = until(deadline, cancel);
        tddp_blob blob = {};
        Failure::check(tddp_store_get(store, slice(key_of(peer)), &left, &blob));
        std::unique_ptr<tddp_blob, void (*)(tddp_blob *)> owner(&blob, tddp_blob_free);
        /* A blob is followed by a NUL. */
        if (strncmp(blob.data, FAILED_MARK, sizeof FAILED_MARK - 1) == 0) {
            throw Failure(TDDP_PEER_LOST, "rank " + std::to_string(peer) + " could not connect: " +
                                              (blob.data + sizeof FAILED_MARK - 1));
        }
        std::vector<char> address = extract(blob, rank);
        std::string why;
        try {
            context_->getPair(peer)->connect(address);
        } catch (const std::exception &cause) {
            why = plain(cause);
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            throw Failure(TDDP_CANCELED,
                          "interrupted while connecting to rank " + std::to_string(peer));
        }
        if (Clock::now() >= deadline) {
            throw Failure(TDDP_TIMEOUT, "no connection to rank " + std::to_string(peer) +
                                            " in the time given: is it alive, and can its "
                                            "address be reached from here? " +
                                            why);
        }
        if (!why.empty()) {
            throw Failure(TDDP_NETWORK,
                          "cannot connect to rank " + std::to_string(peer) + ": " + why);
        }
    }
}

void Mesh::make_links()
{
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
        post_inbox(peer, 0);
    }
}

/*
 * Gloo leaves its sockets open in programs that this process starts. Such a program would hold the
 * connections after this process's death, and the others would wait instead of being told. Gloo
 * does not say which descriptors are its own; the addresses of its pairs tell.
 */
void Mesh::close_on_exec()
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
        }
    }
}

} // namespace tddp_gloo
