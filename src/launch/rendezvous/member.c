/*
 * A node's way through the rounds of a job. The thread has one wait: for a change of what is kept
 * where the nodes meet, which a request of the agent, the next sign of life or the coordinator's
 * next deadline ends early. Then it leads, if that is its part, and does what the document says.
 * Invariant: `part` is WORKING exactly between the agent's JOINED and the notification that the
 * round is over, and the entry is ready for no round before the agent has cleared away the last.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    AFTER_PEER_MS = 1500, /* for who knows more of a failure than a rank that lost its peer: that
                             its node is gone; beyond the moment at which silence is loss */
    LATE_MS = 200,        /* a thread that is later than that was held up */
    TURN_MS = 100,        /* while the workers' store is not reached */
    CLOSE_MS = 500,       /* for the host, once the others have had their time to read the end */
};

/* --- requests ----------------------------------------------------------------------------------
 */

bool tddp_launch_node_take_requests(tddp_launch_node *node)
{
    tddp_launch_requests *asked = &node->asked;
    tddp_launch_entry *entry = &node->entry;
    pthread_mutex_lock(&node->lock);
    /* What is told is of the round that works; later rounds have not begun before AGAIN. */
    bool working = node->part == TDDP_LAUNCH_WORKING;
    bool after_peer = asked->flags[TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER];
    if (working && asked->flags[TDDP_LAUNCH_REQUEST_DONE]) {
        entry->done = entry->round;
        node->entry_changed = true;
    }
    if (working && (after_peer || asked->flags[TDDP_LAUNCH_REQUEST_FAILED])) {
        memcpy(entry->text, asked->failure, sizeof entry->text);
        node->report_failure_at =
            tddp_deadline_after_ms(after_peer ? node->times.silence_ms + AFTER_PEER_MS : 0);
    }
    if (asked->flags[TDDP_LAUNCH_REQUEST_LEAVE]) {
        node->leave = true;
        memcpy(entry->leave_text, asked->leave_text, sizeof entry->leave_text);
    }
    node->quit |= asked->flags[TDDP_LAUNCH_REQUEST_QUIT];
    node->clear |= asked->flags[TDDP_LAUNCH_REQUEST_AGAIN];
    *asked = (tddp_launch_requests){.failure = ""};
    tddp_cancel_reset(node->cancel);
    pthread_mutex_unlock(&node->lock);
    return !node->leave && !node->quit;
}

/* --- what this node says --------------------------------------------------------------------- */

static void update_entry(tddp_launch_node *node)
{
    tddp_launch_entry *entry = &node->entry;
    if (tddp_now_ns() >= node->report_failure_at) {
        entry->failed = entry->round;
        node->report_failure_at = INT64_MAX;
        node->entry_changed = true;
    }
    if (node->part == TDDP_LAUNCH_AWAITING && node->clear && entry->ready != entry->round + 1) {
        entry->ready = entry->round + 1;
        node->entry_changed = true;
    }
    if (entry->self.hosting != (node->host != NULL)) {
        entry->self.hosting = node->host != NULL;
        node->entry_changed = true;
    }
}

/* Puts the entry if it has changed, or a sign of life is due. */
static tddp_status put_entry(tddp_launch_node *node)
{
    tddp_bytes text = {0};
    if (!node->entry_changed && tddp_now_ns() < node->beat_at) {
        return TDDP_OK;
    }
    int64_t sent_ns = tddp_now_ns(); /* it counts from some moment after this, also over there */
    tddp_status status = tddp_launch_entry_write(&node->entry, &text);
    if (status == TDDP_OK) {
        tddp_slice value = {text.data, text.size};
        status = node->entry.leaves
                     ? node->link.backend->leave_entry(&node->link, value)
                     : node->link.backend->put_entry(&node->link, value, !node->entry_changed);
    }
    if (status == TDDP_OK && node->leads) {
        status = node->link.backend->lead(&node->link);
        status = status == TDDP_NOT_FOUND ? TDDP_OK : status; /* the next view tells */
    }
    if (status == TDDP_CANCELED) { /* a request for a node whose host does not answer */
        node->over = !tddp_launch_node_take_requests(node);
        status = node->over ? TDDP_OK : tddp_fail(TDDP_NETWORK, "interrupted");
    }
    tddp_bytes_free(&text);
    node->beat_at = tddp_deadline_after_ms(node->times.beat_ms);
    if (status == TDDP_OK) {
        node->heard_ns = sent_ns;
        node->entry_changed = false;
    }
    return status;
}

/* --- the whole way --------------------------------------------------------------------------- */

static tddp_status follow_document(tddp_launch_node *node)
{
    tddp_launch_state doc;
    if (!node->view.state.data) {
        return TDDP_OK;
    }
    tddp_status status = tddp_launch_state_read(node->view.state.data, node->view.state.size, &doc);
    if (status == TDDP_OK) {
        status = tddp_launch_node_follow(node, &doc);
        tddp_launch_state_free(&doc);
    }
    return status;
}

