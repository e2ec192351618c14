/*
 * The connections' life: waiting on Gloo's buffers, the watch that wakes these waits, the end. Used
 * by the group's progress thread; abort() comes from any thread, and the watch thread lives inside.
 *
 * Invariant: `waited_` is set only while its buffer is alive and the progress thread is in a wait
 * on it, both under the lock, so that others may wake it.
 */
#include "mesh.h"

#include <signal.h>

#include <cstring>

#include <gloo/transport/pair.h>

#include <tddp/log.h>

#include "failure.h"

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

constexpr milliseconds TICK{50};

} // namespace

Clock::time_point deadline_after(int64_t ms)
{
    constexpr int64_t most = GLOO_TIMEOUT.count();
    return Clock::now() + milliseconds(ms < most ? ms : most);
}

std::string plain(const std::exception &cause)
{
    const char *text = cause.what();
    const char *bracket = *text == '[' ? strstr(text, "] ") : nullptr;
    return bracket ? bracket + 2 : text;
}

Mesh::Mesh(const tddp_backend_opts &opts) : rank(opts.rank), size(opts.world_size) {}

Mesh::~Mesh()
{
    stop_watch();
    links_.clear();
    /* The pairs refer to the device. */
    context_.reset();
    device_.reset();
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
