/*
 * The coordinator's thread: while this host leads it takes events out of the store, has the
 * coordinator decide, and writes the messages. The store is this process's own, so every step is
 * short. Invariants: a message is written whole and once, in order, and none after the host has
 * ceased to lead; `open` is there only while events are taken.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/host_parts.h"
#include "launch/rendezvous/voter.h"
#include "net/net.h"

enum {
    LOOK_MS = 50,     /* for whether this host leads */
    SLICE_MS = 100,   /* for an event, before time is looked at */
    ANSWER_MS = 2000, /* of the own store */
    AT_A_TIME = 1000, /* events, before messages are written and time is looked at */
};

/* One time of leading. */
typedef struct tddp_launch_leadership {
    tddp_launch_host *host;
    int term;
    tddp_store *store; /* below torchrun/RUN_ID/TERM */
    tddp_launch_coordinator *coordinator;
    tddp_launch_messages messages; /* said, the first `written` of them written too */
    size_t written;
    int64_t count; /* of messages in the store */
    bool open;
    bool ended; /* its message was passed on */
} leadership;

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static bool is_told_to_stop(tddp_launch_host *host)
{
    pthread_mutex_lock(&host->lock);
    bool stop = host->stop_coordinator;
    pthread_mutex_unlock(&host->lock);
    return stop;
}

static bool goes_on(const leadership *r)
{
    int term;
    return !is_told_to_stop(r->host) && tddp_launch_host_leads(r->host, &term) && term == r->term;
}

static tddp_status create_coordinator(leadership *r)
{
    const tddp_launch_options *options = r->host->opts.options;
    const tddp_launch_times *times = &r->host->opts.times;
    bool fixed = options->backend == TDDP_LAUNCH_STATIC;
    bool many = options->min_nodes < options->max_nodes;
    int endpoints = r->host->opts.endpoint_count;
    tddp_launch_coordinator_opts opts = {
        .min_nodes = options->min_nodes,
        .max_nodes = options->max_nodes,
        .max_restarts = options->max_restarts,
        .elastic = many && !fixed,
        .fixed = fixed,
        .hands_over = endpoints > 2,
        .run_id = r->host->opts.run_id,
        .where = r->host->where,
        .node_timeout_ns = (times->silence_ms - times->margin_ms) * TDDP_NS_PER_MS,
        .join_timeout_ns = times->join_ms * TDDP_NS_PER_MS,
        .last_call_ns = times->last_call_ms * TDDP_NS_PER_MS,
        .settle_ns = times->settle_ms * TDDP_NS_PER_MS,
        .tell_every_ns = times->report_ms * TDDP_NS_PER_MS,
        .goodbye_ns = times->close_ms * TDDP_NS_PER_MS,
    };
    return tddp_launch_coordinator_create(&opts, tddp_launch_host_now(r->host), &r->coordinator);
}

static tddp_status set(const leadership *r, const char *key, tddp_slice value)
{
    tddp_wait wait = {ANSWER_MS, NULL};
    return tddp_store_set(r->store, slice(key), value, &wait);
}

/* With one endpoint nobody votes, but a lease is what nodes look for. */
static tddp_status set_only_lease(const leadership *r, tddp_store *plain)
{
    tddp_wait wait = {ANSWER_MS, NULL};
    char lease[TDDP_LAUNCH_LEASE_BYTES];
    (void)snprintf(lease, sizeof lease, "0 %d 0", r->term);
    return r->host->opts.endpoint_count > 1
               ? TDDP_OK
               : tddp_store_set(plain, slice("lease"), slice(lease), &wait);
}

static tddp_status connect_store(leadership *r)
{
    const tddp_launch_host *host = r->host;
    char term[16];
    tddp_store *plain = NULL;
    char *prefix = tddp_format("torchrun/%s", host->opts.run_id);
    (void)snprintf(term, sizeof term, "%d", r->term);
    tddp_status status = prefix
                             ? tddp_launch_voter_open(host->address, host->port, prefix, ANSWER_MS,
                                                      host->coordinator_cancel, &plain)
                             : TDDP_OUT_OF_MEMORY;
    free(prefix);
    if (status == TDDP_OK) {
        status = set_only_lease(r, plain);
    }
    if (status == TDDP_OK) {
        status = tddp_prefix_store_create(term, plain, &r->store);
    }
    tddp_store_release(plain);
    return status;
}

/* Lets the nodes in. */
static tddp_status open_term(leadership *r)
{
    char text[TDDP_LAUNCH_JOB_BYTES];
    tddp_launch_job_text(r->host->opts.options, text);
    tddp_status status = set(r, "open", slice(text));
    r->open = status == TDDP_OK;
    return status;
}

static void close_term(leadership *r)
{
    tddp_wait wait = {ANSWER_MS, NULL};
    int deleted;
    if (r->store && r->open) {
        (void)!tddp_store_delete_key(r->store, slice("open"), &wait, &deleted);
    }
    r->open = false;
}

/* --- messages -----------------------------------------------------------------------------------
 */