static int64_t next_turn(const tddp_launch_node *node)
{
    int64_t at = tddp_launch_node_lead_due(node);
    at = node->beat_at < at ? node->beat_at : at;
    at = node->report_failure_at < at ? node->report_failure_at : at;
    if (node->part == TDDP_LAUNCH_ENTERING || !node->view.leader[0]) {
        int64_t turn = tddp_deadline_after_ms(TURN_MS);
        at = turn < at ? turn : at;
    }
    return at;
}

/* Leads and follows until what has changed is settled. */
static tddp_status act(tddp_launch_node *node)
{
    tddp_status status = tddp_launch_node_lead(node);
    if (status == TDDP_OK && node->view.leader[0]) {
        status = follow_document(node);
        node->report_at = tddp_deadline_after_ms(node->times.report_ms);
    } else if (status == TDDP_OK) {
        tddp_launch_node_await_leader(node);
    }
    return status;
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
    if (status == TDDP_CANCELED && !tddp_launch_node_take_requests(node)) {
        node->over = true;
    }
    return status == TDDP_CANCELED || status == TDDP_TIMEOUT ? TDDP_OK : status;
}

/* Takes part until the node is done or the connection is lost. */
static tddp_status take_part(tddp_launch_node *node)
{
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && !node->over) {
        update_entry(node);
        status = put_entry(node);
        if (status == TDDP_OK && node->viewed && !node->over) {
            status = act(node);
            update_entry(node);
        }
        if (status == TDDP_OK && !node->over && !node->entry_changed) {
            status = await_change(node);
        }
        if (status == TDDP_OK && !node->over && node->part == TDDP_LAUNCH_ENTERING) {
            tddp_launch_node_reach_master(node);
        }
    }
    return status;
}

/* --- the end --------------------------------------------------------------------------------- */

/* Says that this node goes, with what it has not said yet. */
static tddp_status announce_leave(tddp_launch_node *node)
{
    if (node->report_failure_at != INT64_MAX) {
        node->report_failure_at = tddp_now_ns();
    }
    update_entry(node);
    node->entry_changed = true;
    node->entry.ended = node->ended;
    if (!node->ended) {
        node->entry.leaves = true;
        if (!node->entry.leave_text[0]) {
            (void)snprintf(node->entry.leave_text, sizeof node->entry.leave_text,
                           "torchrun has ended");
        }
    }
    return put_entry(node);
}

/* The leader decides on what it has said as a node, and where the store or the decisions end with
 * it, gives the others time to read the job's end. */
static void linger(tddp_launch_node *node)
{
    int64_t deadline = tddp_deadline_after_ms(CLOSE_MS);
    tddp_status status = TDDP_OK;
    bool ended = false;
    do {
        int64_t due = tddp_launch_node_lead_due(node);
        status = node->link.backend->watch(
            &node->link, tddp_deadline_poll_ms(due < deadline ? due : deadline), &node->view);
        if (status == TDDP_CANCELED) {
            (void)tddp_launch_node_take_requests(node);
        }
        status = status == TDDP_CANCELED || status == TDDP_TIMEOUT ? TDDP_OK : status;
        status = status == TDDP_OK ? tddp_launch_node_lead(node) : status;
        const tddp_launch_coordinator *decides = node->coordinator;
        if (!ended && decides &&
            tddp_launch_coordinator_state(decides)->stage == TDDP_LAUNCH_STAGE_ENDED) {
            ended = true;
            deadline = tddp_deadline_after_ms(node->times.close_ms + CLOSE_MS);
        }
        ended &= decides && !node->link.backend->survives &&
                 !tddp_launch_coordinator_over(decides, tddp_now_ns());
    } while (status == TDDP_OK && ended && !node->quit && tddp_now_ns() < deadline);
}

static void take_leave(tddp_launch_node *node)
{
    if (!node->viewed || node->refused) {
        return;
    }
    tddp_status status = announce_leave(node);
    if (status == TDDP_OK && node->leads) {
        linger(node);
    }
    if (node->leads) {
        (void)!node->link.backend->resign(&node->link); /* else it ends with the connection */
    }
}

void tddp_launch_node_run(tddp_launch_node *node)
{
    const char *given = node->options->local_addr;
    tddp_status status = node->link.backend->open(&node->link);
    if (status == TDDP_OK && given[0] != '\0') { /* it may be a name */
        status = tddp_launch_address_of(given, node->cancel, node->entry.self.addr);
    }
    status = status == TDDP_OK ? tddp_launch_node_host(node, true) : status;
    if (status != TDDP_OK) {
        tddp_launch_node_notify(node, TDDP_LAUNCH_NOTIFICATION_ERROR, "%s", tddp_error_message());
    }
    while (!node->over && tddp_launch_node_connect(node)) {
        if (take_part(node) == TDDP_OK) {
            take_leave(node);
        }
        tddp_launch_node_step_down(node);
    }
    node->link.backend->close(&node->link);
    tddp_store_server_stop(node->host);
    tddp_store_server_stop(node->workers);
    node->host = node->workers = NULL;
}
