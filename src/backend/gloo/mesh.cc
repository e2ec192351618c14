/*
 * The connections' life, and waiting on Gloo's buffers. Used by the group's progress thread, and by
 * those that post and finish sends and receives; abort() comes from any thread.
 *
 * Invariant: a wait that is woken hides what is done in that moment, so nobody gives up before a
 * wait has come to nothing that nothing woke. What is said then is in ends.cc.
 */
#include "mesh.h"

#include <algorithm>
#include <cstring>

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

/* How often a thread may lose its core just before it waits, without something being missed. */
constexpr int LOOKS = 3;
/* For what the kernel still has to deliver when a group ends. */
constexpr std::chrono::milliseconds LAST_BYTES{2000};
/* The same when it is aborted, and others may wait for that. */
constexpr std::chrono::milliseconds LAST_WORDS{100};

std::vector<int> names_in(const tddp_backend_opts &opts)
{
    /* A core that is older than names does not give any. */
    if (opts.size < sizeof opts || !opts.names) {
        return {};
    }
    return {opts.names, opts.names + opts.world_size};
}

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

Mesh::Mesh(const tddp_backend_opts &opts)
    : rank(opts.rank), size(opts.world_size), names_(names_in(opts)),
      peers_(static_cast<size_t>(opts.world_size))
{
}

Mesh::~Mesh()
{
    stop_watch();
    say_farewell(TDDP_OK, "");
    if (!aborted_) {
        wait_until_sent(sockets_, LAST_BYTES);
    }
    parcels.clear();
    links_.clear();
    farewell_.reset();
    /* The pairs refer to the device. */
    context_.reset();
    device_.reset();
}

void Mesh::post_inbox(int peer, unsigned which)
{
    recv(*link(peer).inbox[which], peer, HEADER_SLOT, 0, HEADER_BYTES + EAGER_BYTES);
}

void Mesh::compare(const tddp_op &op, int peer, const char *header)
{
    Link &one = link(peer);
    tddp_calls now;
    now.mine = tddp_call_of(&op, rank, peer);
    memcpy(&now.theirs, header, sizeof now.theirs);
    if (!tddp_calls_agree(&now.mine, &now.theirs)) {
        Failure::check(tddp_calls_mismatch(name(rank), name(peer), &now, &one.before));
    }
    one.before = now;
    one.agreed = op.sequence;
}

void Mesh::abort()
{
    say_farewell(TDDP_GROUP_FAILED, "its group was destroyed while operations were under way");
    if (!aborted_) {
        wait_until_sent(sockets_, LAST_WORDS);
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        aborted_ = true;
        for (Waiter *each : waiters_) {
            each->receives ? each->buffer->abortWaitRecv() : each->buffer->abortWaitSend();
        }
    }
    close_pairs();
}

/* --- operations ------------------------------------------------------------------------------ */

void Mesh::begin(const tddp_op &op)
{
    current_ = Task(op);
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted");
    }
    enter();
    std::lock_guard<std::mutex> lock(mutex_);
    sequence_ = op.sequence;
}

void Mesh::end()
{
    leave();
}

std::unique_ptr<Buffer> Mesh::buffer(void *data, size_t bytes)
{
    return context_->createUnboundBuffer(data, bytes);
}

void Mesh::send(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
                size_t bytes)
{
    try {
        buffer.send(peer, slot, offset, bytes);
    } catch (const std::exception &cause) {
        lost(task, peer, plain(cause));
    }
}

void Mesh::recv(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
                size_t bytes)
{
    try {
        if (peer == TDDP_ANY_SOURCE) {
            buffer.recv(peers_here(), slot, offset, bytes);
        } else {
            buffer.recv(peer, slot, offset, bytes);
        }
    } catch (const std::exception &cause) {
        lost(task, peer, plain(cause));
    }
}

std::vector<int> Mesh::peers_here()
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> here;
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank && peers_[static_cast<size_t>(peer)].state == Peer::HERE) {
            here.push_back(peer);
        }
    }
    return here;
}

void Mesh::check_peers(const Task &task, int peer)
{
    std::unique_lock<std::mutex> lock(mutex_);
    look_at_peers();
    Waiter waiter = {&task, nullptr, peer, false};
    bool any_lost = std::any_of(peers_.begin(), peers_.end(),
                                [](const Peer &each) { return each.state == Peer::LOST; });
    tddp_status status = any_lost && !aborted_ ? TDDP_PEER_LOST : verdict(waiter, Clock::now());
    if (status == TDDP_PEER_LOST) {
        reason_ = explain(status, waiter);
        throw Failure(status, reason_);
    }
    if (status == TDDP_GROUP_FAILED) {
        throw Failure(status, "aborted");
    }
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

/* --- waits ----------------------------------------------------------------------------------- */

void Mesh::wait_send(const Task &task, Buffer &buffer, int peer)
{
    (void)wait(task, buffer, peer, false);
}

int Mesh::wait_recv(const Task &task, Buffer &buffer, int peer)
{
    return wait(task, buffer, peer, true);
}

int Mesh::wait(const Task &task, Buffer &buffer, int peer, bool receives)
{
    Waiter waiter = {&task, &buffer, peer, receives};
    int source = peer;
    std::string why;
    for (;;) {
        Outcome outcome = wait_once(waiter, &source, &why);
        if (outcome == Outcome::FAILED) {
            lost(task, peer, why);
        }
        if (outcome == Outcome::DONE || settle(waiter, &source)) {
            return source;
        }
    }
}

Mesh::Outcome Mesh::wait_once(Waiter &waiter, int *source, std::string *why)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (aborted_) {
            return Outcome::WOKEN;
        }
        if (waiter.brief) {
            waiter.since = Clock::now();
            hurry_ = true;
            changed_.notify_one();
        }
        waiters_.push_back(&waiter);
    }
    Outcome outcome = Outcome::FAILED;
    try {
        bool done = waiter.receives ? waiter.buffer->waitRecv(source, GLOO_TIMEOUT)
                                    : waiter.buffer->waitSend(nullptr, GLOO_TIMEOUT);
        outcome = done ? Outcome::DONE : Outcome::WOKEN;
    } catch (const std::exception &cause) {
        *why = plain(cause);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    *std::find(waiters_.begin(), waiters_.end(), &waiter) = waiters_.back();
    waiters_.pop_back();
    return outcome;
}

/* A wait was woken. True: it is done after all; it throws if it will never be. */
bool Mesh::settle(const Waiter &waiter, int *source)
{
    tddp_status status;
    std::string text;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        status = verdict(waiter, Clock::now());
        text = status == TDDP_OK ? "" : explain(status, waiter);
    }
    if (status == TDDP_OK) {
        return false;
    }
    if (status == TDDP_GROUP_FAILED) {
        throw Failure(status, waiter.peer == TDDP_ANY_SOURCE
                                  ? "aborted while waiting for any rank"
                                  : "aborted while waiting for " + called(waiter.peer));
    }
    if (look_again(waiter, source)) {
        return true;
    }
    fail(*waiter.task, status, text);
}

/* Whether all has arrived, or left. */
bool Mesh::look_again(Waiter waiter, int *source)
{
    std::string why;
    Outcome outcome = Outcome::WOKEN;
    waiter.brief = true;
    for (int i = 0; i < LOOKS && outcome == Outcome::WOKEN; i++) {
        outcome = wait_once(waiter, source, &why);
    }
    return outcome == Outcome::DONE;
}

} // namespace tddp_gloo