/* The end goes to all endpoints: here at once, to the others by the election's thread. */
static tddp_status pass_on_end(leadership *r, const tddp_bytes *text)
{
    tddp_launch_host *host = r->host;
    tddp_store *plain;
    tddp_wait wait = {ANSWER_MS, NULL};
    char *prefix = tddp_format("torchrun/%s", host->opts.run_id);
    char *copy = tddp_copy_string(text->data);
    tddp_status status = prefix && copy ? tddp_launch_voter_open(host->address, host->port, prefix,
                                                                 ANSWER_MS, NULL, &plain)
                                        : TDDP_OUT_OF_MEMORY;
    free(prefix);
    if (status == TDDP_OK) {
        status = tddp_store_set(plain, slice("ended"), slice(copy), &wait);
        tddp_store_release(plain);
    }
    if (status == TDDP_OK) {
        pthread_mutex_lock(&host->lock);
        host->end_message = copy;
        pthread_mutex_unlock(&host->lock);
        r->ended = true;
    } else {
        free(copy);
    }
    return status;
}

/* Writes one message, or again after a failure: the same value to the same key. */
static tddp_status write_message(leadership *r, const tddp_launch_message *message)
{
    tddp_bytes text = {0};
    char key[40];
    char count[24];
    (void)snprintf(key, sizeof key, "message/%lld", (long long)r->count + 1);
    (void)snprintf(count, sizeof count, "%lld", (long long)r->count + 1);
    tddp_status status = tddp_launch_message_encode(message, &text);
    if (status == TDDP_OK) {
        status = set(r, key, (tddp_slice){text.data, text.size});
    }
    if (status == TDDP_OK) {
        status = set(r, "messages", slice(count));
    }
    if (status == TDDP_OK && message->kind == TDDP_LAUNCH_MESSAGE_END && !r->ended) {
        status = tddp_bytes_append(&text, "", 1);
        status = status == TDDP_OK ? pass_on_end(r, &text) : status;
    }
    tddp_bytes_free(&text);
    return status;
}

static tddp_status write_messages(leadership *r)
{
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && r->written < r->messages.count && goes_on(r)) {
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

/* --- events ---------------------------------------------------------------------------------- */

/* Takes one event, waiting a moment for it with `block`. TDDP_NOT_FOUND: there is none. */
static tddp_status take_event(leadership *r, bool block, tddp_launch_event *event)
{
    tddp_wait wait = {block ? SLICE_MS : ANSWER_MS, block ? r->host->coordinator_cancel : NULL};
    tddp_blob text;
    tddp_status status = tddp_store_queue_pop(r->store, slice("events"), block, &wait, &text);
    if (status != TDDP_OK) {
        return status == TDDP_TIMEOUT || status == TDDP_CANCELED ? TDDP_NOT_FOUND : status;
    }
    status = tddp_launch_event_decode(text.data, text.size, event);
    tddp_blob_free(&text);
    if (status == TDDP_PROTOCOL) {
        tddp_log(TDDP_LOG_WARN, "launch", "%s", tddp_error_message());
        return TDDP_OK; /* `event` is as it was: a beat of slot 0, which is nobody */
    }
    return status == TDDP_OK
               ? tddp_launch_coordinator_take(r->coordinator, event, tddp_launch_host_now(r->host),
                                              &r->messages)
               : status;
}

/* All events that are there; time only counts once they are taken. */
static tddp_status take_events(leadership *r, tddp_launch_event *event)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; status == TDDP_OK && i < AT_A_TIME; i++) {
        *event = (tddp_launch_event){.kind = TDDP_LAUNCH_EVENT_BEAT};
        status = take_event(r, i == 0, event);
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

/* One connection's life: until the leadership ends, or the connection. */
static tddp_status serve_connection(leadership *r, tddp_launch_event *event)
{
    tddp_status status = connect_store(r);
    if (status == TDDP_OK) {
        status = open_term(r);
    }
    while (status == TDDP_OK && goes_on(r)) {
        status = take_events(r, event);
        if (status == TDDP_OK) {
            status = write_messages(r);
        }
        note_over(r);
    }
    return status;
}

static void rest(const tddp_launch_host *host, int64_t ms)
{
    (void)!tddp_net_sleep(tddp_deadline_after_ms(ms), tddp_cancel_fd(host->coordinator_cancel));
}

static void lead_for(tddp_launch_host *host, int term)
{
    leadership r = {.host = host, .term = term};
    tddp_launch_event *event = tddp_alloc(sizeof *event);
    tddp_status status = event ? create_coordinator(&r) : TDDP_OUT_OF_MEMORY;
    while (status != TDDP_OUT_OF_MEMORY && goes_on(&r)) {
        status = serve_connection(&r, event);
        if (status != TDDP_OK && goes_on(&r)) {
            tddp_log(TDDP_LOG_WARN, "launch", "the rendezvous hosted at %s stumbles: %s",
                     host->where, tddp_error_message());
            rest(host, LOOK_MS);
        }
        if (goes_on(&r)) {
            tddp_store_release(r.store);
            r.store = NULL;
        }
    }
    if (status == TDDP_OUT_OF_MEMORY) {
        tddp_log(TDDP_LOG_ERROR, "launch", "the rendezvous hosted at %s ends: %s", host->where,
                 tddp_error_message());
    }
    if (!r.ended) {
        close_term(&r);
    }
    tddp_store_release(r.store);
    tddp_launch_messages_free(&r.messages);
    tddp_launch_coordinator_free(r.coordinator);
    free(event);
}

void *tddp_launch_host_coordinator(void *data)
{
    tddp_launch_host *host = data;
    int last = 0;
    while (!is_told_to_stop(host)) {
        int term;
        if (tddp_launch_host_leads(host, &term) && term != last) {
            tddp_log(TDDP_LOG_INFO, "launch", "the rendezvous is led from %s, term %d", host->where,
                     term);
            last = term;
            lead_for(host, term);
        } else {
            rest(host, LOOK_MS);
        }
    }
    return NULL;
}
