/*
 * One round of the rendezvous: every node says how many workers it has, all work out the same
 * ranks from that. Runs on the rendezvous thread.
 *
 * Keys of round N (0 first, one more each restart):
 *
 *   N/node/RANK   "LOCAL_SIZE HOST ROLE" of a node
 *   N/master      the port of the workers' store, on the host of the meeting place
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/rendezvous/nodes.h"

enum { SLICE_MS = 1000, SAY_EVERY_MS = 10 * 1000, KEY_BYTES = 48 };

typedef struct member {
    int local_size;
    char role[128];
} member;

static tddp_status announce(const tddp_launch_nodes *nodes, int round)
{
    char key[KEY_BYTES];
    char name[64] = "?";
    char value[256];
    tddp_wait wait = tddp_launch_short_wait();
    (void)gethostname(name, sizeof name - 1);
    (void)snprintf(key, sizeof key, "%d/node/%d", round, nodes->rank);
    (void)snprintf(value, sizeof value, "%d %s %.120s", nodes->local_size, name,
                   nodes->options->role);
    return tddp_store_set(nodes->store, tddp_launch_slice(key), tddp_launch_slice(value), &wait);
}

/* Names the ranks that have not come, at most as many as fit. */
static void say_missing(tddp_launch_nodes *nodes, int round)
{
    char missing[128] = "";
    size_t used = 0;
    int absent = 0;
    tddp_wait wait = tddp_launch_short_wait();
    for (int rank = 0; rank < nodes->options->max_nodes; rank++) {
        char key[KEY_BYTES];
        int there = 1;
        (void)snprintf(key, sizeof key, "%d/node/%d", round, rank);
        tddp_slice slice = tddp_launch_slice(key);
        if (tddp_store_check(nodes->store, &slice, 1, &wait, &there) != TDDP_OK) {
            return;
        }
        absent += !there;
        if (!there && used + 16 < sizeof missing) {
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d",
                                     used ? ", " : "", rank);
        }
    }
    if (absent > 0) {
        tddp_log(TDDP_LOG_WARN, "launch",
                 "waiting at %s:%d for %d of %d nodes: node rank %s has not come", nodes->host,
                 nodes->port, absent, nodes->options->max_nodes, missing);
    }
}

/* Waits until a key is there. NONE: it is. */
static tddp_launch_news await_key(tddp_launch_nodes *nodes, int round, const char *key,
                                  int64_t deadline, int64_t *say_at, char *text)
{
    tddp_slice slice = tddp_launch_slice(key);
    for (;;) {
        tddp_wait wait = tddp_launch_wait(nodes, SLICE_MS);
        tddp_status status = tddp_store_wait(nodes->store, &slice, 1, &wait);
        if (status == TDDP_OK) {
            return TDDP_LAUNCH_NEWS_NONE;
        }
        if (status != TDDP_TIMEOUT && status != TDDP_CANCELED) {
            (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "the rendezvous at %s:%d is lost: %s",
                           nodes->host, nodes->port, tddp_error_message());
            return TDDP_LAUNCH_NEWS_ERROR;
        }
        if (status == TDDP_CANCELED && !tddp_launch_nodes_obey(nodes, round)) {
            (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "torchrun was told to end");
            return TDDP_LAUNCH_NEWS_STOPPED;
        }
        tddp_launch_news ended = tddp_launch_nodes_ended(nodes, round, text);
        if (ended != TDDP_LAUNCH_NEWS_NONE) {
            return ended;
        }
        if (tddp_now_ns() >= deadline) {
            (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES,
                           "not all of the %d nodes came to %s:%d within %d s (%s is missing); "
                           "check that torchrun runs on each with the same endpoint and "
                           "--rdzv-id, or raise --rdzv-conf join_timeout",
                           nodes->options->max_nodes, nodes->host, nodes->port,
                           nodes->options->conf.join_timeout, key);
            return TDDP_LAUNCH_NEWS_ERROR;
        }
        if (tddp_now_ns() >= *say_at) {
            say_missing(nodes, round);
            *say_at = tddp_deadline_after_ms(SAY_EVERY_MS);
        }
    }
}

static tddp_status read_member(const tddp_launch_nodes *nodes, int round, int rank, member *out)
{
    char key[KEY_BYTES];
    tddp_blob value;
    tddp_wait wait = tddp_launch_short_wait();
    (void)snprintf(key, sizeof key, "%d/node/%d", round, rank);
    tddp_status status = tddp_store_get(nodes->store, tddp_launch_slice(key), &wait, &value);
    if (status == TDDP_OK) {
        if (sscanf(value.data, "%d %*s %127[^\n]", &out->local_size, out->role) != 2) {
            status = tddp_fail(TDDP_PROTOCOL, "node %d left \"%.64s\" as its description", rank,
                               value.data);
        }
        tddp_blob_free(&value);
    }
    return status;
}

