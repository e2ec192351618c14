/*
 * Waits for transfers: looks, spins where the caller awaits the result, then sleeps until the
 * transport counts an event. Any thread, several at once, each for its own operation.
 *
 * A sleep is limited, to check what counts no event: the deadline, a cancel token, a peer whose end
 * nothing tells. Invariant: a wait fails only after a look at the transfer that follows the reason,
 * since what a peer sent before it went may have completed it.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

#include "backend/coll/coll.h"

#define CHECK_INTERVAL_NS (20 * TDDP_NS_PER_MS)
/* How long a thread looks before it sleeps, if it has nothing else to do. */
#define SPIN_NS (200 * INT64_C(1000))

void tddp_coll_wait_init(tddp_coll_wait *wait, const tddp_op *op)
{
    const int64_t now = tddp_now_ns();
    *wait = (tddp_coll_wait){.op = op,
                             .sequence = tddp_op_is_p2p(op->kind) ? 0 : op->sequence,
                             .deadline = tddp_deadline_from(now, op->timeout_ms),
                             .checked_at = now};
}

int tddp_coll_rank_name(const tddp_coll *coll, int rank)
{
    return coll->names ? coll->names[rank] : rank;
}

bool tddp_coll_is_complete(const tddp_coll *coll, void *transfer)
{
    int complete = 0;
    return transfer && coll->transport->test(coll->context, transfer, &complete, NULL) == TDDP_OK &&
           complete;
}

void tddp_coll_release(const tddp_coll *coll, void **transfer)
{
    if (*transfer) {
        coll->transport->release(coll->context, *transfer);
        *transfer = NULL;
    }
}

bool tddp_coll_is_fatal(tddp_status status)
{
    return status != TDDP_OK && status != TDDP_CANCELED && status != TDDP_INVALID_ARGUMENT &&
           status != TDDP_UNSUPPORTED;
}

tddp_status tddp_coll_report(tddp_coll *coll, tddp_status status)
{
    if (tddp_coll_is_fatal(status)) {
        char text[4096];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_coll_send_notice(coll, status, text);
        return tddp_fail(status, "%s", text);
    }
    return status;
}

static tddp_status fail_timeout(const tddp_coll *coll, const tddp_coll_wait *wait, int peer)
{
    const tddp_op *op = wait->op;
    const int64_t ms = op->part_of ? op->part_of->timeout_ms : op->timeout_ms;
    const bool sends = op->kind == TDDP_OP_SEND;
    char who[32] = "no rank";
    if (peer != TDDP_ANY_SOURCE) {
        (void)snprintf(who, sizeof who, "rank %d", tddp_coll_rank_name(coll, peer));
    }
    if (!tddp_op_is_p2p(op->kind)) {
        return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms; %s has not done its part",
                         ms, who);
    }
    if (wait->matched) {
        return tddp_fail(TDDP_TIMEOUT,
                         "not done after %" PRId64
                         " ms; %s has begun to %s this message, but has not finished",
                         ms, who, sends ? "receive" : "send");
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "not done after %" PRId64 " ms; %s has%s %s %s with tag %" PRIu32, ms, who,
                     peer == TDDP_ANY_SOURCE ? "" : " not", sends ? "received" : "sent",
                     peer == TDDP_ANY_SOURCE ? "one" : "it", op->tag);
}

/* Reasons not to wait. */
static tddp_status check(tddp_coll *coll, tddp_coll_wait *wait, int peer, int64_t now)
{
    if (now - wait->checked_at >= CHECK_INTERVAL_NS) {
        wait->checked_at = now;
        tddp_status status = tddp_coll_check(coll, peer, wait->sequence);
        if (status) {
            return status;
        }
    }
    if (now >= wait->deadline) {
        return fail_timeout(coll, wait, peer);
    }
    const tddp_cancel *cancel = wait->op->cancel;
    return cancel && tddp_cancel_triggered(cancel) ? TDDP_CANCELED : TDDP_OK;
}

