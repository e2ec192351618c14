/*
 * A node's way through the rounds of a job. The thread has one wait: for a change of what is kept
 * where the nodes meet, which a request of the agent, the next sign of life or the coordinator's
 * next deadline ends early. Then it leads, if that is its part, and does what the document says.
 * Invariant: `part` is WORKING exactly between the agent's JOINED and the notification that the
 * round is over, and the entry is ready for no round before the agent has cleared away the last.
 */
#include <stdio.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    AFTER_PEER_MS = 1500, /* for who knows more of a failure than a rank that lost its peer: that
                             its node is gone; beyond the moment at which silence is loss */
    LATE_MS = 200,        /* a thread that is later than that was held up */
    TURN_MS = 100,        /* while the workers' store is not reached, or nobody leads */
    CLOSE_MS = 500,       /* for the leader's own last entry */
    LOST_MS = 20,         /* a process's connections are gone before its port is */
};

static void take_requests(tddp_launch_node *node)
{
    tddp_launch_entry *entry = &node->entry;
    pthread_mutex_lock(&node->lock);
    /* What is told is of the round that works; later rounds have not begun before AGAIN. */
    bool working = node->part == TDDP_LAUNCH_WORKING;
    bool after_peer = node->asked[TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER];
    if (working && node->asked[TDDP_LAUNCH_REQUEST_DONE]) {
        entry->done = entry->round;
    }
    if (working && (after_peer || node->asked[TDDP_LAUNCH_REQUEST_FAILED])) {
        memcpy(entry->text,
               node->asked_texts[after_peer ? TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER
                                            : TDDP_LAUNCH_REQUEST_FAILED],
               sizeof entry->text);
        node->failure_ns =
            tddp_deadline_after_ms(after_peer ? node->link.times.silence_ms + AFTER_PEER_MS : 0);
    }
    if (node->asked[TDDP_LAUNCH_REQUEST_AGAIN] && node->part == TDDP_LAUNCH_AWAITING) {
        entry->ready = entry->round + 1;
    }
    node->cleared |= working && node->asked[TDDP_LAUNCH_REQUEST_AGAIN];
    if (node->asked[TDDP_LAUNCH_REQUEST_LEAVE]) {
        (void)snprintf(entry->leave_text, sizeof entry->leave_text, "%.255s",
                       node->asked_texts[TDDP_LAUNCH_REQUEST_LEAVE]);
    }
    node->quit |= node->asked[TDDP_LAUNCH_REQUEST_QUIT];
    node->over |= node->quit || node->asked[TDDP_LAUNCH_REQUEST_LEAVE];
    memset(node->asked, 0, sizeof node->asked);
    tddp_cancel_reset(node->link.cancel);
    pthread_mutex_unlock(&node->lock);
}

/* Puts the entry if it is another than before, or a sign of life is due. The last one says that
 * this node goes, with what it has not said yet. */
static tddp_status put_entry(tddp_launch_node *node)
{
    tddp_launch_entry *entry = &node->entry;
    tddp_bytes text = {0};
    int64_t now_ns = tddp_now_ns(); /* it counts from some moment after this, also over there */
    if (now_ns >= node->failure_ns || (node->over && node->failure_ns != INT64_MAX)) {
        entry->failed = entry->round;
        node->failure_ns = INT64_MAX;
    }
    entry->leaves = node->over && !entry->ended;
    tddp_status status = tddp_launch_entry_write(entry, &text);
    bool again = status == TDDP_OK && text.size == node->put.size &&
                 memcmp(text.data, node->put.data, text.size) == 0;
    if (status == TDDP_OK &&
        (!again || now_ns >= tddp_deadline_from(node->heard_ns, node->link.times.beat_ms))) {
        status = node->link.backend->put_entry(&node->link, (tddp_slice){text.data, text.size},
                                               again, entry->leaves);
        node->heard_ns = status == TDDP_OK ? now_ns : node->heard_ns;
    }
    if (status != TDDP_OK) { /* also a request for a node whose host does not answer: once more */
        tddp_bytes_free(&text);
    }
    tddp_bytes_free(&node->put);
    node->put = text;
    if (status == TDDP_OK && node->over && node->close_ns == INT64_MAX) {
        node->close_ns = tddp_deadline_after_ms(CLOSE_MS);
        node->viewed = false;
    }
    return status;
}

/* Whether nothing is left to do. A leader decides on what it has said last as a node, and where the
 * store ends with it, gives the others time to read the job's end. */