/* Ranks go by node, then by local rank; within a role the same. */
static tddp_status add_up(const tddp_launch_nodes *nodes, int round, tddp_launch_world *world)
{
    member mine;
    tddp_status status = read_member(nodes, round, nodes->rank, &mine);
    for (int rank = 0; status == TDDP_OK && rank < nodes->options->max_nodes; rank++) {
        member other;
        status = read_member(nodes, round, rank, &other);
        if (status == TDDP_OK) {
            int before = rank < nodes->rank ? other.local_size : 0;
            bool same_role = strcmp(other.role, mine.role) == 0;
            world->size += other.local_size;
            world->base_rank += before;
            world->role_size += same_role ? other.local_size : 0;
            world->role_base_rank += same_role ? before : 0;
        }
    }
    return status;
}

/* The host opens a fresh store for the workers. The static rendezvous promises its own port: there
 * the first round's workers share the store where the nodes meet. */
static tddp_status open_workers_store(tddp_launch_nodes *nodes, int round)
{
    char key[KEY_BYTES];
    char value[16];
    int port = nodes->port;
    tddp_store_server_stop(nodes->workers);
    nodes->workers = NULL;
    if (nodes->options->backend != TDDP_LAUNCH_STATIC || round > 0) {
        tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
        opts.host = nodes->host;
        tddp_status status = tddp_store_server_start(&opts, &nodes->workers);
        if (status != TDDP_OK) {
            return status;
        }
        port = tddp_store_server_port(nodes->workers);
    }
    tddp_wait wait = tddp_launch_short_wait();
    (void)snprintf(key, sizeof key, "%d/master", round);
    (void)snprintf(value, sizeof value, "%d", port);
    return tddp_store_set(nodes->store, tddp_launch_slice(key), tddp_launch_slice(value), &wait);
}

static tddp_status read_master(const tddp_launch_nodes *nodes, int round, int *port)
{
    char key[KEY_BYTES];
    tddp_blob value;
    tddp_wait wait = tddp_launch_short_wait();
    (void)snprintf(key, sizeof key, "%d/master", round);
    tddp_status status = tddp_store_get(nodes->store, tddp_launch_slice(key), &wait, &value);
    if (status == TDDP_OK) {
        *port = atoi(value.data);
        tddp_blob_free(&value);
    }
    return status;
}

static tddp_launch_news await_nodes(tddp_launch_nodes *nodes, int round, char *text)
{
    char key[KEY_BYTES];
    int64_t deadline = tddp_deadline_after_ms((int64_t)nodes->options->conf.join_timeout * 1000);
    int64_t say_at = tddp_deadline_after_ms(SAY_EVERY_MS);
    for (int rank = 0; rank < nodes->options->max_nodes; rank++) {
        (void)snprintf(key, sizeof key, "%d/node/%d", round, rank);
        tddp_launch_news news = await_key(nodes, round, key, deadline, &say_at, text);
        if (news != TDDP_LAUNCH_NEWS_NONE) {
            return news;
        }
    }
    (void)snprintf(key, sizeof key, "%d/master", round);
    return await_key(nodes, round, key, deadline, &say_at, text);
}

tddp_launch_news tddp_launch_nodes_join(tddp_launch_nodes *nodes, int round,
                                        tddp_launch_world *world, char *text)
{
    tddp_launch_world made = {
        .node_rank = nodes->rank,
        .nodes = nodes->options->max_nodes,
        .local_size = nodes->local_size,
        .restart = round,
        .max_restarts = nodes->options->max_restarts,
    };
    (void)snprintf(made.master_addr, sizeof made.master_addr, "%s", nodes->host);
    tddp_status status = nodes->hosting ? open_workers_store(nodes, round) : TDDP_OK;
    if (status == TDDP_OK) {
        status = announce(nodes, round);
    }
    if (status == TDDP_OK) {
        tddp_launch_news news = await_nodes(nodes, round, text);
        if (news != TDDP_LAUNCH_NEWS_NONE) {
            return news;
        }
        status = add_up(nodes, round, &made);
    }
    if (status == TDDP_OK) {
        status = read_master(nodes, round, &made.master_port);
    }
    if (status != TDDP_OK) {
        (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "%s", tddp_error_message());
        return TDDP_LAUNCH_NEWS_ERROR;
    }
    *world = made;
    return TDDP_LAUNCH_NEWS_JOINED;
}
