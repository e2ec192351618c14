/*
 * What passes between the agent and the rendezvous thread, and the thread's life. The thread alone
 * uses the store, whose calls block; the agent's poll must not. Requests go one way, notifications
 * the other. What the thread does is member.c's.
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/host_name.h"
#include "launch/rendezvous/member.h"
#include "net/net.h"

enum { END_MS = 1000 };

struct tddp_launch_queued {
    struct tddp_launch_queued *next;
    tddp_launch_notification notification;
    tddp_launch_world world;
    char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
};

/* --- the thread's side ----------------------------------------------------------------------- */

void tddp_launch_node_notify(tddp_launch_node *node, tddp_launch_notification notification,
                             const char *format, ...)
{
    va_list arguments;
    struct tddp_launch_queued *made = tddp_alloc(sizeof *made);
    node->over |= notification == TDDP_LAUNCH_NOTIFICATION_DONE ||
                  notification == TDDP_LAUNCH_NOTIFICATION_ENDED ||
                  notification == TDDP_LAUNCH_NOTIFICATION_STOPPED ||
                  notification == TDDP_LAUNCH_NOTIFICATION_ERROR;
    if (!made) {
        /* What must be known comes again as the end of the thread; nothing else can be done. */
        tddp_log(TDDP_LOG_ERROR, "launch", "%s", tddp_error_message());
        return;
    }
    made->notification = notification;
    made->world = node->world;
    va_start(arguments, format);
    (void)vsnprintf(made->text, sizeof made->text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&node->lock);
    *node->last_link = made;
    node->last_link = &made->next;
    tddp_cancel_trigger(node->notified);
    pthread_mutex_unlock(&node->lock);
}

static void *body(void *data)
{
    tddp_launch_node *node = data;
    tddp_launch_node_run(node);
    pthread_mutex_lock(&node->lock);
    node->thread_over = true;
    tddp_cancel_trigger(node->notified);
    pthread_mutex_unlock(&node->lock);
    return NULL;
}

/* --- making one, on the agent's side --------------------------------------------------------- */

/* Its settings: "--nnodes=2:4 --max-restarts=3 --rdzv-conf=heartbeat_timeout=5", of which the last
 * measures silence. */
static void describe_job(const tddp_launch_options *options, char text[TDDP_LAUNCH_JOB_BYTES])
{
    char nodes[TDDP_LAUNCH_NODES_BYTES];
    tddp_launch_nodes_text(options, nodes);
    (void)snprintf(text, TDDP_LAUNCH_JOB_BYTES,
                   "--nnodes=%s --max-restarts=%d --rdzv-conf=heartbeat_timeout=%d", nodes,
                   options->max_restarts, tddp_launch_silence_s(options));
}

static tddp_status describe_self(tddp_launch_node *node)
{
    tddp_launch_member *self = &node->entry.self;
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random) {
        return tddp_fail_errno("getrandom");
    }
    (void)snprintf(self->id, sizeof self->id, "%016llx", (unsigned long long)random);
    (void)tddp_host_name(self->host);
    (void)snprintf(self->role, sizeof self->role, "%s", node->options->role);
    self->pid = getppid();
    self->local_size = node->local_size;
    self->node_rank = node->options->node_rank;
    memcpy(node->link.id, self->id, sizeof node->link.id);
    return TDDP_OK;
}

static void release(tddp_launch_node *node)
{
    while (node->first) {
        struct tddp_launch_queued *next = node->first->next;
        free(node->first);
        node->first = next;
    }
    tddp_launch_view_free(&node->view);
    tddp_cancel_free(node->cancel);
    tddp_cancel_free(node->notified);
    (void)pthread_mutex_destroy(&node->lock);
    free(node);
}

tddp_status tddp_launch_rendezvous_start(const tddp_launch_options *options,
                                         const tddp_launch_times *times, const char *run_id,
                                         int local_size, tddp_launch_rendezvous **out)
{
    tddp_launch_node *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    *made = (tddp_launch_node){
        .last_link = &made->first,
        .options = options,
        .times = *times,
        .run_id = run_id,
        .local_size = local_size,
        .link = {.backend =
                     options->backend == TDDP_LAUNCH_ETCD ? &tddp_launch_etcd : &tddp_launch_c10d,
                 .options = options,
                 .run_id = run_id,
                 .times = *times},
        .entry = TDDP_LAUNCH_ENTRY_INIT,
        .clear = true,
        .report_failure_at = INT64_MAX,
    };
    (void)pthread_mutex_init(&made->lock, NULL);
    tddp_launch_endpoint_text(&options->endpoints[0], made->where, sizeof made->where);
    (void)snprintf(made->meets, sizeof made->meets, "%s %s",
                   made->link.backend->survives ? "etcd at"
                                                : "the torchrun that hosts the rendezvous at",
                   made->where);
    describe_job(options, made->entry.job);
    tddp_status status = describe_self(made);
    status = status == TDDP_OK ? tddp_cancel_create(&made->notified) : status;
    status = status == TDDP_OK ? tddp_cancel_create(&made->cancel) : status;
    made->link.cancel = made->cancel;
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

/* --- the agent's side ------------------------------------------------------------------------ */

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
    struct tddp_launch_queued *taken = rendezvous->first;
    if (taken) {
        rendezvous->first = taken->next;
        if (!taken->next) {
            rendezvous->last_link = &rendezvous->first;
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

void tddp_launch_rendezvous_request(tddp_launch_rendezvous *rendezvous, tddp_launch_request request,
                                    const char *text)
{
    tddp_launch_requests *asked = &rendezvous->asked;
    pthread_mutex_lock(&rendezvous->lock);
    asked->flags[request] = true;
    if (request == TDDP_LAUNCH_REQUEST_LEAVE) {
        (void)snprintf(asked->leave_text, sizeof asked->leave_text, "%s", text);
    } else if (request == TDDP_LAUNCH_REQUEST_FAILED ||
               request == TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER) {
        (void)snprintf(asked->failure, sizeof asked->failure, "%s", text);
    }
    tddp_cancel_trigger(rendezvous->cancel);
    pthread_mutex_unlock(&rendezvous->lock);
}

bool tddp_launch_rendezvous_over(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    bool over = rendezvous->thread_over;
    pthread_mutex_unlock(&rendezvous->lock);
    return over;
}

void tddp_launch_rendezvous_end(tddp_launch_rendezvous *rendezvous)
{
    int64_t deadline = tddp_deadline_after_ms(END_MS);
    if (!rendezvous) {
        return;
    }
    tddp_launch_rendezvous_request(rendezvous, TDDP_LAUNCH_REQUEST_QUIT, "");
    while (!tddp_launch_rendezvous_over(rendezvous)) {
        if (tddp_net_poll(tddp_cancel_fd(rendezvous->notified), POLLIN, deadline, -1) != TDDP_OK) {
            return; /* it waits for a host that does not answer: the process's end takes it along */
        }
        tddp_cancel_reset(rendezvous->notified);
    }
    (void)pthread_join(rendezvous->thread, NULL);
    release(rendezvous);
}
