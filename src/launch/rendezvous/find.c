/*
 * The way to the leader: which endpoint leads, and what was tried when none does. A leader is who
 * holds a lease somewhere and says `open` in its own store; whether its lease has the votes is
 * election.c's. Runs on the rendezvous thread.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/member.h"
#include "net/net.h"

enum {
    REACH_MS = 2 * 1000, /* for one endpoint */
    LEAST_REACH_MS = 50,
    FIRST_PAUSE_MS = 20,
    LAST_PAUSE_MS = 400,
    HOST_EVERY_MS = 1500, /* to see whether the endpoint's port has become free */
    WHY_BYTES = 320,
    ENDPOINT_BYTES = TDDP_LAUNCH_HOST_BYTES + 16,
    TERM_BYTES = 16
};

/* What one look at all endpoints has led to. */
typedef struct look {
    tddp_launch_leader leader;
    tddp_launch_message *end;
    int64_t until_ns;                       /* no attempt lasts longer */
    bool silent[TDDP_LAUNCH_MAX_ENDPOINTS]; /* tried, and no way there */
    bool gone[TDDP_LAUNCH_MAX_ENDPOINTS];   /* its host answers: nobody listens, or leads, there */
    char why[TDDP_LAUNCH_MAX_ENDPOINTS][WHY_BYTES];
} look;

void tddp_launch_leader_forget(tddp_launch_leader *leader)
{
    tddp_store_release(leader->store);
    *leader = (tddp_launch_leader){.endpoint = -1};
}

static const char *endpoint_text(const tddp_launch_node *node, int index, char text[ENDPOINT_BYTES])
{
    const tddp_launch_endpoint *endpoint = &node->endpoints[index];
    bool bare = strchr(endpoint->host, ':') != NULL;
    (void)snprintf(text, ENDPOINT_BYTES, "%s%s%s:%d", bare ? "[" : "", endpoint->host,
                   bare ? "]" : "", endpoint->port);
    return text;
}

static tddp_status view(tddp_store *store, const char *prefix, tddp_store **out)
{
    tddp_status status = tddp_prefix_store_create(prefix, store, out);
    tddp_store_release(store);
    return status;
}

/* How long an attempt at one endpoint may take. */
static int64_t reach_ms(const tddp_launch_node *node, int64_t until_ns)
{
    int64_t read_ms = (int64_t)node->options->conf.read_timeout * 1000;
    int64_t most = read_ms < REACH_MS ? read_ms : REACH_MS;
    if (until_ns == INT64_MAX) {
        return most;
    }
    int64_t left = (until_ns - tddp_now_ns()) / TDDP_NS_PER_MS;
    most = most < node->times.read_ms ? most : node->times.read_ms;
    return left < LEAST_REACH_MS ? LEAST_REACH_MS : left < most ? left : most;
}

/* Whether somebody listens there, which a store's client goes on trying until its time is up. */
static tddp_status knock(const tddp_launch_node *node, int index, const tddp_tcp_store_opts *opts,
                         look *seen)
{
    int fd;
    tddp_status status =
        tddp_net_connect_host(opts->host, opts->port, tddp_deadline_after_ms(opts->timeout_ms),
                              tddp_cancel_fd(node->cancel), &fd);
    if (status == TDDP_OK) {
        tddp_close(fd);
    }
    seen->gone[index] = status == TDDP_NETWORK && errno == ECONNREFUSED;
    return status;
}

