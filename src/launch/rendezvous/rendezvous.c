/*
 * What passes between the agent and the rendezvous thread, and the thread's life. The thread alone
 * uses the store, whose calls block; the agent's poll must not. Requests go one way (with a cancel
 * token that ends the thread's wait), notification the other (with a second token for the agent).
 * Invariant: `lock` guards requests, the queue of notifications and `over`; the token is triggered
 * and calmed under it, so no request is missed. What the thread does is member.c's.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/member.h"
#include "net/net.h"

enum { END_MS = 1000 };

typedef struct queued_notification {
    struct queued_notification *next;
    tddp_launch_notification notification;
    tddp_launch_world world;
    char text[];
} queued_notification;

struct tddp_launch_rendezvous {
    tddp_launch_node *node;
    pthread_t thread;
    pthread_mutex_t lock;
    tddp_cancel *cancel;
    tddp_cancel *notified; /* notifications are queued */
    tddp_launch_requests requests;
    queued_notification *first;
    queued_notification **last; /* where the next one is appended */
    bool over;
};

/* --- the thread's side ----------------------------------------------------------------------- */

void tddp_launch_rendezvous_send_notification(tddp_launch_rendezvous *rendezvous,
                                              tddp_launch_notification notification,
                                              const tddp_launch_world *world, const char *text)
{
    size_t length = strnlen(text, TDDP_LAUNCH_NOTIFICATION_BYTES - 1);
    queued_notification *made = tddp_alloc(sizeof *made + length + 1);
    if (!made) {
        /* What must be known comes again as the end of the thread; nothing else can be done. */
        tddp_log(TDDP_LOG_ERROR, "launch", "%s", tddp_error_message());
        return;
    }
    made->notification = notification;
    if (world) {
        made->world = *world;
    }
    memcpy(made->text, text, length);
    pthread_mutex_lock(&rendezvous->lock);
    *rendezvous->last = made;
    rendezvous->last = &made->next;
    tddp_cancel_trigger(rendezvous->notified);
    pthread_mutex_unlock(&rendezvous->lock);
}

tddp_launch_requests tddp_launch_rendezvous_requests(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    tddp_launch_requests requests = rendezvous->requests;
    rendezvous->requests = (tddp_launch_requests){.quit = requests.quit};
    tddp_cancel_reset(rendezvous->cancel);
    pthread_mutex_unlock(&rendezvous->lock);
    return requests;
}

static void *body(void *data)
{
    tddp_launch_rendezvous *rendezvous = data;
    tddp_launch_node_run(rendezvous->node);
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->over = true;
    tddp_cancel_trigger(rendezvous->notified);
    pthread_mutex_unlock(&rendezvous->lock);
    return NULL;
}

/* --- the agent's side ------------------------------------------------------------------------ */

static void release(tddp_launch_rendezvous *rendezvous)
{
    tddp_launch_node_free(rendezvous->node);
    for (queued_notification *each = rendezvous->first; each;) {
        queued_notification *next = each->next;
        free(each);
        each = next;
    }
    tddp_cancel_free(rendezvous->cancel);
    tddp_cancel_free(rendezvous->notified);
    (void)pthread_mutex_destroy(&rendezvous->lock);
    free(rendezvous);
}

tddp_status tddp_launch_rendezvous_start(const tddp_launch_options *options,
                                         const tddp_launch_times *times, const char *run_id,
                                         int local_size, tddp_launch_rendezvous **out)
{
    tddp_launch_rendezvous *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    made->last = &made->first;
    (void)pthread_mutex_init(&made->lock, NULL);
    tddp_status status = tddp_cancel_create(&made->notified);
    if (status == TDDP_OK) {
        status = tddp_cancel_create(&made->cancel);
    }
    if (status == TDDP_OK) {
        status = tddp_launch_node_create(options, times, run_id, local_size, made, made->cancel,
                                         &made->node);
    }
    if (status == TDDP_OK) {
        status = tddp_thread_start(&made->thread, "tddp-nodes", body, made);
    }
    if (status != TDDP_OK) {
        release(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

int tddp_launch_rendezvous_fd(const tddp_launch_rendezvous *rendezvous)
{
    return tddp_cancel_fd(rendezvous->notified);
}

tddp_launch_notification tddp_launch_rendezvous_next(tddp_launch_rendezvous *rendezvous,
                                                     tddp_launch_world *world,
                                                     char text[TDDP_LAUNCH_NOTIFICATION_BYTES])
{
    pthread_mutex_lock(&rendezvous->lock);
    tddp_cancel_reset(rendezvous->notified);
    queued_notification *taken = rendezvous->first;
    if (taken) {
        rendezvous->first = taken->next;
        if (!taken->next) {
            rendezvous->last = &rendezvous->first;
        }
    }
    pthread_mutex_unlock(&rendezvous->lock);
    if (!taken) {
        return TDDP_LAUNCH_NOTIFICATION_NONE;
    }
    tddp_launch_notification notification = taken->notification;
    if (notification == TDDP_LAUNCH_NOTIFICATION_JOINED) {
        *world = taken->world;
    }
    (void)snprintf(text, TDDP_LAUNCH_NOTIFICATION_BYTES, "%s", taken->text);
    free(taken);
    return notification;
}

void tddp_launch_rendezvous_report(tddp_launch_rendezvous *rendezvous, tddp_launch_node_state state,
                                   const char *text)
{
    pthread_mutex_lock(&rendezvous->lock);
    tddp_launch_requests *requests = &rendezvous->requests;
    switch (state) {
    case TDDP_LAUNCH_NODE_DONE:
        requests->done = true;
        break;
    case TDDP_LAUNCH_NODE_FAILED:
    case TDDP_LAUNCH_NODE_FAILED_AFTER_PEER:
        requests->failed = true;
        requests->after_peer = state == TDDP_LAUNCH_NODE_FAILED_AFTER_PEER;
        (void)snprintf(requests->failure, sizeof requests->failure, "%s", text);
        break;
    case TDDP_LAUNCH_NODE_LEAVE:
        requests->leave = true;
        (void)snprintf(requests->leave_text, sizeof requests->leave_text, "%s", text);
        break;
    }
    tddp_cancel_trigger(rendezvous->cancel);
    pthread_mutex_unlock(&rendezvous->lock);
}

void tddp_launch_rendezvous_again(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->requests.again = true;
    tddp_cancel_trigger(rendezvous->cancel);
    pthread_mutex_unlock(&rendezvous->lock);
}

bool tddp_launch_rendezvous_over(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    bool over = rendezvous->over;
    pthread_mutex_unlock(&rendezvous->lock);
    return over;
}

/* Gives the thread a moment to end; false if it has not. */
static bool await_over(tddp_launch_rendezvous *rendezvous)
{
    int64_t deadline = tddp_deadline_after_ms(END_MS);
    while (!tddp_launch_rendezvous_over(rendezvous)) {
        if (tddp_net_poll(tddp_cancel_fd(rendezvous->notified), POLLIN, deadline, -1) != TDDP_OK) {
            return false;
        }
        tddp_cancel_reset(rendezvous->notified);
    }
    return true;
}

void tddp_launch_rendezvous_end(tddp_launch_rendezvous *rendezvous)
{
    if (!rendezvous) {
        return;
    }
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->requests.quit = true;
    tddp_cancel_trigger(rendezvous->cancel);
    pthread_mutex_unlock(&rendezvous->lock);
    if (!await_over(rendezvous)) {
        return; /* it waits for a host that does not answer: the process's end takes it along */
    }
    (void)pthread_join(rendezvous->thread, NULL);
    release(rendezvous);
}
