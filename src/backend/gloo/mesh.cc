/*
 * The life of the connections, and waiting on Gloo's buffers. Used by the operation's thread
 * and by threads that post and finish sends and receives; abort() on any thread.
 *
 * Invariant: waking a wait may hide a completion at the same moment. So a wait fails only after
 * another wait, which nothing woke, has not completed. errors.cc has the texts.
 */
#include "mesh.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace tddp_gloo
{
namespace
{

using std::chrono::milliseconds;

/* How long a thread that waits for a header looks for it before it sleeps. */
constexpr std::chrono::microseconds SPIN_TIME{200};
/* How often the thread may be preempted just before it waits, without missing a completion. */
constexpr int MAX_CHECKS = 3;
/* For data that the kernel still has to deliver when a group ends. */
constexpr std::chrono::milliseconds SEND_TIMEOUT{2000};
/* The same after an abort, for which others may wait. */
constexpr std::chrono::milliseconds ABORT_SEND_TIMEOUT{100};

std::vector<int> names_in(const tddp_backend_opts &opts)
{
    /* Older cores don't pass names. */
    if (opts.size < sizeof opts || !opts.names) {
        return {};
    }
    return {opts.names, opts.names + opts.world_size};
}

tddp_observer observer_in(const tddp_backend_opts &opts)
{
    return opts.size < sizeof opts ? tddp_observer{} : opts.observer;
}

} // namespace

Clock::time_point deadline_after(int64_t ms)
{
    constexpr int64_t max_ms = GLOO_TIMEOUT.count();
    return Clock::now() + milliseconds(ms < max_ms ? ms : max_ms);
}

std::string strip_location(const std::exception &cause)
{
    const char *text = cause.what();
    const char *bracket = *text == '[' ? strstr(text, "] ") : nullptr;
    return bracket ? bracket + 2 : text;
}

Mesh::Mesh(const tddp_backend_opts &opts)
    : rank(opts.rank), size(opts.world_size), names_(names_in(opts)), observer_(observer_in(opts)),
      peers_(static_cast<size_t>(opts.world_size))
{
}

Mesh::~Mesh()
{
    stop_watcher();
    send_close_notice(TDDP_OK, "");
    if (!aborted_) {
        wait_until_sent(sockets_, SEND_TIMEOUT);
    }
    /* First, or Gloo's thread would spin on what still arrives for buffers that are gone. */
    close_pairs();
    eager_buffers.clear();
    links_.clear();
    close_notice_.reset();
    /* The pairs refer to the device. */
    context_.reset();
    device_.reset();
}

void Mesh::post_inbox(int peer, unsigned which)
{
    memset(link(peer).inbox_data[which], 0, HEADER_BYTES); /* see wait_header() */
    recv(*link(peer).inbox[which], peer, HEADER_SLOT, 0, HEADER_BYTES + EAGER_BYTES);
}

void Mesh::compare(const tddp_op &op, int peer, const char *header)
{
    Link &one = link(peer);
    tddp_calls now;
    now.mine = tddp_call_of(&op, rank, peer);
    memcpy(&now.theirs, header, sizeof now.theirs);
    if (!tddp_calls_agree(&now.mine, &now.theirs)) {
        Failure::check(tddp_calls_mismatch(rank_name(rank), rank_name(peer), &now, &one.before));
    }
    one.before = now;
    one.agreed = op.sequence;
}

void Mesh::abort()
{
    send_close_notice(TDDP_GROUP_FAILED, "its group was destroyed while operations were under way");
    if (!aborted_) {
        wait_until_sent(sockets_, ABORT_SEND_TIMEOUT);
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
    resumed_ = sequence_ == op.sequence;
    if (resumed_) {
        current_.op = &op;
    } else {
        current_ = Task(op);
    }
    if (aborted_) {
        throw Failure(TDDP_GROUP_FAILED, "aborted");
    }
    begin_wait();
    std::lock_guard<std::mutex> lock(mutex_);
    sequence_ = op.sequence;
}

void Mesh::limit_partners(std::vector<int> partners)
{
    current_.all_partners = false;
    current_.partners = std::move(partners);
}

void Mesh::end()
{
    end_wait();
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
        fail_lost(task, peer, strip_location(cause));
    }
}

void Mesh::recv(const Task &task, Buffer &buffer, int peer, uint64_t slot, size_t offset,
                size_t bytes)
{
    try {
        if (peer == TDDP_ANY_SOURCE) {
            buffer.recv(active_peers(), slot, offset, bytes);
        } else {
            buffer.recv(peer, slot, offset, bytes);
        }
    } catch (const std::exception &cause) {
        fail_lost(task, peer, strip_location(cause));
    }
}

std::vector<int> Mesh::active_peers()
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> here;
    for (int peer = 0; peer < size; peer++) {
        if (peer != rank && peers_[static_cast<size_t>(peer)].state == Peer::ACTIVE) {
            here.push_back(peer);
        }
    }
    return here;
}

