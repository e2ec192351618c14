/*
 * A node's way through the rounds of a job, at one leader after the other. The thread has one wait:
 * for the coordinator's next message, which an order of the agent or the next sign of life ends
 * early. Invariant: `stage` is WORKING exactly between the agent's JOINED and the notification that
 * the round is over, and no round is asked for before the agent has cleared away the last one. Who
 * leads is find.c's, what messages do is member_messages.c's, places are member_place.c's.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "launch/front/front.h"
#include "launch/rendezvous/backend.h"
#include "net/net.h"

enum {
    GRACE_MS = 500,       /* after the moment at which silence is loss */
    LAST_WORD_MS = 500,   /* for the coordinator to take note of a leave */
    GOODBYE_MS = 500,     /* for the host, once the others have had their time to read the store */
    GOODBYE_STEP_MS = 10, /* between two looks whether they have */
};

tddp_slice tddp_launch_slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

tddp_wait tddp_launch_answer_wait(const tddp_launch_node *node)
{
    return (tddp_wait){node->times.read_ms, NULL};
}

void tddp_launch_node_send_notification(tddp_launch_node *node,
                                        tddp_launch_notification notification, const char *text)
{
    tddp_launch_rendezvous_send_notification(node->mailbox, notification, NULL, text);
}

/* Nothing more can be done here: says why. */
void tddp_launch_node_give_up(tddp_launch_node *node, const char *text)
{
    tddp_launch_node_send_notification(node, TDDP_LAUNCH_NOTIFICATION_ERROR, text);
    node->over = true;
}

/* --- orders ---------------------------------------------------------------------------------- */

bool tddp_launch_node_take_orders(tddp_launch_node *node)
{
    tddp_launch_orders come = tddp_launch_rendezvous_orders(node->mailbox);
    tddp_launch_orders *orders = &node->orders;
    /* What is told is of the round that works; later rounds have not begun before `again`. */
    if (node->stage == TDDP_LAUNCH_WORKING) {
        orders->done |= come.done;
        if (come.failed) {
            orders->failed = true;
            memcpy(orders->failure, come.failure, sizeof orders->failure);
            int64_t limit_ms = node->times.silence_ms + GRACE_MS;
            node->report_failure_at =
                come.after_peer ? tddp_deadline_after_ms(limit_ms) : tddp_now_ns();
        }
    }
    if (come.leave) {
        orders->leave = true;
        memcpy(orders->leave_text, come.leave_text, sizeof orders->leave_text);
    }
    orders->quit |= come.quit;
    node->clear |= come.again;
    return !orders->leave && !orders->quit;
}

void tddp_launch_node_round_over(tddp_launch_node *node, tddp_launch_notification notification,
                                 const char *text)
{
    if (node->stage == TDDP_LAUNCH_WORKING) {
        tddp_launch_node_send_notification(node, notification, text);
    } else if (node->stage == TDDP_LAUNCH_ENTERING) {
        tddp_launch_node_send_notification(node, TDDP_LAUNCH_NOTIFICATION_STATUS, text);
    }
    node->stage = TDDP_LAUNCH_AWAITING;
    node->ready_told = false;
    node->orders.done = node->orders.failed = false;
    node->report_failure_at = INT64_MAX;
}

/* --- to the coordinator --------------------------------------------------------------------------
 */

tddp_status tddp_launch_node_push(tddp_launch_node *node, const tddp_launch_event *event)
{
    tddp_bytes text = {0};
    tddp_status status = tddp_launch_event_encode(event, &text);
    if (status == TDDP_OK) {
        status = node->backend->push(node, (tddp_slice){text.data, text.size});
    }
    tddp_bytes_free(&text);
    return status;
}

tddp_status tddp_launch_node_push_kind(tddp_launch_node *node, tddp_launch_event_kind kind,
                                       int round, const char *text)
{
    tddp_launch_event event = {.kind = kind, .slot = node->slot, .round = round};
    (void)snprintf(event.text, sizeof event.text, "%s", text);
    return tddp_launch_node_push(node, &event);
}

