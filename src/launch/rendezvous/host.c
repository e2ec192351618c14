/*
 * The host of an endpoint: its store's server, the election's thread, and the start and end of both
 * threads. The agent's rendezvous thread enters start, stop and over; the others are this room's
 * own. Invariant: the coordinator stops before leases are given back, and the server goes last.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/rendezvous/host_parts.h"
#include "launch/rendezvous/voter.h"
#include "net/net.h"

enum { ANSWER_MS = 300, SHARES = 16, HIGHEST_TERM = 99999999 };

int64_t tddp_launch_host_now(const tddp_launch_host *host)
{
    return host->opts.now ? host->opts.now() : tddp_now_ns();
}

bool tddp_launch_host_leads(tddp_launch_host *host, int *term)
{
    pthread_mutex_lock(&host->lock);
    bool leads = host->leads && tddp_launch_host_now(host) < host->until_ns;
    *term = host->term;
    pthread_mutex_unlock(&host->lock);
    return leads;
}

/* --- the election's thread ------------------------------------------------------------------- */

/* What the election sees of its host. */
typedef struct surroundings {
    tddp_launch_voters voters;
    const tddp_launch_host *host;
} surroundings;

static int64_t clock_now(void *context)
{
    const surroundings *around = context;
    return tddp_launch_host_now(around->host);
}

static tddp_status exchange(void *context, int voter, const char *key, const char *expected,
                            const char *desired, char present[TDDP_LAUNCH_LEASE_BYTES])
{
    surroundings *around = context;
    return tddp_launch_voters_exchange(&around->voters, voter, key, expected, desired, present);
}

/* Puts down what the last step has brought; returns what to tell of the end, or NULL. */
static const char *note_step(tddp_launch_host *host, const tddp_launch_election *election,
                             bool *stop, bool *hand_over)
{
    pthread_mutex_lock(&host->lock);
    host->leads = election->leads;
    host->term = election->term;
    host->until_ns = election->until_ns;
    *stop = host->stop_election;
    *hand_over = host->hand_over;
    const char *message = host->end_message;
    pthread_mutex_unlock(&host->lock);
    return message;
}

static void *elect(void *data)
{
    tddp_launch_host *host = data;
    const tddp_launch_host_opts *opts = &host->opts;
    int64_t lease_ms = opts->times.silence_ms;
    surroundings around = {.host = host};
    tddp_launch_voters *voters = &around.voters;
    tddp_launch_election election;
    bool stop = false;
    bool hand_over = false;
    bool told = false;
    const char *message = NULL;
    tddp_launch_voters_init(voters, opts->endpoints, opts->endpoint_count, opts->endpoint_index,
                            host->address, host->port, opts->run_id,
                            lease_ms / SHARES < ANSWER_MS ? lease_ms / SHARES : ANSWER_MS,
                            host->election_cancel);
    tddp_launch_election_opts how = {.self = opts->endpoint_index,
                                     .count = opts->endpoint_count,
                                     .lease_ns = lease_ms * TDDP_NS_PER_MS,
                                     .seed = (uint64_t)tddp_now_ns() ^ (uint64_t)getpid(),
                                     .context = &around,
                                     .exchange = exchange,
                                     .now = clock_now};
    tddp_launch_election_init(&election, &how);
    while (!stop) {
        tddp_launch_election_step(&election);
        message = note_step(host, &election, &stop, &hand_over);
        if (message && !told) {
            told = tddp_launch_election_end(&election, message);
        }
        if (!stop) {
            int64_t pause_ms = tddp_launch_election_pause_ns(&election) / TDDP_NS_PER_MS;
            (void)!tddp_net_sleep(tddp_deadline_after_ms(pause_ms),
                                  tddp_cancel_fd(host->election_cancel));
        }
    }
    voters->cancel = NULL; /* it is triggered: what follows is to be done still */
    if (message && !told) {
        (void)tddp_launch_election_end(&election, message);
    } else if (hand_over && !message) {
        tddp_launch_election_resign(&election);
    }
    tddp_launch_voters_close(voters);
    return NULL;
}

/* --- start ----------------------------------------------------------------------------------- */

static void write_where(tddp_launch_host *host)
{
    const tddp_launch_endpoint *endpoint = &host->opts.endpoints[host->opts.endpoint_index];
    (void)snprintf(host->where, sizeof host->where,
                   strchr(endpoint->host, ':') ? "[%s]:%d" : "%s:%d", endpoint->host, host->port);
}

void tddp_launch_job_text(const tddp_launch_options *options, char text[TDDP_LAUNCH_JOB_BYTES])
{
    char most[16] = "";
    if (options->max_nodes > options->min_nodes) {
        (void)snprintf(most, sizeof most, ":%d", options->max_nodes);
    }
    (void)snprintf(text, TDDP_LAUNCH_JOB_BYTES,
                   "--nnodes=%d%s --max-restarts=%d --rdzv-conf=heartbeat_timeout=%d",
                   options->min_nodes, most, options->max_restarts,
                   tddp_launch_silence_s(&options->conf));
}