void Mesh::check_peers(const Task &task, int peer)
{
    std::unique_lock<std::mutex> lock(mutex_);
    update_peers();
    Waiter waiter = {&task, nullptr, peer, false};
    bool any_lost = std::any_of(peers_.begin(), peers_.end(),
                                [](const Peer &each) { return each.state == Peer::LOST; });
    tddp_status status = any_lost && !aborted_ ? TDDP_PEER_LOST : check_wait(waiter, Clock::now());
    if (status == TDDP_PEER_LOST) {
        first_failure_ = describe_failure(status, waiter);
        throw Failure(status, first_failure_);
    }
    if (status == TDDP_GROUP_FAILED) {
        throw Failure(status, "aborted");
    }
}

void Mesh::check_peers(int which)
{
    tddp_op none = {};
    none.kind = TDDP_OP_RECV;
    none.timeout_ms = GLOO_TIMEOUT.count();
    const Task task(none);
    for (int peer = 0; peer < size; peer++) {
        if (which < 0 || peer == which) {
            check_peers(task, peer);
        }
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

/* --- headers --------------------------------------------------------------------------------- */

void Mesh::spin_until_arrival(const tddp_op &op, const uint64_t *word)
{
    const auto end = Clock::now() + (op.awaited ? SPIN_TIME : milliseconds(0));
    while (__atomic_load_n(word, __ATOMIC_RELAXED) == 0 && Clock::now() < end && !aborted_) {
        if (op.cancel && tddp_cancel_triggered(op.cancel)) {
            throw Failure(TDDP_CANCELED, "interrupted");
        }
        sched_yield(); /* to Gloo's thread, where there are few cores */
    }
}

void Mesh::wait_header(int peer)
{
    Link &one = link(peer);
    const char *inbox = one.inbox_data[one.inbox_index];
    spin_until_arrival(*current_.op, &reinterpret_cast<const tddp_call *>(inbox)->sequence);
    wait_recv(*one.inbox[one.inbox_index], peer);
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
    std::string reason;
    for (;;) {
        Outcome outcome = wait_once(waiter, &source, &reason);
        if (outcome == Outcome::FAILED) {
            fail_lost(task, peer, reason);
        }
        if (outcome == Outcome::DONE || check_woken(waiter, &source)) {
            return source;
        }
    }
}

Mesh::Outcome Mesh::wait_once(Waiter &waiter, int *source, std::string *reason)
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (aborted_) {
            return Outcome::WOKEN;
        }
        if (waiter.brief) {
            waiter.since = Clock::now();
            wake_early_ = true;
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
        *reason = strip_location(cause);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    *std::find(waiters_.begin(), waiters_.end(), &waiter) = waiters_.back();
    waiters_.pop_back();
    return outcome;
}

/* After a wait was woken. Returns true if it has completed after all; throws if it never will. */
bool Mesh::check_woken(const Waiter &waiter, int *source)
{
    tddp_status status;
    std::string text;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        status = check_wait(waiter, Clock::now());
        text = status == TDDP_OK ? "" : describe_failure(status, waiter);
    }
    if (status == TDDP_OK) {
        return false;
    }
    if (status == TDDP_CANCELED) {
        throw Failure(status, "interrupted");
    }
    if (status == TDDP_GROUP_FAILED) {
        throw Failure(status, waiter.peer == TDDP_ANY_SOURCE
                                  ? "aborted while waiting for any rank"
                                  : "aborted while waiting for " + rank_text(waiter.peer));
    }
    if (wait_briefly(waiter, source)) {
        return true;
    }
    fail(*waiter.task, status, text);
}

/* Whether the transfer has completed. */
bool Mesh::wait_briefly(Waiter waiter, int *source)
{
    std::string reason;
    Outcome outcome = Outcome::WOKEN;
    waiter.brief = true;
    for (int i = 0; i < MAX_CHECKS && outcome == Outcome::WOKEN; i++) {
        outcome = wait_once(waiter, source, &reason);
    }
    return outcome == Outcome::DONE;
}

} // namespace tddp_gloo
