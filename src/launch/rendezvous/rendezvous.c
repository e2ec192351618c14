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
#include <time.h>
#include <unistd.h>

#include "base/host_name.h"
#include "launch/rendezvous/member.h"
#include "net/net.h"

enum { END_MS = 1000 };

/* --- durations and generations --------------------------------------------------------------- */

enum {
    LEAST_BEATS = 6, /* within the time after which a node is lost */
    MOST_BEAT_MS = 5000,
    LEAST_READ_MS = 500,
    MOST_READ_MS = 5000,
    RECONNECT_MS = 200,
    TAKEOVER_MS = 2000,
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t tddp_launch_new_generation(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

tddp_launch_times tddp_launch_times_of(const tddp_launch_options *options)
{
    const tddp_launch_conf *conf = &options->conf;
    int64_t silence_ms = (int64_t)tddp_launch_silence_s(options) * 1000;
    int64_t beat_ms = silence_ms > 0 ? least(silence_ms / LEAST_BEATS, MOST_BEAT_MS) : MOST_BEAT_MS;
    int64_t read_ms = silence_ms > 0 ? least(silence_ms / 4, MOST_READ_MS) : MOST_READ_MS;
    read_ms = read_ms > LEAST_READ_MS ? read_ms : LEAST_READ_MS;
    if (conf->keep_alive_interval > 0) {
        beat_ms = least(beat_ms, (int64_t)conf->keep_alive_interval * 1000);
    }
    return (tddp_launch_times){
        .beat_ms = beat_ms,
        .silence_ms = silence_ms,
        .read_ms = least(read_ms, (int64_t)conf->read_timeout * 1000),
        .join_ms = (int64_t)conf->join_timeout * 1000,
        .last_call_ms = (int64_t)conf->last_call_timeout * 1000,
        .close_ms = (int64_t)conf->close_timeout * 1000,
        .reconnect_ms = RECONNECT_MS,
        .takeover_ms = TAKEOVER_MS,
        .report_ms = (int64_t)conf->report_interval * 1000,
    };
}

struct tddp_launch_queued {
    STAILQ_ENTRY(tddp_launch_queued) next;
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
    node->over |= notification >= TDDP_LAUNCH_NOTIFICATION_DONE &&
                  notification != TDDP_LAUNCH_NOTIFICATION_STATUS;
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
    STAILQ_INSERT_TAIL(&node->queue, made, next);
    tddp_cancel_trigger(node->notified);
    pthread_mutex_unlock(&node->lock);
}

/* --- making one, on the agent's side --------------------------------------------------------- */

static tddp_status describe_node(tddp_launch_node *node)
{
    const tddp_launch_options *options = node->link.options;
    tddp_launch_entry *entry = &node->entry;
    tddp_launch_member *self = &entry->self;
    char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
    char nodes[TDDP_LAUNCH_NODES_BYTES];
    uint64_t random;
    for (int i = 0; i < options->endpoint_count; i++) {
        tddp_launch_endpoint_text(&options->endpoints[i], endpoint, sizeof endpoint);
        tddp_add_text(node->where, sizeof node->where, "%s%s", i ? "," : "", endpoint);
    }
    node->meets = node->link.backend->survives ? "etcd" : "the torchrun that hosts the rendezvous";
    /* "--nnodes=2:4 --max-restarts=3 --rdzv-conf=heartbeat_timeout=5", which measures silence. */
    tddp_launch_nodes_text(options, nodes);
    (void)snprintf(entry->job, sizeof entry->job,
                   "--nnodes=%s --max-restarts=%d --rdzv-conf=heartbeat_timeout=%d", nodes,
                   options->max_restarts, tddp_launch_silence_s(options));
    (void)snprintf(entry->leave_text, sizeof entry->leave_text, "torchrun has ended");
    (void)snprintf(self->role, sizeof self->role, "%s", options->role);
    (void)tddp_host_name(self->host);
    self->pid = getppid();
    self->node_rank = options->node_rank;
    if (getrandom(&random, sizeof random, 0) != sizeof random) {
        return tddp_fail_errno("getrandom");
    }
    (void)snprintf(self->id, sizeof self->id, "%016llx", (unsigned long long)random);
    memcpy(node->link.id, self->id, sizeof node->link.id);
    return TDDP_OK;
}

static void release(tddp_launch_node *node)
{
    struct tddp_launch_queued *queued;
    while ((queued = STAILQ_FIRST(&node->queue)) != NULL) {
        STAILQ_REMOVE_HEAD(&node->queue, next);
        free(queued);
    }
    tddp_launch_view_free(&node->view);
    tddp_bytes_free(&node->put);
    tddp_cancel_free(node->link.cancel);
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
        .queue = STAILQ_HEAD_INITIALIZER(made->queue),
        .link = {.backend =
                     options->backend == TDDP_LAUNCH_ETCD ? &tddp_launch_etcd : &tddp_launch_c10d,
                 .options = options,
                 .run_id = run_id,
                 .times = *times},
        .entry = TDDP_LAUNCH_ENTRY_INIT,
        .close_ns = INT64_MAX,
        .failure_ns = INT64_MAX,
    };
    made->entry.ready = 0;
    made->entry.self.local_size = local_size;
    (void)pthread_mutex_init(&made->lock, NULL);
    tddp_status status = describe_node(made);
    status = status == TDDP_OK ? tddp_cancel_create(&made->notified) : status;
    status = status == TDDP_OK ? tddp_cancel_create(&made->link.cancel) : status;
    if (status == TDDP_OK) {
        status = tddp_thread_start(&made->thread, "tddp-nodes", tddp_launch_node_run, made);
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
    struct tddp_launch_queued *taken = STAILQ_FIRST(&rendezvous->queue);
    if (taken) {
        STAILQ_REMOVE_HEAD(&rendezvous->queue, next);
    }
    pthread_mutex_unlock(&rendezvous->lock);
    if (!taken) {
        return TDDP_LAUNCH_NOTIFICATION_NONE;
    }
    tddp_launch_notification notification = taken->notification;
    *world = taken->world;
    (void)snprintf(text, TDDP_LAUNCH_NOTIFICATION_BYTES, "%s", taken->text);
    free(taken);
    return notification;
}

void tddp_launch_rendezvous_request(tddp_launch_rendezvous *rendezvous, tddp_launch_request request,
                                    const char *text)
{
    if (!rendezvous) {
        return;
    }
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->asked[request] = true;
    (void)snprintf(rendezvous->asked_texts[request], TDDP_LAUNCH_TEXT_BYTES, "%s", text);
    tddp_cancel_trigger(rendezvous->link.cancel);
    pthread_mutex_unlock(&rendezvous->lock);
}

bool tddp_launch_rendezvous_over(const tddp_launch_rendezvous *rendezvous)
{
    return atomic_load(&rendezvous->thread_over);
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