static tddp_status start_server(tddp_launch_host *host)
{
    const tddp_launch_endpoint *endpoint = &host->opts.endpoints[host->opts.endpoint_index];
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = endpoint->host;
    opts.port = endpoint->port;
    tddp_status status = tddp_store_server_start(&opts, &host->server);
    if (status == TDDP_OK) {
        host->address = tddp_store_server_address(host->server);
        host->port = tddp_store_server_port(host->server);
        write_where(host);
    }
    return status;
}

static tddp_status start_threads(tddp_launch_host *host)
{
    bool alone = host->opts.endpoint_count == 1;
    tddp_status status = tddp_thread_start(&host->coordinator_thread, "torchrun-host",
                                           tddp_launch_host_coordinator, host);
    if (status != TDDP_OK || alone) {
        return status;
    }
    status = tddp_thread_start(&host->election_thread, "torchrun-vote", elect, host);
    if (status != TDDP_OK) {
        pthread_mutex_lock(&host->lock);
        host->stop_coordinator = true;
        tddp_cancel_trigger(host->coordinator_cancel);
        pthread_mutex_unlock(&host->lock);
        (void)pthread_join(host->coordinator_thread, NULL);
    }
    return status;
}

static void free_host(tddp_launch_host *host)
{
    tddp_store_server_stop(host->server);
    tddp_cancel_free(host->coordinator_cancel);
    tddp_cancel_free(host->election_cancel);
    (void)pthread_mutex_destroy(&host->lock);
    free(host->end_message);
    free(host);
}

static tddp_status check_opts(const tddp_launch_host_opts *opts)
{
    if (opts->endpoint_count < 1 || opts->endpoint_count > TDDP_LAUNCH_MAX_ENDPOINTS ||
        opts->endpoint_index < 0 || opts->endpoint_index >= opts->endpoint_count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "endpoint %d of %d: expected one of at most %d",
                         opts->endpoint_index, opts->endpoint_count, TDDP_LAUNCH_MAX_ENDPOINTS);
    }
    return TDDP_OK;
}

/* An only endpoint's TERM, for which nobody votes: one that is started again has another store, and
 * nodes that were at the first are to notice. */
static int any_term(void)
{
    uint32_t random;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random) {
        random = (uint32_t)tddp_now_ns() ^ (uint32_t)getpid();
    }
    return (int)(random % HIGHEST_TERM) + 1;
}

tddp_status tddp_launch_host_start(const tddp_launch_host_opts *opts, tddp_launch_host **out)
{
    tddp_status status = check_opts(opts);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_launch_host *host = tddp_alloc(sizeof *host);
    if (!host) {
        return TDDP_OUT_OF_MEMORY;
    }
    host->opts = *opts;
    if (pthread_mutex_init(&host->lock, NULL) != 0) {
        free(host);
        return tddp_fail(TDDP_SYSTEM, "the rendezvous cannot be hosted: no lock can be made");
    }
    if (opts->endpoint_count == 1) {
        host->leads = true;
        host->term = any_term();
        host->until_ns = INT64_MAX;
    }
    status = tddp_cancel_create(&host->coordinator_cancel);
    status = status == TDDP_OK ? tddp_cancel_create(&host->election_cancel) : status;
    status = status == TDDP_OK ? start_server(host) : status;
    status = status == TDDP_OK ? start_threads(host) : status;
    if (status != TDDP_OK) {
        free_host(host);
        return status;
    }
    if (opts->endpoint_count == 2 && opts->endpoint_index == 0) {
        tddp_log(TDDP_LOG_WARN, "launch",
                 "of two endpoints both are needed: three survive the loss of one, and one alone "
                 "is as good as two");
    }
    *out = host;
    return TDDP_OK;
}

/* --- use and end ----------------------------------------------------------------------------- */

const char *tddp_launch_host_address(const tddp_launch_host *host)
{
    return host->address;
}

int tddp_launch_host_port(const tddp_launch_host *host)
{
    return host->port;
}

bool tddp_launch_host_over(const tddp_launch_host *host)
{
    tddp_launch_host *mutable = (tddp_launch_host *)(uintptr_t)host; /* for its lock alone */
    pthread_mutex_lock(&mutable->lock);
    bool over = host->over || !host->leads || tddp_launch_host_now(host) >= host->until_ns;
    pthread_mutex_unlock(&mutable->lock);
    return over;
}

void tddp_launch_host_stop(tddp_launch_host *host, bool graceful)
{
    if (!host) {
        return;
    }
    pthread_mutex_lock(&host->lock);
    host->stop_coordinator = true;
    host->hand_over = graceful;
    tddp_cancel_trigger(host->coordinator_cancel);
    pthread_mutex_unlock(&host->lock);
    (void)pthread_join(host->coordinator_thread, NULL);
    if (host->opts.endpoint_count > 1) {
        pthread_mutex_lock(&host->lock);
        host->stop_election = true;
        tddp_cancel_trigger(host->election_cancel);
        pthread_mutex_unlock(&host->lock);
        (void)pthread_join(host->election_thread, NULL);
    }
    free_host(host);
}
