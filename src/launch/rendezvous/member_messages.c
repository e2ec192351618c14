/*
 * What a message of the coordinator does to a node (text.h has the messages). Runs on the
 * rendezvous thread, within member.c's one wait; nothing here waits but the look whether the
 * workers' store is within reach, which goes on giving signs of life.
 */
#include <stdio.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    REACH_MS = 5 * 1000, /* for the workers' store, if it does not answer */
    HEAL_MS = 3 * 1000, /* and if there is no way to it: a network that is just back has none yet */
    PAUSE_MS = 200,
};

/* Whether another try may go better; after a pause, which the token ends. */
static bool goes_on(const tddp_launch_node *node, tddp_status reached, int64_t began)
{
    if (reached == TDDP_NETWORK && tddp_now_ns() < tddp_deadline_from(began, HEAL_MS)) {
        tddp_status slept =
            tddp_net_sleep(tddp_deadline_after_ms(PAUSE_MS), tddp_cancel_fd(node->cancel));
        (void)slept; /* the next try tells of the token */
        return true;
    }
    return reached == TDDP_CANCELED ||
           (reached == TDDP_TIMEOUT && tddp_now_ns() < tddp_deadline_from(began, REACH_MS));
}

/* A message whose answer was lost on the way is taken again: then the workers' store is there. */
static tddp_status enter_round(tddp_launch_node *node, const tddp_launch_message *message)
{
    bool again = node->stage == TDDP_LAUNCH_ENTERING && message->round == node->round;
    if (!again) {
        tddp_store_server_stop(node->workers);
        node->workers = NULL;
    }
    if (!tddp_launch_place_take(node, message)) {
        return TDDP_OK;
    }
    node->stage = TDDP_LAUNCH_ENTERING;
    if (node->world.node_rank > 0 || tddp_launch_place_open_store(node, message) == TDDP_OK) {
        return TDDP_OK;
    }
    /* If it is the leader that does not answer, this does not get there either. */
    return tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_FAILED, node->round,
                                      tddp_error_message());
}

/* Tries until the store is reached or the time is up, with signs of life between. */
static tddp_status reach_master(tddp_launch_node *node)
{
    const tddp_launch_world *world = &node->world;
    const int64_t began = tddp_now_ns();
    tddp_status reached;
    do {
        reached =
            tddp_launch_address_check(world->master_addr, world->master_port, node->master_host,
                                      node->self.addr, node->times.beat_ms, node->cancel);
        if (reached == TDDP_CANCELED && !tddp_launch_node_take_orders(node)) {
            node->over = true;
            return TDDP_OK;
        }
        if (reached != TDDP_OK) {
            tddp_status status = tddp_launch_node_beat(node);
            if (status != TDDP_OK) {
                return status;
            }
        }
    } while (goes_on(node, reached, began));
    if (reached != TDDP_OK) {
        return tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_FAILED, node->round,
                                          tddp_error_message());
    }
    node->stage = TDDP_LAUNCH_WORKING;
    return TDDP_OK;
}

static tddp_status take_master(tddp_launch_node *node, const tddp_launch_message *message)
{
    if (node->stage != TDDP_LAUNCH_ENTERING || message->round != node->round) {
        return TDDP_OK;
    }
    (void)snprintf(node->world.master_addr, sizeof node->world.master_addr, "%s", message->addr);
    node->world.master_port = message->port;
    tddp_status status = TDDP_OK;
    if (node->world.node_rank == 0) {
        node->stage = TDDP_LAUNCH_WORKING;
    } else {
        status = reach_master(node);
    }
    if (node->stage == TDDP_LAUNCH_WORKING) {
        node->clear = false;
        tddp_launch_rendezvous_send_notification(node->mailbox, TDDP_LAUNCH_NOTIFICATION_JOINED,
                                                 &node->world, "");
    }
    return status;
}

void tddp_launch_node_take_end(tddp_launch_node *node, const tddp_launch_message *message)
{
    static const tddp_launch_notification notification[] = {
        [TDDP_LAUNCH_HOW_DONE] = TDDP_LAUNCH_NOTIFICATION_DONE,
        [TDDP_LAUNCH_HOW_FAILED] = TDDP_LAUNCH_NOTIFICATION_ENDED,
        [TDDP_LAUNCH_HOW_STOPPED] = TDDP_LAUNCH_NOTIFICATION_STOPPED,
        [TDDP_LAUNCH_HOW_CHANGED] = TDDP_LAUNCH_NOTIFICATION_ENDED,
    };
    tddp_launch_node_send_notification(node, notification[message->how], message->text);
    node->over = node->ended = true;
    if (node->leader.connection) {
        /* A goodbye that is lost costs the leader a moment. */
        (void)!tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_BYE, 0, "");
    }
}

tddp_status tddp_launch_node_take_message(tddp_launch_node *node,
                                          const tddp_launch_message *message)
{
    bool mine = message->slot == node->slot;
    switch (message->kind) {
    case TDDP_LAUNCH_MESSAGE_ROUND:
        return enter_round(node, message);
    case TDDP_LAUNCH_MESSAGE_MASTER:
        return take_master(node, message);
    case TDDP_LAUNCH_MESSAGE_OVER:
        if (node->stage != TDDP_LAUNCH_AWAITING && message->round == node->round) {
            tddp_launch_node_round_over(node,
                                        message->how == TDDP_LAUNCH_HOW_CHANGED
                                            ? TDDP_LAUNCH_NOTIFICATION_CHANGED
                                            : TDDP_LAUNCH_NOTIFICATION_FAILED,
                                        message->text);
        }
        return TDDP_OK;
    case TDDP_LAUNCH_MESSAGE_END:
        tddp_launch_node_take_end(node, message);
        return TDDP_OK;
    case TDDP_LAUNCH_MESSAGE_REFUSE:
        if (mine) {
            node->slot = 0; /* nobody waits for a goodbye */
            tddp_launch_node_give_up(node, message->text);
        }
        return TDDP_OK;
    case TDDP_LAUNCH_MESSAGE_SPARE:
        if (mine) {
            tddp_launch_node_send_notification(node, TDDP_LAUNCH_NOTIFICATION_STATUS,
                                               message->text);
        }
        return TDDP_OK;
    case TDDP_LAUNCH_MESSAGE_REJOIN:
        if (mine) {
            tddp_launch_node_round_over(node, TDDP_LAUNCH_NOTIFICATION_CHANGED, message->text);
            return tddp_launch_node_join(node);
        }
        return TDDP_OK;
    case TDDP_LAUNCH_MESSAGE_STATUS:
        tddp_launch_node_send_notification(node, TDDP_LAUNCH_NOTIFICATION_STATUS, message->text);
        return TDDP_OK;
    }
    return TDDP_OK;
}
