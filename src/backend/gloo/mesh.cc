/*
 * Connects every rank to every other through the group's store and carries the waits on Gloo's
 * buffers. Used by the thread that makes the group, then by its progress thread; abort() comes from
 * any thread, and the watch thread lives inside.
 *
 * Connecting is done here rather than by Gloo's rendezvous: it differs between Gloo's versions,
 * cannot be interrupted, and looks at this host's name. Pairs, addresses and unbound buffers are
 * the same from 2022 on.
 */
#include "mesh.h"

#include <signal.h>

#include <cstring>

#include <gloo/transport/pair.h>

#include <tddp/log.h>

#include "device.h"
#include "failure.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

constexpr milliseconds TICK{50};
/* Longer than any operation: deadlines are kept here, not by Gloo. */
constexpr milliseconds GLOO_TIMEOUT{std::chrono::hours(24 * 365)};

Clock::time_point deadline_after(int64_t ms)
{
    constexpr int64_t most = GLOO_TIMEOUT.count();
    return Clock::now() + milliseconds(ms < most ? ms : most);
}

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

/* Gloo's texts begin with the place in its source, which says nothing to people. */
std::string plain(const std::exception &cause)
{
    const char *text = cause.what();
    const char *bracket = *text == '[' ? strstr(text, "] ") : nullptr;
    return bracket ? bracket + 2 : text;
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

} // namespace

Mesh::Mesh(const tddp_backend_opts &opts) : rank(opts.rank), size(opts.world_size) {}

Mesh::~Mesh()
{
    stop_watch();
    links_.clear();
    /* The pairs refer to the device. */
    context_.reset();
    device_.reset();
}

/* --- connecting ------------------------------------------------------------------------------ */

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

void Mesh::post_inbox(int peer, unsigned which)
{
    recv(*link(peer).inbox[which], peer, HEADER_SLOT, 0, HEADER_BYTES + EAGER_BYTES);
}

void Mesh::abort()
{
    aborted_ = true;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (waited_) {
            waited_receives_ ? waited_->abortWaitRecv() : waited_->abortWaitSend();
        }
    }
    close_pairs();
}

/* The peers learn of it at once: their receives end with a closed connection. */
void Mesh::close_pairs()
{
    std::call_once(closed_, [this] {
        for (int peer = 0; context_ && peer < size; peer++) {
            if (peer != rank) {
                try {
                    context_->getPair(peer)->close();
                } catch (const std::exception &cause) {
                    tddp_log(TDDP_LOG_DEBUG, "gloo", "closing rank %d: %s", peer, cause.what());
                }
            }
        }
    });
}

/* --- operations ------------------------------------------------------------------------------ */

void Mesh::begin(int64_t timeout_ms)
{
    timeout_ms_ = timeout_ms;
    deadline_ = deadline_after(timeout_ms);
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted");
    }
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = true;
    if (asleep_) {
        changed_.notify_one();
    }
}

void Mesh::end()
{
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
}

std::unique_ptr<Buffer> Mesh::buffer(void *data, size_t bytes)
{
    return context_->createUnboundBuffer(data, bytes);
}

void Mesh::send(Buffer &buffer, int peer, uint64_t slot, size_t offset, size_t bytes)
{
    try {
        buffer.send(peer, slot, offset, bytes);
    } catch (const std::exception &cause) {
        lost(peer, plain(cause));
    }
}

void Mesh::recv(Buffer &buffer, int peer, uint64_t slot, size_t offset, size_t bytes)
{
    try {
        buffer.recv(peer, slot, offset, bytes);
    } catch (const std::exception &cause) {
        lost(peer, plain(cause));
    }
}

void Mesh::wait_send(Buffer &buffer, int peer)
{
    wait(buffer, peer, false);
}

void Mesh::wait_recv(Buffer &buffer, int peer)
{
    wait(buffer, peer, true);
}

