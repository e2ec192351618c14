/*
 * A node's side of the rendezvous backend c10d, and of static: a client of the store that the
 * torchrun at the endpoint serves (text.h has the keys). Runs on the rendezvous thread.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "net/net.h"

enum { LEAST_REACH_MS = 50, KEY_BYTES = 32 };

static tddp_status open_nothing(tddp_launch_node *node)
{
    (void)node;
    return TDDP_OK;
}

static void close_nothing(tddp_launch_node *node)
{
    (void)node;
}

static void disconnect(void *connection)
{
    tddp_store_release(connection);
}

static void name_leader(const tddp_launch_node *node, char *text, size_t size)
{
    char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
    tddp_launch_endpoint_text(&node->options->endpoints[0], endpoint, sizeof endpoint);
    (void)snprintf(text, size, "the torchrun that hosts the rendezvous at %s", endpoint);
}

/* --- the coordinator ------------------------------------------------------------------------- */

/* Whether somebody listens there, which a store's client goes on trying until its time is up. */
static tddp_status probe(const tddp_launch_node *node, const tddp_tcp_store_opts *opts,
                         tddp_launch_look *seen)
{
    int fd;
    tddp_status status =
        tddp_net_connect_host(opts->host, opts->port, tddp_deadline_after_ms(opts->timeout_ms),
                              tddp_cancel_fd(node->cancel), &fd);
    if (status == TDDP_OK) {
        tddp_close(fd);
    }
    seen->gone = status == TDDP_NETWORK && errno == ECONNREFUSED;
    return status;
}

/* The endpoint's store, below torchrun/RUN_ID. */
static tddp_status open_store(const tddp_launch_node *node, tddp_launch_look *seen,
                              tddp_store **out)
{
    const tddp_launch_endpoint *endpoint = &node->options->endpoints[0];
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = node->host ? tddp_launch_host_address(node->host) : endpoint->host;
    opts.port = node->host ? tddp_launch_host_port(node->host) : endpoint->port;
    opts.wait_for_workers = 0;
    opts.timeout_ms = seen->limit_ms;
    tddp_status status = probe(node, &opts, seen);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_wait wait = {opts.timeout_ms, node->cancel};
    tddp_store *plain;
    status = tddp_tcp_store_open(&opts, &wait, &plain);
    if (status == TDDP_NETWORK) { /* or it has ended meanwhile */
        char reason[TDDP_LAUNCH_WHY_BYTES];
        (void)snprintf(reason, sizeof reason, "%s", tddp_error_message());
        opts.timeout_ms = LEAST_REACH_MS;
        (void)!probe(node, &opts, seen);
        return tddp_fail(status, "%s", reason);
    }
    char *prefix = status == TDDP_OK ? tddp_format("torchrun/%s", node->run_id) : NULL;
    if (status == TDDP_OK) {
        status = prefix ? tddp_prefix_store_create(prefix, plain, out) : TDDP_OUT_OF_MEMORY;
        tddp_store_release(plain);
    }
    free(prefix);
    return status;
}

/* The value of a key, or one without data. */
static tddp_status peek(const tddp_launch_node *node, tddp_store *store, const char *key,
                        tddp_blob *out)
{
    tddp_slice name = tddp_launch_slice(key);
    tddp_wait wait = tddp_launch_answer_wait(node);
    int there;
    *out = (tddp_blob){0};
    tddp_status status = tddp_store_check(store, &name, 1, &wait, &there);
    return status == TDDP_OK && there ? tddp_store_get(store, name, &wait, out) : status;
}

/* Whether the job has ended there: for a node that was in it `end` is its last message. */
static tddp_status look_for_end(const tddp_launch_node *node, tddp_store *store,
                                tddp_launch_look *seen)
{
    tddp_blob value;
    tddp_status status = peek(node, store, "ended", &value);
    bool ended = status == TDDP_OK && value.data;
    if (ended && node->was_in) {
        status = tddp_launch_message_decode(value.data, value.size, seen->end);
    }
    if (ended) {
        seen->gone = true;
        (void)snprintf(seen->why, sizeof seen->why, "the job \"%.80s\" has ended there",
                       node->run_id);
    }
    tddp_blob_free(&value);
    return status;
}

