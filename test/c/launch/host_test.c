/* Hosts on the loopback interface, with nodes played by hand: events pushed, words read. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/store.h>

#include "base/base.h"
#include "check.h"
#include "launch/rendezvous/host.h"
#include "launch/rendezvous/voter.h"
#include "net/net.h"

enum { ENDPOINTS = 3 };

static tddp_launch_options options;
static tddp_launch_endpoint endpoints[ENDPOINTS];
static int endpoint_count;
static tddp_launch_host *hosts[ENDPOINTS];

static void set_up(int count, int min, int max, int restarts)
{
    memset(&options, 0, sizeof options);
    options.backend = TDDP_LAUNCH_C10D;
    options.min_nodes = min;
    options.max_nodes = max;
    options.max_restarts = restarts;
    options.conf = (tddp_launch_conf){
        .is_host = -1, .join_timeout = 20, .last_call_timeout = 1, .heartbeat_timeout = 1};
    endpoint_count = count;
    for (int i = 0; i < count; i++) {
        (void)snprintf(endpoints[i].host, sizeof endpoints[i].host, "127.0.0.1");
        endpoints[i].port = check_free_port();
    }
}

static void start_host(int index)
{
    tddp_launch_host_opts opts = {.options = &options,
                                  .run_id = "job",
                                  .endpoint_index = index,
                                  .endpoint_count = endpoint_count,
                                  .endpoints = endpoints};
    CHECK_OK(tddp_launch_host_start(&opts, &hosts[index]));
    CHECK_INT(tddp_launch_host_port(hosts[index]), endpoints[index].port);
    CHECK_TEXT(tddp_launch_host_address(hosts[index]), "127.0.0.1");
}

static void stop_host(int index, bool graceful)
{
    int64_t begin = tddp_now_ns();
    tddp_launch_host_stop(hosts[index], graceful);
    hosts[index] = NULL;
    CHECK(tddp_now_ns() - begin < 2 * TDDP_NS_PER_S);
}

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

/* The value of a key, or "" if it is not there. */
static const char *peek(tddp_store *store, const char *key)
{
    static char value[9000];
    tddp_blob blob;
    tddp_wait wait = {2000, NULL};
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

/* An endpoint's store, below torchrun/job or further; NULL if nobody is there. */
static tddp_store *open_store(int index, const char *prefix)
{
    tddp_store *store;
    return tddp_launch_voter_open(endpoints[index].host, endpoints[index].port, prefix, 1000, NULL,
                                  &store) == TDDP_OK
               ? store
               : NULL;
}

/* Waits for a leader; its store below the term. */
static tddp_store *find_leader(int *endpoint, int *term)
{
    int64_t deadline = tddp_deadline_after_ms(15000);
    while (tddp_now_ns() < deadline) {
        for (int i = 0; i < endpoint_count; i++) {
            tddp_store *store = open_store(i, "torchrun/job");
            char prefix[64];
            bool named = store && sscanf(peek(store, "lease"), "%d %d", endpoint, term) == 2;
            tddp_store_release(store);
            if (!named) {
                continue;
            }
            (void)snprintf(prefix, sizeof prefix, "torchrun/job/%d", *term);
            store = open_store(*endpoint, prefix);
            if (store && peek(store, "open")[0]) {
                return store;
            }
            tddp_store_release(store);
        }
        (void)!usleep(10 * 1000);
    }
    check_failed(__FILE__, __LINE__, "nobody leads");
}

/* --- nodes ----------------------------------------------------------------------------------- */

typedef struct player {
    tddp_store *store;
    int slot;
    int64_t heard;
    pthread_t beats;
    bool beating;
    bool quiet; /* under `lock` */
    pthread_mutex_t lock;
} player;

static void push(tddp_store *store, const tddp_launch_event *event)
{
    tddp_bytes text = {0};
    tddp_wait wait = {2000, NULL};
    CHECK_OK(tddp_launch_event_encode(event, &text));
    CHECK_OK(
        tddp_store_queue_push(store, slice("events"), (tddp_slice){text.data, text.size}, &wait));
    tddp_bytes_free(&text);
}

static void say(player *node, tddp_launch_event_kind kind, int round, const char *text)
{
    static tddp_launch_event event;
    event = (tddp_launch_event){.kind = kind, .slot = node->slot, .round = round, .port = 4321};
    (void)snprintf(event.addr, sizeof event.addr, "127.0.0.1");
    (void)snprintf(event.text, sizeof event.text, "%s", text);
    push(node->store, &event);
}

static void *beat(void *data)
{
    player *node = data;
    tddp_store *store;
    tddp_launch_event event = {.kind = TDDP_LAUNCH_EVENT_BEAT, .slot = node->slot};
    tddp_wait wait = {2000, NULL};
    bool quiet = tddp_store_clone(node->store, &wait, &store) != TDDP_OK;
    tddp_bytes text = {0};
    CHECK_OK(tddp_launch_event_encode(&event, &text));
    while (!quiet) {
        quiet = tddp_store_queue_push(store, slice("events"), (tddp_slice){text.data, text.size},
                                      &wait) != TDDP_OK;
        (void)!usleep(100 * 1000);
        pthread_mutex_lock(&node->lock);
        quiet = quiet || node->quiet;
        pthread_mutex_unlock(&node->lock);
    }
    tddp_bytes_free(&text);
    tddp_store_release(store);
    return NULL;
}

static void fall_silent(player *node)
{
    if (node->beating) {
        pthread_mutex_lock(&node->lock);
        node->quiet = true;
        pthread_mutex_unlock(&node->lock);
        (void)pthread_join(node->beats, NULL);
        node->beating = false;
    }
}

static void part(player *node)
{
    fall_silent(node);
    tddp_store_release(node->store);
    node->store = NULL;
}

/* Comes to the leader and is ready; `last` is its last round, in which it had `rank` of `nodes`. */
static void come(player *node, const char *host, bool hosting, int last, int rank, int nodes)
{
    int64_t slot;
    int endpoint;
    int term;
    tddp_wait wait = {2000, NULL};
    *node = (player){0};
    CHECK_INT(pthread_mutex_init(&node->lock, NULL), 0);
    node->store = find_leader(&endpoint, &term);
    CHECK_OK(tddp_store_add(node->store, slice("comers"), 1, &wait, &slot));
    node->slot = (int)slot;
    node->heard = atoll(peek(node->store, "words"));
    tddp_launch_event event = {.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = node->slot};
    event.comer = (tddp_launch_comer){.pid = slot,
                                      .local_size = 2,
                                      .node_rank = -1,
                                      .last_rank = rank,
                                      .round = last,
                                      .nodes = nodes,
                                      .hosting = hosting};
    (void)snprintf(event.comer.host, sizeof event.comer.host, "%s", host);
    (void)snprintf(event.comer.id, sizeof event.comer.id, "%s%d", host, node->slot);
    push(node->store, &event);
    say(node, TDDP_LAUNCH_EVENT_READY, last + 1, "");
    CHECK_OK(tddp_thread_start(&node->beats, "beats", beat, node));
    node->beating = true;
}

/* The next word, as a line; "gone" if the store is. */
static const char *hear(player *node)
{
    static char text[9000];
    char key[32];
    tddp_blob blob;
    tddp_wait wait = {12000, NULL};
    (void)snprintf(key, sizeof key, "word/%lld", (long long)++node->heard);
    if (tddp_store_get(node->store, slice(key), &wait, &blob) != TDDP_OK) {
        return "gone";
    }
    tddp_launch_word word;
    CHECK_OK(tddp_launch_word_decode(blob.data, blob.size, &word));
    tddp_launch_word_free(&word);
    (void)snprintf(text, sizeof text, "%s", blob.data);
    tddp_blob_free(&blob);
    return text;
}

static bool await_over(const tddp_launch_host *host, int64_t limit_ms)
{
    int64_t deadline = tddp_deadline_after_ms(limit_ms);
    while (!tddp_launch_host_over(host) && tddp_now_ns() < deadline) {
        (void)!usleep(10 * 1000);
    }
    return tddp_launch_host_over(host);
}

/* --- one endpoint ---------------------------------------------------------------------------- */

TEST(a_job_of_two_nodes)
{
    player a;
    player b;
    set_up(1, 2, 2, 0);
    start_host(0);
    CHECK(!tddp_launch_host_over(hosts[0]));
    come(&a, "a", true, -1, -1, 0);
    come(&b, "b", false, -1, -1, 0);
    CHECK_TEXT(peek(b.store, "open"),
               "--nnodes=2 --max-restarts=0 --rdzv-conf=heartbeat_timeout=1");
    for (int i = 0; i < 2; i++) {
        CHECK_TEXT(hear(i ? &b : &a), "round 0 restart 0\n0 1 2 % a %\n1 2 2 % b %");
    }
    say(&a, TDDP_LAUNCH_EVENT_MASTER, 0, "");
    CHECK_TEXT(hear(&b), "master 0 127.0.0.1 4321");
    say(&a, TDDP_LAUNCH_EVENT_DONE, 0, "");
    say(&b, TDDP_LAUNCH_EVENT_DONE, 0, "");
    CHECK_TEXT(hear(&b), "end done\n");
    CHECK_TEXT(hear(&a), "master 0 127.0.0.1 4321");
    CHECK_TEXT(hear(&a), "end done\n");
    tddp_store *root = open_store(0, "torchrun/job");
    CHECK(root != NULL);
    /* It is written after the word. */
    for (int i = 0; i < 100 && strlen(peek(root, "ended")) == 0; i++) {
        (void)!usleep(10 * 1000);
    }
    CHECK_TEXT(peek(root, "ended"), "end done\n");
    int term;
    CHECK_INT(sscanf(peek(root, "lease"), "0 %d 0", &term), 1);
    CHECK(term > 0);
    tddp_store_release(root);
    CHECK(!tddp_launch_host_over(hosts[0]));
    say(&a, TDDP_LAUNCH_EVENT_BYE, 0, "");
    CHECK(!await_over(hosts[0], 300));
    say(&b, TDDP_LAUNCH_EVENT_BYE, 0, "");
    CHECK(await_over(hosts[0], 1000));
    part(&a);
    part(&b);
    stop_host(0, true);
}

TEST(a_node_that_says_no_goodbye_is_waited_for_three_seconds)
{
    player a;
    set_up(1, 1, 1, 0);
    start_host(0);
    come(&a, "a", true, -1, -1, 0);
    CHECK_CONTAINS(hear(&a), "round 0");
    say(&a, TDDP_LAUNCH_EVENT_FAILED, 0, "rank 0: exit code 3");
    CHECK_TEXT(hear(&a), "end failed\nrank 0: exit code 3");
    CHECK(!await_over(hosts[0], 2000));
    CHECK(await_over(hosts[0], 3000));
    part(&a);
    stop_host(0, true);
}

TEST(a_silent_node_is_lost_and_garbage_is_passed_over)
{
    player a;
    player b;
    tddp_wait wait = {2000, NULL};
    set_up(1, 1, 2, 0);
    start_host(0);
    come(&a, "a", true, -1, -1, 0);
    come(&b, "b", false, -1, -1, 0);
    CHECK_TEXT(peek(a.store, "open"),
               "--nnodes=1:2 --max-restarts=0 --rdzv-conf=heartbeat_timeout=1");
    CHECK_CONTAINS(hear(&a), "round 0 restart 0\n0 1");
    CHECK_OK(tddp_store_queue_push(a.store, slice("events"), slice("what is this?"), &wait));
    CHECK_OK(tddp_store_queue_push(a.store, slice("events"), slice(""), &wait));
    fall_silent(&b);
    int64_t begin = tddp_now_ns();
    CHECK_CONTAINS(hear(&a), "anew 2\nnode 1 is lost: no sign of life for 1 s (b pid 2)");
    CHECK(tddp_now_ns() - begin < 3 * TDDP_NS_PER_S);
    CHECK_CONTAINS(hear(&a), "over 0 changed\nnode 1 is lost");
    say(&a, TDDP_LAUNCH_EVENT_READY, 1, "");
    CHECK_TEXT(hear(&a), "round 1 restart 0\n0 1 2 % a %");
    part(&a);
    part(&b);
    stop_host(0, false);
}

TEST(a_port_in_use)
{
    tddp_launch_host *second;
    set_up(1, 1, 1, 0);
    start_host(0);
    tddp_launch_host_opts opts = {
        .options = &options, .run_id = "job", .endpoint_count = 1, .endpoints = endpoints};
    CHECK_STATUS(tddp_launch_host_start(&opts, &second), TDDP_ADDRESS_IN_USE);
    CHECK_CONTAINS(tddp_error_message(), "it is held by ");
    CHECK_CONTAINS(tddp_error_message(), "(pid ");
    opts.endpoint_index = 1;
    CHECK_STATUS(tddp_launch_host_start(&opts, &second), TDDP_INVALID_ARGUMENT);
    stop_host(0, true);
    tddp_launch_host_stop(NULL, true);
}

TEST(an_only_endpoint_that_is_started_again_has_another_term)
{
    int endpoint;
    int terms[2];
    set_up(1, 1, 2, 0);
    for (int i = 0; i < 2; i++) {
        start_host(0);
        tddp_store_release(find_leader(&endpoint, &terms[i]));
        stop_host(0, false);
    }
    CHECK(terms[0] != terms[1]);
}

/* --- three endpoints ------------------------------------------------------------------------- */

static int start_three(void)
{
    int endpoint;
    int term;
    set_up(3, 1, 3, 1);
    for (int i = 0; i < 3; i++) {
        start_host(i);
    }
    tddp_store *store = find_leader(&endpoint, &term);
    CHECK_INT(term, 1);
    tddp_store_release(store);
    return endpoint;
}

static void stop_all(void)
{
    for (int i = 0; i < 3; i++) {
        if (hosts[i]) {
            stop_host(i, true);
        }
    }
}

TEST(a_leader_is_lost)
{
    player b;
    player c;
    int endpoint;
    int term;
    int first = start_three();
    come(&b, "b", false, -1, -1, 0);
    come(&c, "c", false, -1, -1, 0);
    CHECK_CONTAINS(hear(&b), "round 0 restart 0\n0 1");
    stop_host(first, false);      /* keeps its leases, as if it were killed */
    CHECK_TEXT(hear(&b), "gone"); /* at once */
    part(&b);
    part(&c);
    int64_t begin = tddp_now_ns();
    tddp_store *store = find_leader(&endpoint, &term);
    tddp_store_release(store);
    CHECK(tddp_now_ns() - begin < 3 * TDDP_NS_PER_S);
    CHECK(endpoint != first);
    CHECK_INT(term, 2);
    come(&c, "c", false, 0, 1, 2);
    come(&b, "b", false, 0, 0, 2);
    CHECK_TEXT(hear(&b), "round 1 restart 0\n0 2 2 % b %\n1 1 2 % c %");
    start_host(first); /* back again: a voter, no leader */
    CHECK(await_over(hosts[first], 0));
    say(&b, TDDP_LAUNCH_EVENT_DONE, 1, "");
    say(&c, TDDP_LAUNCH_EVENT_DONE, 1, "");
    CHECK_TEXT(hear(&b), "end done\n");
    (void)!usleep(1200 * 1000); /* a second at most until the one that is back is asked again */
    for (int i = 0; i < 3; i++) {
        tddp_store *root = open_store(i, "torchrun/job");
        CHECK_TEXT(peek(root, "ended"), "end done\n");
        tddp_store_release(root);
    }
    part(&b);
    part(&c);
    stop_all();
}

TEST(a_leader_hands_over)
{
    player b;
    int endpoint;
    int term;
    int first = start_three();
    come(&b, "b", false, -1, -1, 0);
    CHECK_CONTAINS(hear(&b), "round 0 restart 0\n0 1");
    int64_t begin = tddp_now_ns();
    stop_host(first, true);
    tddp_store *store = find_leader(&endpoint, &term);
    tddp_store_release(store);
    CHECK(tddp_now_ns() - begin < TDDP_NS_PER_S);
    CHECK(endpoint != first);
    CHECK_INT(term, 2);
    part(&b);
    stop_all();
}

/* Nobody answers at one endpoint, though the port is bound: the others do not wait for it. */
TEST(a_deaf_endpoint_holds_nobody_up)
{
    player b;
    int fd;
    set_up(3, 1, 1, 0);
    CHECK_OK(tddp_net_listen("127.0.0.1", endpoints[2].port, &fd));
    start_host(0);
    start_host(1);
    come(&b, "b", false, -1, -1, 0);
    CHECK_CONTAINS(hear(&b), "round 0 restart 0\n0 1");
    for (int i = 0; i < 20; i++) {
        int64_t begin = tddp_now_ns();
        say(&b, TDDP_LAUNCH_EVENT_MASTER, 0, "");
        if (i == 0) {
            CHECK_CONTAINS(hear(&b), "master 0 ");
        }
        CHECK(tddp_now_ns() - begin < TDDP_NS_PER_S);
        (void)!usleep(50 * 1000);
    }
    say(&b, TDDP_LAUNCH_EVENT_DONE, 0, "");
    CHECK_TEXT(hear(&b), "end done\n");
    part(&b);
    stop_all();
    tddp_close(fd);
}

/* Leaders and followers stop and start at random; a node finds a leader again each time. */
MULTI_TEST(random_stops, 1, 100)
{
    unsigned seed = 7;
    (void)start_three();
    for (int i = 0; i < 5; i++) {
        seed = seed * 1103515245 + 12345;
        int index = (int)(seed >> 16) % 3;
        stop_host(index, (seed >> 20) % 2);
        int endpoint;
        int term;
        tddp_store *store = find_leader(&endpoint, &term);
        tddp_store_release(store);
        int leaders = 0;
        for (int j = 0; j < 3; j++) {
            leaders += hosts[j] && !tddp_launch_host_over(hosts[j]);
        }
        CHECK(leaders <= 1);
        start_host(index);
        (void)!usleep(((seed >> 24) % 3) * 500 * 1000);
    }
    stop_all();
}