tddp_status tddp_launch_node_beat(tddp_launch_node *node)
{
    if (tddp_now_ns() < node->beat_at) {
        return TDDP_OK;
    }
    int64_t sent_ns = tddp_now_ns(); /* it counts from some moment after this, also over there */
    tddp_status status = node->backend->beat(node);
    node->beat_at = tddp_deadline_after_ms(node->times.beat_ms);
    node->heard_ns = status == TDDP_OK ? sent_ns : node->heard_ns;
    return status;
}

static tddp_status send_events(tddp_launch_node *node)
{
    tddp_launch_orders *orders = &node->orders;
    tddp_status status = TDDP_OK;
    if (orders->done) {
        status = tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_DONE, node->round, "");
        orders->done = status != TDDP_OK;
    }
    if (status == TDDP_OK && orders->failed && tddp_now_ns() >= node->report_failure_at) {
        status = tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_FAILED, node->round,
                                            orders->failure);
        orders->failed = status != TDDP_OK;
        node->report_failure_at = INT64_MAX;
    }
    if (status == TDDP_OK && node->stage == TDDP_LAUNCH_AWAITING && node->clear &&
        !node->ready_told && !orders->leave) {
        status = tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_READY, node->round + 1, "");
        node->ready_told = status == TDDP_OK;
    }
    return status == TDDP_OK ? tddp_launch_node_beat(node) : status;
}

static tddp_status take_message(tddp_launch_node *node, const tddp_blob *text)
{
    tddp_launch_message message;
    tddp_status status = tddp_launch_message_decode(text->data, text->size, &message);
    if (status != TDDP_OK) {
        tddp_launch_node_give_up(node, tddp_error_message());
        return TDDP_OK;
    }
    int number = node->next_message++;
    status = tddp_launch_node_take_message(node, &message);
    tddp_launch_message_free(&message);
    if (status != TDDP_OK) {
        node->next_message =
            number; /* its answer did not arrive: if the leader is back, once more */
    }
    return status;
}

/* Waits for the next message, an order, or something due. */
static tddp_status await_message(tddp_launch_node *node, int64_t until)
{
    tddp_wait wait = {tddp_deadline_poll_ms(until), node->cancel};
    tddp_blob text;
    tddp_status status = node->backend->await_message(node, node->next_message, &wait, &text);
    if (status == TDDP_OK) {
        status = take_message(node, &text);
        tddp_blob_free(&text);
        return status;
    }
    if (status == TDDP_CANCELED && !tddp_launch_node_take_orders(node)) {
        node->over = true;
    }
    return status == TDDP_CANCELED || status == TDDP_TIMEOUT ? TDDP_OK : status;
}

/* --- the whole way --------------------------------------------------------------------------- */

/* Takes part at the leader; returns when the node is done or the leader is lost. */
static tddp_status take_part(tddp_launch_node *node)
{
    tddp_status status = node->slot > 0 ? TDDP_OK : tddp_launch_node_join(node);
    while (status == TDDP_OK && !node->over) {
        status = send_events(node);
        if (status == TDDP_OK) {
            int64_t due =
                node->beat_at < node->report_failure_at ? node->beat_at : node->report_failure_at;
            status = await_message(node, due);
        }
    }
    return status;
}

/* --- the end --------------------------------------------------------------------------------- */

/* Says that this node goes; where it leads, gives the coordinator a moment to say what follows. */
static void send_leave(tddp_launch_node *node)
{
    const char *leave_text = node->orders.leave ? node->orders.leave_text : "torchrun has ended";
    bool heard = false;
    int64_t deadline = tddp_deadline_after_ms(LAST_WORD_MS);
    node->report_failure_at = tddp_now_ns(); /* a failure told before must not be lost */
    tddp_status status = send_events(node);
    if (status == TDDP_OK) {
        status = tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_LEAVE, 0, leave_text);
    }
    while (status == TDDP_OK && node->leader.own && !heard && tddp_now_ns() < deadline) {
        tddp_wait wait = {tddp_deadline_poll_ms(deadline), NULL};
        tddp_blob value;
        tddp_launch_message message;
        status = node->backend->await_message(node, node->next_message, &wait, &value);
        if (status == TDDP_OK) {
            status = tddp_launch_message_decode(value.data, value.size, &message);
            tddp_blob_free(&value);
        }
        if (status == TDDP_OK) {
            node->next_message++;
            heard =
                message.kind == TDDP_LAUNCH_MESSAGE_END || message.kind == TDDP_LAUNCH_MESSAGE_OVER;
            if (message.kind == TDDP_LAUNCH_MESSAGE_END) {
                node->ended = true;
                (void)!tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_BYE, 0, "");
            }
            tddp_launch_message_free(&message);
        }
    }
}