/* The coordinator whose store this is, if nodes are let in: "TERM JOB". */
static tddp_status follow_open(const tddp_launch_node *node, tddp_store *store,
                               tddp_launch_look *seen)
{
    tddp_blob value;
    int64_t term;
    tddp_status status = peek(node, store, "open", &value);
    if (status != TDDP_OK) {
        return status;
    }
    char *job = value.data ? strchr(value.data, ' ') : NULL;
    if (job) {
        *job = '\0';
    }
    if (!job || !tddp_parse_int(value.data, 1, INT64_MAX, &term)) {
        seen->gone = true;
        (void)snprintf(seen->why, sizeof seen->why, "the store there knows no job \"%.80s\"",
                       node->run_id);
    } else {
        status = tddp_launch_check_job(node, job + 1);
        if (status == TDDP_OK) {
            seen->leader =
                (tddp_launch_leader){.term = term, .own = node->host != NULL, .connection = store};
        }
    }
    tddp_blob_free(&value);
    return status;
}

static tddp_status look(tddp_launch_node *node, tddp_launch_look *seen)
{
    tddp_store *store = NULL;
    tddp_status status = open_store(node, seen, &store);
    status = status ? status : look_for_end(node, store, seen);
    if (status == TDDP_OK && !seen->gone) {
        status = follow_open(node, store, seen);
    }
    if (status != TDDP_OK && !seen->why[0]) {
        (void)snprintf(seen->why, sizeof seen->why, "%s", tddp_error_message());
    }
    if (!seen->leader.connection) {
        tddp_store_release(store);
    }
    return status;
}

/* --- events and messages --------------------------------------------------------------------- */

/* How many messages there have been: the past. */
static tddp_status count_messages(tddp_launch_node *node, int64_t *count)
{
    tddp_blob value;
    *count = 0;
    tddp_status status = peek(node, node->leader.connection, "messages", &value);
    if (status == TDDP_OK && value.data && !tddp_parse_int(value.data, 0, INT32_MAX - 1, count)) {
        status = tddp_fail(TDDP_PROTOCOL, "the leader counts \"%.32s\" messages", value.data);
    }
    tddp_blob_free(&value);
    return status;
}

static tddp_status take_slot(tddp_launch_node *node, int *slot, int *next_message)
{
    int64_t number;
    int64_t messages;
    tddp_wait wait = tddp_launch_answer_wait(node);
    tddp_status status =
        tddp_store_add(node->leader.connection, tddp_launch_slice("joiners"), 1, &wait, &number);
    status = status ? status : count_messages(node, &messages);
    if (status == TDDP_OK) {
        *slot = (int)number;
        *next_message = (int)messages + 1;
    }
    return status;
}

static tddp_status push(tddp_launch_node *node, tddp_slice event)
{
    tddp_wait wait = tddp_launch_answer_wait(node);
    return tddp_store_queue_push(node->leader.connection, tddp_launch_slice("events"), event,
                                 &wait);
}

static tddp_status beat(tddp_launch_node *node)
{
    tddp_slice open = tddp_launch_slice("open");
    tddp_wait wait = tddp_launch_answer_wait(node);
    int leads = 1;
    tddp_status status = tddp_launch_node_push_kind(node, TDDP_LAUNCH_EVENT_BEAT, 0, "");
    status = status ? status : tddp_store_check(node->leader.connection, &open, 1, &wait, &leads);
    return status == TDDP_OK && !leads ? tddp_fail(TDDP_NETWORK, "it leads no more") : status;
}

static tddp_status await_message(tddp_launch_node *node, int number, const tddp_wait *wait,
                                 tddp_blob *out)
{
    char key[KEY_BYTES];
    (void)snprintf(key, sizeof key, "message/%d", number);
    tddp_slice name = tddp_launch_slice(key);
    tddp_wait answer = tddp_launch_answer_wait(node);
    tddp_status status = tddp_store_wait(node->leader.connection, &name, 1, wait);
    if (status != TDDP_OK) {
        return status;
    }
    status = tddp_store_get(node->leader.connection, name, &answer, out);
    return status == TDDP_TIMEOUT ? tddp_fail(TDDP_NETWORK, "%s", tddp_error_message()) : status;
}

const tddp_launch_node_backend tddp_launch_c10d_node = {
    .open = open_nothing,
    .close = close_nothing,
    .look = look,
    .take_slot = take_slot,
    .push = push,
    .beat = beat,
    .await_message = await_message,
    .disconnect = disconnect,
    .name = name_leader,
    .survives = false,
    .remedy =
        "torchrun runs there (with --rdzv-conf is_host=1 if that host knows itself by another "
        "address)",
};
