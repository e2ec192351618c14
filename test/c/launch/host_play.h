/*
 * A host on the loopback interface, with nodes played by hand: events pushed, messages read. The
 * host's clock stands still unless the test lets time pass, so nothing runs out because the machine
 * is busy.
 */
#ifndef TDDP_TEST_HOST_PLAY_H
#define TDDP_TEST_HOST_PLAY_H

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/store.h>

#include "base/base.h"
#include "check.h"
#include "launch/rendezvous/host.h"
#include "net/net.h"

enum { POLL_US = 5000, SILENCE_MS = 60 * 1000, LAST_CALL_MS = 1000 };

static tddp_launch_options options;
static tddp_launch_host *host;
static tddp_launch_times times;
static _Atomic int64_t passed_ns = TDDP_NS_PER_S;

static inline int64_t slow_clock(void)
{
    return atomic_load(&passed_ns);
}

static inline void let_pass(int64_t ms)
{
    (void)atomic_fetch_add(&passed_ns, ms * TDDP_NS_PER_MS);
}

static inline void set_up(int min, int max, int restarts)
{
    memset(&options, 0, sizeof options);
    options.backend = TDDP_LAUNCH_C10D;
    options.min_nodes = min;
    options.max_nodes = max;
    options.max_restarts = restarts;
    options.conf = (tddp_launch_conf){.is_host = -1,
                                      .join_timeout = 86400,
                                      .last_call_timeout = LAST_CALL_MS / 1000,
                                      .close_timeout = 600,
                                      .report_interval = 86400,
                                      .read_timeout = 60,
                                      .heartbeat_timeout = SILENCE_MS / 1000};
    times = tddp_launch_times_of(&options.conf);
    options.endpoint_count = 1;
    (void)snprintf(options.endpoints[0].host, sizeof options.endpoints[0].host, "127.0.0.1");
    options.endpoints[0].port = check_free_port();
}

static inline void start_host(void)
{
    tddp_launch_host_opts opts = {
        .options = &options, .times = times, .run_id = "job", .now = slow_clock};
    CHECK_OK(tddp_launch_host_start(&opts, &host));
    CHECK_INT(tddp_launch_host_port(host), options.endpoints[0].port);
    CHECK_TEXT(tddp_launch_host_address(host), "127.0.0.1");
}

static inline void stop_host(void)
{
    tddp_launch_host_stop(host);
    host = NULL;
}

static inline tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

/* The value of a key, or "" if it is not there. */
static inline const char *peek(tddp_store *store, const char *key)
{
    static char value[9000];
    tddp_blob blob;
    tddp_wait wait = {60000, NULL};
    tddp_slice name = slice(key);
    int there;
    CHECK_OK(tddp_store_check(store, &name, 1, &wait, &there));
    if (!there) {
        return "";
    }
    CHECK_OK(tddp_store_get(store, name, &wait, &blob));
    (void)snprintf(value, sizeof value, "%s", blob.data);
    tddp_blob_free(&blob);
    return value;
}

/* The host's store, below torchrun/job. */
static inline tddp_store *open_store(void)
{
    tddp_store *plain;
    tddp_store *store;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = options.endpoints[0].host;
    opts.port = options.endpoints[0].port;
    opts.wait_for_workers = 0;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &plain));
    CHECK_OK(tddp_prefix_store_create("torchrun/job", plain, &store));
    tddp_store_release(plain);
    return store;
}

/* The same once the coordinator lets nodes in; of which term. */
static inline tddp_store *find_leader(long long *term)
{
    tddp_store *store = open_store();
    while (sscanf(peek(store, "open"), "%lld", term) != 1) {
        (void)!usleep(POLL_US);
        let_pass(500);
    }
    return store;
}

/* --- nodes ----------------------------------------------------------------------------------- */

typedef struct player {
    tddp_store *store;
    int slot;
    int64_t heard;
} player;

static inline void push(tddp_store *store, const tddp_launch_event *event)
{
    tddp_bytes text = {0};
    tddp_wait wait = {60000, NULL};
    CHECK_OK(tddp_launch_event_encode(event, &text));
    CHECK_OK(
        tddp_store_queue_push(store, slice("events"), (tddp_slice){text.data, text.size}, &wait));
    tddp_bytes_free(&text);
}