/* A transport's text is about this transfer alone. */
static tddp_status fail_transfer(tddp_coll *coll, int peer, uint64_t sequence, tddp_status status)
{
    char text[4096];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    const tddp_status cause = tddp_coll_check(coll, peer, sequence);
    if (cause == TDDP_OK && status == TDDP_PEER_LOST && peer != TDDP_ANY_SOURCE) {
        return tddp_fail(status, "lost rank %d (%s)", tddp_coll_rank_name(coll, peer), text);
    }
    return cause ? cause : tddp_fail(status, "%s", text);
}

tddp_status tddp_coll_start_send(tddp_coll *coll, int peer, uint64_t tag, const void *data,
                                 size_t bytes, void **transfer)
{
    const tddp_status status =
        coll->transport->send(coll->context, peer, tag, data, bytes, transfer);
    return status ? fail_transfer(coll, peer, 0, status) : TDDP_OK;
}

tddp_status tddp_coll_start_recv(tddp_coll *coll, int peer, uint64_t tag, void *data, size_t bytes,
                                 void **transfer)
{
    const tddp_status status =
        coll->transport->recv(coll->context, peer, tag, data, bytes, transfer);
    return status ? fail_transfer(coll, peer, 0, status) : TDDP_OK;
}

void tddp_coll_arm(const tddp_coll *coll)
{
    if (coll->transport->arm) {
        coll->transport->arm(coll->context);
    }
}

/* Whether an event comes while this thread, which has nothing else to do, gives its core to the
 * transport's and to other ranks', again and again. */
static bool yield_until_event(const tddp_eventcount *events, uint32_t seen, int64_t end)
{
    bool found = false;
    while (!found && tddp_now_ns() < end) {
        (void)sched_yield();
        found = tddp_eventcount_read(events) != seen;
    }
    return found;
}

/* Sleeps until the next event, for a moment at most. A transport that moves only while it is called
 * is called as long as others would spin. */
static void await_event(const tddp_coll *coll, const tddp_coll_wait *wait, uint32_t seen,
                        int64_t now, int64_t spin_until)
{
    const tddp_op *op = wait->op;
    tddp_eventcount *events = coll->events;
    if (coll->transport->progress && now < spin_until) {
        tddp_cpu_pause();
        return;
    }
    tddp_coll_arm(coll);
    const int64_t canceled = tddp_cancel_deadline(op->cancel);
    const int64_t end = canceled < wait->deadline ? canceled : wait->deadline;
    const bool spins = op->awaited && !coll->transport->progress;
    const int64_t most = end < now + SPIN_NS ? end : now + SPIN_NS;
    if (!spins || !yield_until_event(events, seen, most)) {
        const int64_t left = end - (spins ? tddp_now_ns() : now);
        tddp_eventcount_wait(events, seen, 0, left < CHECK_INTERVAL_NS ? left : CHECK_INTERVAL_NS);
    }
}

tddp_status tddp_coll_await(tddp_coll *coll, tddp_coll_wait *wait, void *transfer, int peer,
                            int *source)
{
    const tddp_transport_ops *transport = coll->transport;
    tddp_eventcount *events = coll->events;
    int64_t spin_until = 0;
    tddp_status failure = TDDP_OK;
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(events);
        if (transport->progress) {
            transport->progress(coll->context);
        }
        int complete = 0;
        const tddp_status status = transport->test(coll->context, transfer, &complete, source);
        if (complete || status) {
            return status ? fail_transfer(coll, peer, wait->sequence, status) : TDDP_OK;
        }
        if (failure) {
            return failure;
        }
        const int64_t now = tddp_now_ns();
        if (spin_until == 0) {
            spin_until = wait->op->awaited ? now + SPIN_NS : now;
        }
        failure = check(coll, wait, peer, now);
        if (failure == TDDP_CANCELED) {
            tddp_coll_arm(coll);
            return failure;
        }
        if (failure == TDDP_OK) {
            await_event(coll, wait, seen, now, spin_until);
        }
    }
}