/* The store of an endpoint, below torchrun/RUN_ID. */
static tddp_status open_store(const tddp_launch_node *node, int index, look *seen, tddp_store **out)
{
    bool own = node->host && index == node->hosted;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = own ? tddp_launch_host_address(node->host) : node->endpoints[index].host;
    opts.port = own ? tddp_launch_host_port(node->host) : node->endpoints[index].port;
    opts.wait_for_workers = 0;
    opts.timeout_ms = reach_ms(node, seen->until_ns);
    tddp_status status = knock(node, index, &opts, seen);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_wait wait = {opts.timeout_ms, node->cancel};
    tddp_store *plain;
    status = tddp_tcp_store_open(&opts, &wait, &plain);
    if (status == TDDP_NETWORK) { /* or it has ended meanwhile */
        char reason[WHY_BYTES];
        (void)snprintf(reason, sizeof reason, "%s", tddp_error_message());
        opts.timeout_ms = LEAST_REACH_MS;
        (void)!knock(node, index, &opts, seen);
        return tddp_fail(status, "%s", reason);
    }
    char *prefix = status == TDDP_OK ? tddp_format("torchrun/%s", node->run_id) : NULL;
    if (status == TDDP_OK && !prefix) {
        tddp_store_release(plain);
        return TDDP_OUT_OF_MEMORY;
    }
    status = status == TDDP_OK ? view(plain, prefix, out) : status;
    free(prefix);
    return status;
}

/* The value of a key, if it is there; empty and NULL if not. */
static tddp_status peek(const tddp_launch_node *node, tddp_store *store, const char *key,
                        tddp_blob *out)
{
    tddp_slice slice = tddp_launch_slice(key);
    tddp_wait wait = tddp_launch_answer_wait(node);
    int there;
    *out = (tddp_blob){0};
    tddp_status status = tddp_store_check(store, &slice, 1, &wait, &there);
    return status == TDDP_OK && there ? tddp_store_get(store, slice, &wait, out) : status;
}

/* Whether the job has ended there; for a node that was in it that is the end. */
static tddp_status look_for_end(const tddp_launch_node *node, tddp_store *store, bool *ended,
                                tddp_launch_message *end)
{
    tddp_blob value;
    tddp_status status = peek(node, store, "ended", &value);
    *ended = status == TDDP_OK && value.data;
    if (*ended && node->was_in && end->kind != TDDP_LAUNCH_MESSAGE_END) {
        tddp_launch_message message;
        status = tddp_launch_message_decode(value.data, value.size, &message);
        if (status == TDDP_OK) {
            *end = message;
        }
    }
    tddp_blob_free(&value);
    return status;
}

static tddp_status check_job(const tddp_launch_node *node, int index, const char *theirs)
{
    char text[ENDPOINT_BYTES];
    char mine[TDDP_LAUNCH_JOB_BYTES];
    tddp_launch_job_text(node->options, mine);
    if (strcmp(theirs, mine) == 0) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_MISMATCH,
                     "the job at %s was started with %.128s, this node with %s; expected the same "
                     "on all nodes",
                     endpoint_text(node, index, text), theirs, mine);
}

/* The leader that a lease names, if it leads; `*store` is that of the endpoint with the lease. */
static tddp_status follow_lease(const tddp_launch_node *node, int at, int endpoint, int term,
                                tddp_store **store, look *seen)
{
    char open[TERM_BYTES + 8];
    char text[ENDPOINT_BYTES];
    tddp_status status = TDDP_OK;
    if (endpoint != at) {
        tddp_store_release(*store);
        *store = NULL;
        status = seen->silent[endpoint] ? tddp_fail(TDDP_NETWORK, "no way there")
                                        : open_store(node, endpoint, seen, store);
        if (status != TDDP_OK) {
            seen->silent[endpoint] = status != TDDP_CANCELED;
            (void)snprintf(seen->why[at], WHY_BYTES, "led by %s, which does not answer",
                           endpoint_text(node, endpoint, text));
            return status;
        }
    }
    tddp_blob job;
    (void)snprintf(open, sizeof open, "%d/open", term);
    status = peek(node, *store, open, &job);
    if (status != TDDP_OK || !job.data) {
        seen->gone[endpoint] = status == TDDP_OK;
        (void)snprintf(seen->why[at], WHY_BYTES, "led by %s, which is not ready",
                       endpoint_text(node, endpoint, text));
        return status;
    }
    status = check_job(node, endpoint, job.data);
    tddp_blob_free(&job);
    if (status == TDDP_OK) {
        open[strlen(open) - strlen("/open")] = '\0';
        status = view(*store, open, &seen->leader.store);
        *store = NULL;
    }
    if (status == TDDP_OK) {
        seen->leader.endpoint = endpoint;
        seen->leader.term = term;
        seen->gone[endpoint] = false;
    }
    return status;
}

