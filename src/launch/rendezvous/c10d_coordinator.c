/*
 * The coordinator's side of the rendezvous backend c10d, and of static: a store that this process
 * serves at the endpoint, and is a client of. Keys: text.h. Every wait is for the own store, so it
 * is short.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/host_parts.h"

enum {
    SLICE_MS = 100,   /* for an event, before time is looked at */
    ANSWER_MS = 2000, /* of the own store */
};

typedef struct served {
    tddp_store_server *server;
    tddp_store *store; /* below torchrun/RUN_ID; NULL: not connected */
} served;

/* --- start and stop -------------------------------------------------------------------------- */

static tddp_status start(tddp_launch_host *host)
{
    const tddp_launch_endpoint *endpoint = &host->opts.options->endpoints[0];
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    served *made = tddp_alloc(sizeof *made);
    host->state = made;
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    opts.host = endpoint->host;
    opts.port = endpoint->port;
    tddp_status status = tddp_store_server_start(&opts, &made->server);
    if (status == TDDP_OK) {
        /* One that is started again there has another store, which nodes have to notice. */
        host->term = tddp_launch_new_generation();
        tddp_launch_endpoint_text(endpoint, host->where, sizeof host->where);
    }
    return status;
}

static void stop(tddp_launch_host *host)
{
    served *made = host->state;
    if (made) {
        tddp_store_release(made->store);
        tddp_store_server_stop(made->server);
        free(made);
    }
}

const char *tddp_launch_host_address(const tddp_launch_host *host)
{
    const served *made = host->state;
    return tddp_store_server_address(made->server);
}

int tddp_launch_host_port(const tddp_launch_host *host)
{
    const served *made = host->state;
    return tddp_store_server_port(made->server);
}

/* --- the thread's ---------------------------------------------------------------------------- */

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static tddp_status set(const tddp_launch_host *host, const char *key, tddp_slice value)
{
    const served *made = host->state;
    tddp_wait wait = {ANSWER_MS, NULL};
    return tddp_store_set(made->store, slice(key), value, &wait);
}

static tddp_status connect_store(tddp_launch_host *host)
{
    served *made = host->state;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_wait wait = {ANSWER_MS, host->cancel};
    tddp_store *plain;
    char *prefix = tddp_format("torchrun/%s", host->opts.run_id);
    if (!prefix) {
        return TDDP_OUT_OF_MEMORY;
    }
    opts.host = tddp_launch_host_address(host);
    opts.port = tddp_launch_host_port(host);
    opts.wait_for_workers = 0;
    opts.timeout_ms = ANSWER_MS;
    tddp_status status = tddp_tcp_store_open(&opts, &wait, &plain);
    if (status == TDDP_OK) {
        status = tddp_prefix_store_create(prefix, plain, &made->store);
        tddp_store_release(plain);
    }
    free(prefix);
    return status;
}

static tddp_status open_term(tddp_launch_host *host)
{
    served *made = host->state;
    char job[TDDP_LAUNCH_JOB_BYTES];
    char text[TDDP_LAUNCH_JOB_BYTES + 24];
    tddp_store_release(made->store);
    made->store = NULL;
    tddp_status status = connect_store(host);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_launch_job_text(host->opts.options, job);
    (void)snprintf(text, sizeof text, "%lld %s", (long long)host->term, job);
    return set(host, "open", slice(text));
}

static void close_term(tddp_launch_host *host, bool ended)
{
    const served *made = host->state;
    tddp_wait wait = {ANSWER_MS, NULL};
    int deleted;
    if (made->store && !ended) {
        (void)!tddp_store_delete_key(made->store, slice("open"), &wait, &deleted);
    }
}

static tddp_status take(tddp_launch_host *host, bool block, tddp_launch_event *event)
{
    const served *made = host->state;
    tddp_wait wait = {block ? SLICE_MS : ANSWER_MS, block ? host->cancel : NULL};
    tddp_blob text;
    tddp_status status = tddp_store_queue_pop(made->store, slice("events"), block, &wait, &text);
    if (status != TDDP_OK) {
        return status == TDDP_TIMEOUT || status == TDDP_CANCELED ? TDDP_NOT_FOUND : status;
    }
    status = tddp_launch_host_read_event(&text, event);
    tddp_blob_free(&text);
    return status;
}

static tddp_status publish(tddp_launch_host *host, int64_t number, tddp_slice text, bool end)
{
    char key[40];
    char count[24];
    (void)snprintf(key, sizeof key, "message/%lld", (long long)number);
    (void)snprintf(count, sizeof count, "%lld", (long long)number);
    tddp_status status = end ? set(host, "ended", text) : TDDP_OK;
    status = status ? status : set(host, key, text);
    return status ? status : set(host, "messages", slice(count));
}

const tddp_launch_coordinator_backend tddp_launch_c10d_coordinator = {
    .start = start,
    .stop = stop,
    .open = open_term,
    .take = take,
    .publish = publish,
    .close = close_term,
    .survives = false,
};
