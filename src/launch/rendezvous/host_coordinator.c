/*
 * The coordinator's thread: it takes events from the backend, has the coordinator decide, and
 * writes the messages. Invariants: a message is written whole and once, in order; the job's end is
 * over (tddp_launch_host_over()) only once its message was written.
 */
#include <stdlib.h>

#include "base/base.h"
#include "launch/rendezvous/host_parts.h"
#include "net/net.h"

enum {
    REST_MS = 50,     /* after a failure */
    AT_A_TIME = 1000, /* events, before messages are written and time is looked at */
};

typedef struct leadership {
    tddp_launch_host *host;
    tddp_launch_coordinator *coordinator;
    tddp_launch_event event;       /* the one that is being taken */
    tddp_launch_messages messages; /* decided, the first `written` of them written too */
    size_t written;
    int64_t count; /* of messages written */
    bool ended;    /* the last of them too */
    bool failing;  /* a failure was logged, and nothing has succeeded since */
} leadership;

static bool goes_on(tddp_launch_host *host)
{
    pthread_mutex_lock(&host->lock);
    bool goes_on = !host->stop && host->leads;
    pthread_mutex_unlock(&host->lock);
    return goes_on;
}

static tddp_status create_coordinator(leadership *r)
{
    const tddp_launch_options *options = r->host->opts.options;
    const tddp_launch_times *times = &r->host->opts.times;
    bool fixed = options->backend == TDDP_LAUNCH_STATIC;
    bool many = options->min_nodes < options->max_nodes;
    tddp_launch_coordinator_opts opts = {
        .min_nodes = options->min_nodes,
        .max_nodes = options->max_nodes,
        .max_restarts = options->max_restarts,
        .elastic = many && !fixed,
        .fixed = fixed,
        .hands_over = r->host->backend->survives,
        .run_id = r->host->opts.run_id,
        .where = r->host->where,
        .node_timeout_ns = tddp_launch_host_node_timeout_ms(r->host) * TDDP_NS_PER_MS,
        .join_timeout_ns = times->join_ms * TDDP_NS_PER_MS,
        .last_call_ns = times->last_call_ms * TDDP_NS_PER_MS,
        .settle_ns = times->settle_ms * TDDP_NS_PER_MS,
        .report_every_ns = times->report_ms * TDDP_NS_PER_MS,
        .goodbye_ns = times->close_ms * TDDP_NS_PER_MS,
    };
    return tddp_launch_coordinator_create(&opts, tddp_launch_host_now(r->host), &r->coordinator);
}

static tddp_status write_message(leadership *r, const tddp_launch_message *message)
{
    tddp_bytes text = {0};
    bool end = message->kind == TDDP_LAUNCH_MESSAGE_END;
    tddp_status status = tddp_launch_message_encode(message, &text);
    if (status == TDDP_OK) {
        status = r->host->backend->publish(r->host, r->count + 1,
                                           (tddp_slice){text.data, text.size}, end);
    }
    r->ended |= status == TDDP_OK && end;
    tddp_bytes_free(&text);
    return status;
}

static tddp_status write_messages(leadership *r)
{
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && r->written < r->messages.count && goes_on(r->host)) {
        status = write_message(r, &r->messages.messages[r->written]);
        if (status == TDDP_OK) {
            r->written++;
            r->count++;
        }
    }
    if (r->written == r->messages.count) {
        tddp_launch_messages_free(&r->messages);
        r->written = 0;
    }
    return status;
}

tddp_status tddp_launch_host_read_event(const tddp_blob *text, tddp_launch_event *event)
{
    tddp_status status = tddp_launch_event_decode(text->data, text->size, event);
    if (status == TDDP_PROTOCOL) {
        tddp_log(TDDP_LOG_WARN, "launch", "%s", tddp_error_message());
        return TDDP_OK;
    }
    return status;
}

/* Takes one event. TDDP_NOT_FOUND: there is none. */
static tddp_status take_event(leadership *r, bool block)
{
    r->event = (tddp_launch_event){.kind = TDDP_LAUNCH_EVENT_BEAT}; /* of slot 0: of no node */
    tddp_status status = r->host->backend->take(r->host, block, &r->event);
    return status == TDDP_OK
               ? tddp_launch_coordinator_take(r->coordinator, &r->event,
                                              tddp_launch_host_now(r->host), &r->messages)
               : status;
}

/* All events that are there; time only counts once they are taken. */
static tddp_status take_events(leadership *r)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; status == TDDP_OK && i < AT_A_TIME; i++) {
        status = take_event(r, i == 0);
    }
    if (status == TDDP_NOT_FOUND) {
        status = tddp_launch_coordinator_tick(r->coordinator, tddp_launch_host_now(r->host),
                                              &r->messages);
    }
    return status;
}

static void note_over(const leadership *r)
{
    if (r->ended && tddp_launch_coordinator_over(r->coordinator, tddp_launch_host_now(r->host))) {
        pthread_mutex_lock(&r->host->lock);
        r->host->over = true;
        pthread_mutex_unlock(&r->host->lock);
    }
}

/* Until the leadership ends, or something fails. */
static tddp_status lead(leadership *r)
{
    tddp_status status = r->host->backend->open(r->host);
    while (status == TDDP_OK && goes_on(r->host)) {
        r->failing = false;
        status = take_events(r);
        if (status == TDDP_OK) {
            status = write_messages(r);
        }
        note_over(r);
    }
    return status;
}

static void report_failure(leadership *r, tddp_status status)
{
    if (status == TDDP_OUT_OF_MEMORY) {
        tddp_log(TDDP_LOG_ERROR, "launch", "the rendezvous at %s ends: %s", r->host->where,
                 tddp_error_message());
    } else if (!r->failing) {
        tddp_log(TDDP_LOG_WARN, "launch", "the coordinator of %s tries again: %s", r->host->where,
                 tddp_error_message());
    }
    r->failing = true;
}

void *tddp_launch_host_coordinator(void *data)
{
    tddp_launch_host *host = data;
    leadership *r = tddp_alloc(sizeof *r);
    tddp_status status = TDDP_OUT_OF_MEMORY;
    tddp_log(TDDP_LOG_INFO, "launch", "the rendezvous at %s is coordinated here, generation %lld",
             host->where, (long long)host->term);
    if (r) {
        r->host = host;
        status = create_coordinator(r);
    }
    while (status != TDDP_OUT_OF_MEMORY && goes_on(host)) {
        status = lead(r);
        if (status != TDDP_OK && goes_on(host)) {
            report_failure(r, status);
            (void)!tddp_net_sleep(tddp_deadline_after_ms(REST_MS), tddp_cancel_fd(host->cancel));
        }
    }
    host->backend->close(host, r && r->ended);
    if (status == TDDP_OUT_OF_MEMORY) {
        tddp_launch_host_depose(host);
    }
    if (r) {
        tddp_launch_messages_free(&r->messages);
        tddp_launch_coordinator_free(r->coordinator);
    }
    free(r);
    return NULL;
}