/* Looks at one endpoint; why it leads nowhere stands in `seen` after that. */
static tddp_status look_at(const tddp_launch_node *node, int index, look *seen)
{
    tddp_store *store;
    char *why = seen->why[index];
    bool ended;
    tddp_blob lease;
    if (seen->silent[index]) {
        (void)snprintf(why, WHY_BYTES, "no answer");
        return TDDP_NETWORK;
    }
    tddp_status status = open_store(node, index, seen, &store);
    seen->silent[index] = status != TDDP_OK && status != TDDP_CANCELED;
    if (status == TDDP_OK) {
        status = look_for_end(node, store, &ended, seen->end);
        if (status == TDDP_OK) {
            status = peek(node, store, "lease", &lease);
        }
        if (status != TDDP_OK) {
            tddp_store_release(store);
        }
    }
    if (status != TDDP_OK) {
        (void)snprintf(why, WHY_BYTES, "%s", tddp_error_message());
        return status;
    }
    int endpoint;
    int term;
    (void)snprintf(why, WHY_BYTES, "no torchrun leads there");
    seen->gone[index] = true; /* unless it is the one that leads */
    if (ended) {
        (void)snprintf(why, WHY_BYTES, "the job \"%.80s\" has ended there", node->run_id);
    } else if (!lease.data) {
        (void)snprintf(why, WHY_BYTES, "the store there knows no job \"%.80s\"", node->run_id);
    } else if (sscanf(lease.data, "%2d %9d", &endpoint, &term) == 2 && endpoint >= 0 &&
               endpoint < node->endpoint_count && term >= 0) {
        status = follow_lease(node, index, endpoint, term, &store, seen);
    }
    tddp_blob_free(&lease);
    tddp_store_release(store);
    return status;
}

/* Whether another try would be as vain: another secret, say, or no store at all. A node that was in
 * the job knows that it may be otherwise. */
static bool is_vain(const tddp_launch_node *node, tddp_status status)
{
    return status == TDDP_MISMATCH || status == TDDP_OUT_OF_MEMORY ||
           (!node->was_in &&
            (status == TDDP_STORE || status == TDDP_PROTOCOL || status == TDDP_INVALID_ARGUMENT));
}

/* One pass over all endpoints. NOT_FOUND: the job has ended; TIMEOUT: nobody leads. */
static tddp_status look_around(tddp_launch_node *node, look *seen)
{
    if (node->orders.leave || node->orders.quit) {
        return tddp_fail(TDDP_CANCELED, "told to end");
    }
    for (int i = 0; i < node->endpoint_count; i++) {
        tddp_status status = look_at(node, i, seen);
        if (seen->leader.store || is_vain(node, status)) {
            return status;
        }
        if (status == TDDP_CANCELED && !tddp_launch_node_obey(node)) {
            return status;
        }
        if (status == TDDP_CANCELED) {
            i--; /* orders for later: once more */
        }
    }
    if (seen->end->kind == TDDP_LAUNCH_MESSAGE_END) {
        return tddp_fail(TDDP_NOT_FOUND, "the job has ended");
    }
    return tddp_fail(TDDP_TIMEOUT, "nobody leads");
}

/* "a:29400 (Connection refused), b:29400 (no torchrun leads there)". */
static void list_tried(const tddp_launch_node *node, const look *seen, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < node->endpoint_count && used < size; i++) {
        char endpoint[ENDPOINT_BYTES];
        used += (size_t)snprintf(text + used, size - used, "%s%s (%s)", i ? ", " : "",
                                 endpoint_text(node, i, endpoint), seen->why[i]);
    }
}