static inline void say(player *node, tddp_launch_event_kind kind, int round, const char *text)
{
    static tddp_launch_event event;
    event = (tddp_launch_event){.kind = kind, .slot = node->slot, .round = round, .port = 4321};
    (void)snprintf(event.addr, sizeof event.addr, "127.0.0.1");
    (void)snprintf(event.text, sizeof event.text, "%s", text);
    push(node->store, &event);
}

static inline void part(player *node)
{
    tddp_store_release(node->store);
    node->store = NULL;
}

/* Comes to the leader and is ready; `last` is its last round, in which it had `rank` of `nodes`. */
static inline void come(player *node, const char *name, bool hosting, int last, int rank, int nodes)
{
    int64_t slot;
    long long term;
    tddp_wait wait = {60000, NULL};
    *node = (player){0};
    node->store = find_leader(&term);
    CHECK_OK(tddp_store_add(node->store, slice("joiners"), 1, &wait, &slot));
    node->slot = (int)slot;
    node->heard = atoll(peek(node->store, "messages"));
    tddp_launch_event event = {.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = node->slot};
    event.joiner = (tddp_launch_joiner){.pid = slot,
                                        .local_size = 2,
                                        .node_rank = -1,
                                        .last_rank = rank,
                                        .round = last,
                                        .nodes = nodes,
                                        .hosting = hosting};
    (void)snprintf(event.joiner.host, sizeof event.joiner.host, "%s", name);
    (void)snprintf(event.joiner.id, sizeof event.joiner.id, "%s%d", name, node->slot);
    push(node->store, &event);
    say(node, TDDP_LAUNCH_EVENT_READY, last + 1, "");
}

/* The next message, as a line; "gone" if the store is. */
static inline const char *hear(player *node)
{
    static char text[9000];
    char key[32];
    tddp_blob blob;
    tddp_wait wait = {600000, NULL};
    (void)snprintf(key, sizeof key, "message/%lld", (long long)++node->heard);
    if (tddp_store_get(node->store, slice(key), &wait, &blob) != TDDP_OK) {
        return "gone";
    }
    tddp_launch_message message;
    CHECK_OK(tddp_launch_message_decode(blob.data, blob.size, &message));
    tddp_launch_message_free(&message);
    (void)snprintf(text, sizeof text, "%s", blob.data);
    tddp_blob_free(&blob);
    return text;
}

static inline bool has_message(const player *node)
{
    char key[32];
    (void)snprintf(key, sizeof key, "message/%lld", (long long)node->heard + 1);
    return peek(node->store, key)[0] != '\0';
}

/* Lets time pass until there is another message for the node. */
static inline void await_last_call(const player *node)
{
    while (!has_message(node)) {
        let_pass(LAST_CALL_MS / 10);
        (void)!usleep(POLL_US);
    }
}

/* Lets time pass in steps, of which the coordinator sees each or at least every third, until there
 * is another message for the node; it alone gives signs of life. */
static inline void outlast_others(player *node, int64_t each_ms)
{
    tddp_wait wait = {60000, NULL};
    while (!has_message(node)) {
        int64_t left = 1;
        let_pass(each_ms);
        say(node, TDDP_LAUNCH_EVENT_BEAT, 0, "");
        while (left > 0) {
            (void)!usleep(POLL_US);
            CHECK_OK(tddp_store_queue_len(node->store, slice("events"), &wait, &left));
        }
    }
}

static inline void await_over(void)
{
    while (!tddp_launch_host_over(host)) {
        (void)!usleep(POLL_US);
    }
}

/* Waits until the store knows how the job has ended. */
static inline void await_ended(const char *expected)
{
    tddp_store *root = open_store();
    while (!peek(root, "ended")[0]) {
        (void)!usleep(POLL_US);
    }
    CHECK_TEXT(peek(root, "ended"), expected);
    tddp_store_release(root);
}

/* Returns once the coordinator has taken all events that were pushed before: it refuses a newcomer
 * that comes after the end. */
static inline void await_taken(const player *node)
{
    player late = {.store = node->store, .slot = 99};
    tddp_launch_event event = {.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = late.slot};
    event.joiner =
        (tddp_launch_joiner){.local_size = 1, .node_rank = -1, .last_rank = -1, .round = -1};
    (void)snprintf(event.joiner.id, sizeof event.joiner.id, "late");
    late.heard = node->heard;
    push(late.store, &event);
    CHECK_CONTAINS(hear(&late), "refuse 99\n");
}

#endif