/* False: woken by the watch or by an abort. */
bool Mesh::wait_once(Buffer &buffer, int peer, bool receives)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        waited_ = &buffer;
        waited_receives_ = receives;
    }
    bool done = false;
    std::string why;
    try {
        done = receives ? buffer.waitRecv(nullptr, GLOO_TIMEOUT)
                        : buffer.waitSend(nullptr, GLOO_TIMEOUT);
    } catch (const std::exception &cause) {
        why = plain(cause);
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        waited_ = nullptr;
    }
    if (!why.empty()) {
        lost(peer, why);
    }
    return done;
}

/* The peer is gone, so all that will ever arrive has arrived: a peer may well do its part and end.
 * A wake-up hides what is done; without one, Gloo throws at its timeout, and closes connections
 * that are of no further use. */
bool Mesh::done_after_all(Buffer &buffer, bool receives)
{
    try {
        while (!(receives ? buffer.waitRecv(nullptr, milliseconds(1))
                          : buffer.waitSend(nullptr, milliseconds(1)))) {
        }
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

void Mesh::wait(Buffer &buffer, int peer, bool receives)
{
    while (!wait_once(buffer, peer, receives)) {
        if (aborted_) {
            throw Failure(TDDP_GROUP_FAILED,
                          "aborted while waiting for rank " + std::to_string(peer));
        }
        /* Others may be gone, but this one is what counts: the others may have done their part. */
        if (is_gone(peer)) {
            if (done_after_all(buffer, receives)) {
                return;
            }
            lost(peer, "its connection ended");
        }
        if (Clock::now() >= deadline_) {
            throw Failure(TDDP_TIMEOUT, "not done after " + std::to_string(timeout_ms_) +
                                            " ms; rank " + std::to_string(peer) +
                                            " has not done its part: is it slow, stuck, or in "
                                            "another operation?");
        }
    }
}

/* Asks a peer's sentinel for its exception: an abort makes the wait return at once if it has none.
 */
bool Mesh::is_gone(int peer)
{
    for (unsigned which = 0; which < 2 && !links_.empty(); which++) {
        Buffer &sentinel = *link(peer).inbox[which];
        try {
            sentinel.abortWaitRecv();
            sentinel.waitRecv(nullptr, GLOO_TIMEOUT);
        } catch (const std::exception &) {
            return true;
        }
    }
    return false;
}

/* The first to give up may be another's victim: all who are gone are named. */
void Mesh::lost(int peer, const std::string &why)
{
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted: " + why);
    }
    std::string others;
    for (int other = 0; other < size; other++) {
        if (other != rank && other != peer && is_gone(other)) {
            others +=
                (others.empty() ? "; gone as well: rank " : ", rank ") + std::to_string(other);
        }
    }
    throw Failure(TDDP_PEER_LOST, "lost rank " + std::to_string(peer) + " (" + why + others + ")");
}

char *Mesh::scratch(size_t bytes)
{
    if (bytes > scratch_bytes_) {
        scratch_.reset();
        scratch_bytes_ = 0;
        scratch_.reset(new char[bytes]);
        scratch_bytes_ = bytes;
    }
    return scratch_.get();
}

/* --- the watch ------------------------------------------------------------------------------- */

void Mesh::start_watch()
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        watch_thread_ = std::thread([this] { watch(); });
    } catch (const std::exception &cause) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw Failure(TDDP_SYSTEM, std::string("cannot start a thread: ") + cause.what());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Mesh::stop_watch()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        changed_.notify_one();
    }
    if (watch_thread_.joinable()) {
        watch_thread_.join();
    }
}

void Mesh::watch()
{
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
        if (!busy_) {
            asleep_ = true;
            changed_.wait(lock, [this] { return stop_ || busy_; });
            asleep_ = false;
            continue;
        }
        changed_.wait_for(lock, TICK, [this] { return stop_; });
        if (waited_) {
            waited_receives_ ? waited_->abortWaitRecv() : waited_->abortWaitSend();
        }
        /* Gloo's connect cannot be interrupted, but a pair that is closed ends it. */
        if (cancel_ && tddp_cancel_triggered(cancel_)) {
            cancel_ = nullptr;
            lock.unlock();
            close_pairs();
            lock.lock();
        }
    }
}

} // namespace tddp_gloo