static bool may_end(const tddp_launch_node *node)
{
    const tddp_launch_coordinator *decides = node->coordinator;
    if (!node->over || node->contact != TDDP_LAUNCH_CONNECTED) {
        return node->over;
    }
    if (node->close_ns == INT64_MAX || (decides && !node->viewed)) {
        return tddp_now_ns() >= node->close_ns;
    }
    return !decides || node->quit || node->link.backend->survives ||
           tddp_launch_coordinator_state(decides)->stage != TDDP_LAUNCH_STAGE_ENDED ||
           tddp_launch_coordinator_over(decides, tddp_now_ns());
}

/* By when there is something to do, changed or not. */
static int64_t next_turn(const tddp_launch_node *node)
{
    const int64_t moments[] = {
        tddp_deadline_from(node->heard_ns, node->link.times.beat_ms),
        node->failure_ns,
        node->viewed ? INT64_MAX : node->close_ns,
        node->coordinator ? tddp_launch_coordinator_due(node->coordinator) : INT64_MAX,
        node->part == TDDP_LAUNCH_ENTERING || !node->view.leader[0]
            ? tddp_deadline_after_ms(TURN_MS)
            : INT64_MAX,
    };
    int64_t at = INT64_MAX;
    for (size_t i = 0; i < sizeof moments / sizeof moments[0]; i++) {
        at = moments[i] < at ? moments[i] : at;
    }
    return at;
}

/* Waits for a change, a request, or something due. */
static tddp_status await_change(tddp_launch_node *node)
{
    int64_t at = next_turn(node);
    tddp_status status =
        node->link.backend->watch(&node->link, tddp_deadline_poll_ms(at), &node->view);
    if (node->coordinator && tddp_now_ns() > tddp_deadline_from(at, LATE_MS)) {
        tddp_launch_coordinator_forgive(node->coordinator, tddp_now_ns());
    }
    node->viewed |= status == TDDP_OK;
    return status == TDDP_TIMEOUT ? TDDP_OK : status;
}

/* Leads and follows, as what was read has it. */
static tddp_status act(tddp_launch_node *node)
{
    tddp_status status = tddp_launch_node_lead(node);
    if (status != TDDP_OK || node->over) {
        return status;
    }
    const char *why = "nobody leads the job there";
    if (node->view.leader[0]) {
        status = tddp_launch_node_follow(node);
        if (status != TDDP_PROTOCOL) {
            tddp_launch_node_begin_search(node);
            return status;
        }
        why = tddp_error_message(); /* the document is of another version, say */
    }
    tddp_launch_node_await_leader(node, why);
    return TDDP_OK;
}

static tddp_status take_turn(tddp_launch_node *node)
{
    int64_t answer_ns = tddp_deadline_from(node->heard_ns, node->link.times.read_ms);
    /* Where a connection was lost, another job may be there by now, to which the entry as it is
     * would say that this node is busy with a round of its. */
    bool may_put = node->followed || node->over || !node->started;
    tddp_status status = may_put ? put_entry(node) : TDDP_OK;
    if (status == TDDP_OK && !may_end(node)) {
        status = await_change(node);
        if (status == TDDP_OK && node->viewed) {
            status = act(node);
        } else if (status == TDDP_OK && tddp_now_ns() >= answer_ns) {
            status = tddp_fail(TDDP_TIMEOUT, "%s at %s: no answer", node->meets, node->where);
        }
    }
    return status;
}

void *tddp_launch_node_run(void *data)
{
    tddp_launch_node *node = data;
    const char *given = node->link.options->local_addr;
    tddp_status status = TDDP_OK;
    if (given[0] != '\0') { /* it may be a name */
        status = tddp_launch_address_of(given, false, node->link.cancel, node->entry.self.addr);
    }
    if (status != TDDP_OK) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s", tddp_error_message());
    }
    tddp_launch_node_begin_search(node);
    while (!may_end(node)) {
        status = node->contact == TDDP_LAUNCH_CONNECTED ? take_turn(node)
                                                        : tddp_launch_node_search(node);
        if (status == TDDP_CANCELED) {
            take_requests(node);
        } else if (status != TDDP_OK) {
            tddp_launch_node_step_down(node);
            tddp_launch_node_begin_search(node);
            node->contact = TDDP_LAUNCH_SEARCHING;
            (void)!tddp_net_sleep(tddp_deadline_after_ms(LOST_MS),
                                  tddp_cancel_fd(node->link.cancel));
        }
    }
    node->link.backend->close(&node->link);
    tddp_launch_node_step_down(node);
    tddp_store_server_stop(node->link.server);
    tddp_store_server_stop(node->workers);
    atomic_store(&node->thread_over, true);
    tddp_cancel_trigger(node->notified);
    return NULL;
}