static void stop_host(tddp_launch_node *node)
{
    int64_t deadline = tddp_deadline_after_ms(node->times.close_ms + GOODBYE_MS);
    while (node->host && node->ended && !tddp_launch_host_over(node->host) &&
           tddp_now_ns() < deadline && !node->orders.quit) {
        if (tddp_net_sleep(tddp_deadline_after_ms(GOODBYE_STEP_MS), tddp_cancel_fd(node->cancel)) !=
            TDDP_OK) {
            (void)tddp_launch_node_take_orders(node);
        }
    }
    tddp_launch_host_stop(node->host);
    node->host = NULL;
}

void tddp_launch_node_run(tddp_launch_node *node)
{
    char *reason = NULL;
    if (node->backend->open(node) != TDDP_OK || tddp_launch_node_find_address(node) != TDDP_OK ||
        tddp_launch_host_if_chosen(node) != TDDP_OK) {
        tddp_launch_node_give_up(node, tddp_error_message());
    }
    while (!node->over && tddp_launch_node_seek(node, reason)) {
        if (take_part(node) != TDDP_OK) {
            free(reason);
            reason = tddp_copy_string(tddp_error_message());
            if (!reason) {
                tddp_launch_node_give_up(node, "out of memory");
            }
        }
    }
    free(reason);
    if (node->leader.connection && node->slot > 0 && !node->ended &&
        (node->orders.leave || node->orders.quit)) {
        send_leave(node);
    }
    stop_host(node);
    tddp_store_server_stop(node->workers);
    node->workers = NULL;
    tddp_launch_leader_forget(node, &node->leader);
    node->backend->close(node);
}

/* --- making one ------------------------------------------------------------------------------ */

static tddp_status describe_self(tddp_launch_node *node)
{
    tddp_launch_joiner *self = &node->self;
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random) {
        return tddp_fail_errno("getrandom");
    }
    (void)snprintf(self->id, sizeof self->id, "%016llx", (unsigned long long)random);
    if (gethostname(self->host, sizeof self->host - 1) != 0) {
        (void)snprintf(self->host, sizeof self->host, "?");
    }
    (void)snprintf(self->role, sizeof self->role, "%s", node->options->role);
    self->pid = tddp_launch_torchrun_pid();
    self->local_size = node->local_size;
    self->node_rank = node->options->node_rank;
    self->last_rank = self->round = -1;
    return TDDP_OK;
}

tddp_status tddp_launch_node_create(const tddp_launch_options *options,
                                    const tddp_launch_times *times, const char *run_id,
                                    int local_size, tddp_launch_rendezvous *mailbox,
                                    tddp_cancel *cancel, tddp_launch_node **out)
{
    tddp_launch_node *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    *made = (tddp_launch_node){
        .options = options,
        .times = *times,
        .run_id = run_id,
        .local_size = local_size,
        .mailbox = mailbox,
        .cancel = cancel,
        .backend =
            options->backend == TDDP_LAUNCH_ETCD ? &tddp_launch_etcd_node : &tddp_launch_c10d_node,
        .round = -1,
        .clear = true,
        .report_failure_at = INT64_MAX,
    };
    tddp_status status = describe_self(made);
    if (status != TDDP_OK) {
        free(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

void tddp_launch_node_free(tddp_launch_node *node)
{
    free(node);
}