static tddp_status fail_search(const tddp_launch_node *node, const char *tried)
{
    return tddp_fail(TDDP_TIMEOUT,
                     "no torchrun leads the job \"%s\" within %d s: tried %s; check that torchrun "
                     "runs there (with --rdzv-conf is_host=1 if that host knows itself by another "
                     "address), and that all nodes have the same --rdzv-endpoint and --rdzv-id, or "
                     "raise --rdzv-conf join_timeout",
                     node->run_id, node->options->conf.join_timeout, tried);
}

/* A line for the user, to be followed by another after a while. */
static void report(const tddp_launch_node *node, const char *tried, int64_t *report_at)
{
    if (tddp_now_ns() < *report_at) {
        return;
    }
    char *line = tddp_format("looking for who leads the job \"%s\": tried %s", node->run_id, tried);
    if (line) {
        tddp_launch_rendezvous_send_news(node->mailbox, TDDP_LAUNCH_NEWS_STATUS, NULL, line);
    }
    free(line);
    *report_at = tddp_deadline_after_ms(node->times.report_ms);
}

/* What a pass in vain says of the leader that is lost: when to give up. One whose connections are
 * reset may be about to end, so it is silent only when there was time for an answer. */
static void note_lost(const tddp_launch_node *node, const look *seen, tddp_launch_search *search,
                      int64_t silent_at, int64_t *deadline)
{
    if (search->lost < 0) {
        return;
    }
    if (seen->gone[search->lost]) {
        int64_t soon = tddp_deadline_after_ms(search->gone_ms);
        *deadline = !search->gone && soon < *deadline ? soon : *deadline;
        search->gone = true;
    } else if (search->line && !search->reported && tddp_now_ns() >= silent_at) {
        tddp_launch_rendezvous_send_news(node->mailbox, TDDP_LAUNCH_NEWS_STATUS, NULL,
                                         search->line);
        search->reported = true;
    }
}

tddp_status tddp_launch_find_leader(tddp_launch_node *node, tddp_launch_search *search,
                                    tddp_launch_leader *out, tddp_launch_message *end)
{
    char tried[TDDP_LAUNCH_MAX_ENDPOINTS * (WHY_BYTES + ENDPOINT_BYTES)];
    int64_t deadline = tddp_deadline_after_ms(search->limit_ms);
    int64_t report_at = tddp_deadline_after_ms(node->times.report_ms);
    int64_t host_at = tddp_deadline_after_ms(HOST_EVERY_MS);
    int64_t silent_at = tddp_deadline_after_ms(reach_ms(node, deadline));
    int64_t pause = FIRST_PAUSE_MS;
    for (;;) {
        look seen = {.leader = {.endpoint = -1},
                     .end = end,
                     .until_ns = search->exact ? deadline : INT64_MAX};
        tddp_status status = look_around(node, &seen);
        if (status != TDDP_TIMEOUT) {
            if (status == TDDP_OK) {
                *out = seen.leader;
            }
            return status;
        }
        note_lost(node, &seen, search, silent_at, &deadline);
        list_tried(node, &seen, tried, sizeof tried);
        if (tddp_now_ns() >= deadline) {
            return fail_search(node, tried);
        }
        if (tddp_now_ns() >= host_at) {
            status = tddp_launch_host_late(node);
            if (status != TDDP_OK) {
                return status;
            }
            host_at = tddp_deadline_after_ms(HOST_EVERY_MS);
        }
        report(node, tried, &report_at);
        if (tddp_net_sleep(tddp_deadline_after_ms(pause), tddp_cancel_fd(node->cancel)) !=
                TDDP_OK &&
            !tddp_launch_node_obey(node)) {
            return tddp_fail(TDDP_CANCELED, "told to end");
        }
        pause = pause * 2 < LAST_PAUSE_MS ? pause * 2 : LAST_PAUSE_MS;
    }
}
