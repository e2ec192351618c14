/*
 * Keys that go with their connection, and watches of a prefix: how they end, who is told, what a
 * server that was stopped makes of its clients. model_test.c has random sequences of them.
 */
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "kinds.h"
#include "store/server/server.h"

enum { READY, OVER, WATCHES, COMES }; /* events */

static void own(tddp_store *store, const char *key, const char *value, int64_t limit_ms)
{
    int set = -1;
    CHECK_OK(
        tddp_store_set_ephemeral(store, text(key), text(value), limit_ms, 0, NULL, &set, NULL));
    CHECK_INT(set, 1);
}

/* Whether this caller has the key now, which has the value `expected` then. */
static bool wins(tddp_store *store, const char *key, const char *value, const char *expected)
{
    int set = -1;
    tddp_blob now = {0};
    CHECK_OK(tddp_store_set_ephemeral(store, text(key), text(value), 0, 1, NULL, &set, &now));
    CHECK_TEXT(now.data, expected);
    tddp_blob_free(&now);
    return set;
}

/* "key=value" of all keys that a watch returns, in the order of the alphabet. */
static const char *seen(tddp_store *store, const char *prefix)
{
    static char all[512];
    tddp_store_entries got;
    CHECK_OK(tddp_store_watch(store, text(prefix), NULL, &got));
    CHECK_INT(got.keys.count, got.values.count);
    const char *last = "";
    all[0] = '\0';
    for (size_t i = 0; i < got.keys.count; i++) {
        size_t next = got.keys.count;
        for (size_t j = 0; j < got.keys.count; j++) {
            const char *key = got.keys.blobs[j].data;
            if (strcmp(key, last) > 0 &&
                (next == got.keys.count || strcmp(key, got.keys.blobs[next].data) < 0)) {
                next = j;
            }
        }
        last = got.keys.blobs[next].data;
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s=%s", i ? " " : "", last,
                 got.values.blobs[next].data);
    }
    tddp_store_entries_free(&got);
    CHECK(!got.keys.blobs && got.values.count == 0);
    return all;
}

static void check_quiet(tddp_store *store, const char *prefix)
{
    tddp_store_entries got;
    tddp_wait soon = within_ms(20);
    CHECK_STATUS(tddp_store_watch(store, text(prefix), &soon, &got), TDDP_TIMEOUT);
}

/* --- whose a key is -------------------------------------------------------------------------- */

TEST(an_ephemeral_key_goes_with_the_connection_that_set_it_last)
{
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    tddp_store *stays = client_of(port_used);
    tddp_store *one = client_of(port_used);
    tddp_store *two = client_of(port_used);
    CHECK_TEXT(seen(stays, ""), "");
    own(one, "a", "1", 0);
    own(one, "b", "1", 60000);
    CHECK_TEXT(seen(stays, ""), "a=1 b=1");
    own(two, "b", "2", 0); /* taken over */
    CHECK_TEXT(seen(stays, ""), "a=1 b=2");
    tddp_store_release(one);
    CHECK_TEXT(seen(stays, ""), "b=2");
    CHECK_OK(tddp_store_set(stays, text("b"), text("2"), NULL)); /* an ordinary one now */
    own(two, "c", "3", 0);
    CHECK_TEXT(seen(stays, ""), "b=2 c=3");
    tddp_store_release(two);
    CHECK_TEXT(seen(stays, ""), "b=2");
    tddp_store_release(stays);
    tddp_store_server_stop(server);
}

TEST(of_several_one_gets_a_key_that_nobody_holds)
{
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    tddp_store *one = client_of(port_used);
    tddp_store *base = client_of(port_used);
    tddp_store *two;
    CHECK_OK(tddp_prefix_store_create("job", base, &two));
    tddp_store_release(base);
    CHECK(wins(one, "job/leader", "one", "one"));
    CHECK(!wins(two, "leader", "two", "one"));
    CHECK(wins(one, "job/leader", "one again", "one again")); /* its own already */
    tddp_slice leader = text("leader");
    CHECK_OK(tddp_store_wait(two, &leader, 1, NULL));
    CHECK_TEXT(seen(two, ""), "leader=one again");
    tddp_store_release(one);
    CHECK_TEXT(seen(two, ""), "");
    CHECK(wins(two, "leader", "two", "two"));
    int deleted;
    CHECK_OK(tddp_store_delete_key(two, leader, NULL, &deleted));
    CHECK_INT(deleted, 1);
    CHECK_OK(tddp_store_set(two, leader, text("ordinary"), NULL));
    CHECK(!wins(two, "leader", "two", "ordinary"));
    tddp_store_release(two);
    tddp_store_server_stop(server);
}

static void *wait_for_key(void *store)
{
    check_will_block(COMES);
    CHECK_VALUE(store, "late", "here");
    return NULL;
}

TEST(setting_an_ephemeral_key_wakes_who_waits_for_it)
{
    tddp_store_server *server = loopback_server();
    tddp_store *store = client_of(tddp_store_server_port(server));
    tddp_store *other = client_of(tddp_store_server_port(server));
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, wait_for_key, other), 0);
    CHECK_AWAIT_BLOCKED(COMES);
    own(store, "late", "here", 0);
    pthread_join(thread, NULL);
    tddp_store_release(other);
    tddp_store_release(store);
    tddp_store_server_stop(server);
}

/* A process that has a key is killed; how long it takes until a watch tells. */
static int64_t kill_one(tddp_store *store, int port_used)
{
    CHECK_TEXT(seen(store, "node/"), "");
    pid_t child = fork();
    if (child == 0) {
        own(client_of(port_used), "node/1", "up", 0);
        pause();
        _exit(0);
    }
    CHECK_TEXT(seen(store, "node/"), "node/1=up");
    int64_t start_ns = tddp_now_ns();
    kill(child, SIGKILL);
    CHECK_TEXT(seen(store, "node/"), "");
    int64_t took_ns = tddp_now_ns() - start_ns;
    CHECK_INT(waitpid(child, NULL, 0), child);
    CHECK_OK(tddp_store_set(store, text("node/"), text(""), NULL));
    int deleted;
    CHECK_TEXT(seen(store, "node/"), "node/=");
    CHECK_OK(tddp_store_delete_key(store, text("node/"), NULL, &deleted));
    return took_ns;
}

/* At once, where the machine has a processor for it: one of a few times. */
MULTI_TEST(the_key_of_a_process_that_is_killed_goes_at_once, 2, 60)
{
    if (rank == 1) {
        tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
        opts.host = "127.0.0.1";
        opts.port = port;
        tddp_store_server *server = start(&opts);
        check_signal(READY);
        CHECK_AWAIT(OVER, 1);
        tddp_store_server_stop(server);
        return;
    }
    CHECK_AWAIT(READY, 1);
    tddp_store *store = client_of(port);
    int64_t quickest_ns = INT64_MAX;
    for (int i = 0; i < 5 && quickest_ns > 200 * TDDP_NS_PER_MS; i++) {
        int64_t took_ns = kill_one(store, port);
        quickest_ns = took_ns < quickest_ns ? took_ns : quickest_ns;
    }
    CHECK(quickest_ns <= 200 * TDDP_NS_PER_MS);
    tddp_store_release(store);
    check_signal(OVER);
}

/* --- limits, with time that is set here rather than waited for ------------------------------- */

/* A server without a thread and its one client, whose other end is `ours`. */
typedef struct bench {
    tddp_store_server server;
    tddp_server_client *client;
    atomic_int slot;
    int ours;
} bench;

static bench *bench_open(void)
{
    bench *b = calloc(1, sizeof *b);
    tddp_store_server_opts opts = loopback_opts();
    int ends[2];
    CHECK(b);
    CHECK_OK(tddp_server_configure(&b->server, &opts));
    CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    b->client = calloc(1, sizeof *b->client);
    CHECK(b->client);
    b->server.epoll_fd = -1;
    LIST_INSERT_HEAD(&b->server.clients, b->client, of_all);
    b->server.client_count = b->server.pending_count = 1;
    b->slot = ends[0] + 1;
    b->client->slot = &b->slot;
    b->client->fd = ends[0];
    b->client->events = 1; /* EPOLLIN: it is read from */
    b->ours = ends[1];
    tddp_server_late(&b->server, b->client);
    return b;
}

static void bench_take(bench *b, const char *hex)
{
    char bytes[4096];
    tddp_server_client_take(&b->server, b->client, bytes, from_hex(hex, bytes));
    tddp_server_flush_unsent(&b->server);
    b->client->events = 1;
}

/* Nothing has come for so long, and the server looks `late_ms` after it wanted to. */
static void bench_look(bench *b, int64_t silent_ms, int64_t late_ms)
{
    int64_t now = tddp_now_ns();
    b->client->received_ns = now - silent_ms * TDDP_NS_PER_MS;
    b->server.expire_ns = now - late_ms * TDDP_NS_PER_MS;
    tddp_server_expire(&b->server);
}

static void bench_close(bench *b)
{
    tddp_server_client_drop(&b->server, b->client, NULL);
    CHECK_INT(b->server.values.count, 0);
    CHECK_INT(b->server.values.bytes, 0);
    tddp_server_clients_reap(&b->server);
    tddp_server_clear(&b->server);
    CHECK_INT(b->server.in_bytes, 0);
    close(b->ours);
    free(b);
}

#define EPHEMERAL_K "f2 [2]2f6b [1]76 "

TEST(a_key_expires_when_its_client_is_silent_for_the_limit_while_the_server_turns)
{
    bench *b = bench_open();
    bench_take(b, HELLO EPHEMERAL_K "[1000] 00");
    bench_take(b, "f2 [2]2f6c [1]76 [9000] 00 f2 [2]2f6d [1]76 [0] 00");
    CHECK_INT(b->server.values.count, 3);
    bench_look(b, 900, 0);
    CHECK(!b->client->overdue);
    CHECK(b->server.expire_ns > tddp_now_ns());
    bench_look(b, 1100, 0); /* too long, it seems: another moment */
    CHECK(b->client->overdue);
    CHECK_INT(b->server.values.count, 3);
    bench_look(b, 1200, 50);
    CHECK_INT(b->server.values.count, 2);
    CHECK(!tddp_store_map_find(&b->server.values, (tddp_slice){"/k", 2}));
    bench_look(b, 9100, 0);
    bench_look(b, 9200, 0);
    CHECK_INT(b->server.values.count, 1); /* without a limit it stays */
    bench_close(b);
}

TEST(time_in_which_the_server_was_stopped_does_not_count)
{
    bench *b = bench_open();
    bench_take(b, HELLO EPHEMERAL_K "[1000] 00");
    for (int i = 0; i < 3; i++) { /* it looks late each time */
        bench_look(b, 60000, 50000);
        CHECK(b->client->overdue);
        CHECK_INT(b->server.values.count, 1);
    }
    bench_take(b, "0d 01020304"); /* the client goes on too */
    CHECK(!b->client->overdue);
    bench_look(b, 500, 0);
    CHECK(!b->client->overdue);
    CHECK_INT(b->server.values.count, 1);
    bench_close(b);
}

TEST(a_byte_of_a_request_is_a_sign_of_life_and_so_is_what_is_not_read)
{
    bench *b = bench_open();
    bench_take(b, HELLO EPHEMERAL_K "[1000] 00");
    bench_look(b, 1100, 0);
    bench_take(b, "01");
    CHECK(!b->client->overdue);
    b->client->events = 0; /* it has to read its answers first */
    bench_look(b, 60000, 0);
    bench_look(b, 60000, 0);
    CHECK_INT(b->server.values.count, 1);
    bench_close(b);
}

/* What a client may be sent, and what it may store. */
TEST(limits_of_clients_hold)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_request_bytes = 1000;
    opts.max_total_bytes = 5000;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    char kilobyte[901];
    memset(kilobyte, 'x', 900);
    kilobyte[900] = '\0';
    int watcher = greet(port_used);
    raw_send(watcher, "f3 [2]2f62 00");
    CHECK_RAW(watcher, "00 [0]");
    raw_send(watcher, "f3 [2]2f62 00"); /* waits */
    CHECK_SILENT(watcher);
    for (int i = 0; i < 3; i++) {
        char key[16];
        snprintf(key, sizeof key, "a%d", i);
        CHECK_OK(tddp_store_set(good, text(key), text(kilobyte), NULL));
    }
    int greedy = greet(port_used);
    raw_send(greedy, "f3 [2]2f61 00");
    CHECK_HUNG_UP(greedy);
    CHECK_LOG("more than 2000 bytes of answers wait for it (TDDP_STORE_MAX_REQUEST_BYTES)");
    tddp_net_close(greedy);
    int lavish = greet(port_used);
    char all[4096] = "";
    for (int i = 0; i < 40; i++) { /* each takes more than its bytes */
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "f2 [3]2f63%02x [1]31 [0] 00", i);
    }
    raw_send(lavish, all);
    CHECK_LOG("of at most 5000 are stored already (TDDP_STORE_MAX_TOTAL_BYTES)");
    tddp_net_close(lavish);
    CHECK_TEXT(seen(good, "c"), ""); /* they went with their client */
    own(good, "b", "1", 0);
    CHECK_RAW(watcher, "00 [1] [2]2f62 [1]31");
    tddp_net_close(watcher);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

static void skip_bytes(int fd, size_t size)
{
    char bytes[512];
    size_t done = 0;
    CHECK(size <= sizeof bytes);
    CHECK_OK(tddp_net_recv(fd, bytes, size, &done, tddp_deadline_after_ms(10000), -1));
}

TEST(a_watcher_whose_answer_would_be_too_long_is_dropped_with_its_keys)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_request_bytes = 200;
    tddp_store_server *server = start(&opts);
    tddp_store *good = client_of(tddp_store_server_port(server));
    int watcher = greet(tddp_store_server_port(server));
    char value[151];
    memset(value, 'x', 150);
    value[150] = '\0';
    raw_send(watcher, "f2 [2]2f6d [1]31 [0] 00 f3 [2]2f61 00");
    CHECK_RAW(watcher, "01 [1]31 00 [0]");
    CHECK_TEXT(seen(good, "m"), "m=1");
    static const char *const keys[] = {"a1", "a2", "a3"};
    for (size_t i = 0; i < 3; i++) {
        raw_send(watcher, "f3 [2]2f61 00"); /* waits, and is answered by what comes now */
        CHECK_SILENT(watcher);
        CHECK_OK(tddp_store_set(good, text(keys[i]), text(value), NULL));
        if (i < 2) {
            skip_bytes(watcher, 1 + 8 + (i + 1) * (8 + 3 + 8 + 150));
        }
    }
    CHECK_HUNG_UP(watcher);
    CHECK_LOG("more than 400 bytes of answers wait for it");
    CHECK_TEXT(seen(good, "m"), "");
    tddp_net_close(watcher);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* --- watches --------------------------------------------------------------------------------- */

TEST(a_watch_returns_at_once_and_then_when_something_has_changed)
{
    tddp_store_server *server = loopback_server();
    tddp_store *other = client_of(tddp_store_server_port(server));
    tddp_store *store = client_of(tddp_store_server_port(server));
    tddp_slice keys[] = {text("p/a"), text("p/b")};
    tddp_slice values[] = {text("1"), text("2")};
    int64_t sum;
    int deleted;
    CHECK_OK(tddp_store_multi_set(other, keys, values, 2, NULL));
    CHECK_OK(tddp_store_add(other, text("q"), 1, NULL, &sum));
    CHECK_TEXT(seen(store, "p/"), "p/a=1 p/b=2");
    check_quiet(store, "p/");
    CHECK_OK(tddp_store_set(other, text("p/a"), text("1"), NULL)); /* as it is */
    own(other, "p/b", "2", 60000);                                 /* only renewed */
    CHECK_OK(tddp_store_append(other, text("p/b"), text(""), NULL));
    CHECK_OK(tddp_store_add(other, text("q"), 1, NULL, &sum)); /* another prefix */
    check_quiet(store, "p/");
    CHECK_OK(tddp_store_num_keys(store, NULL, &sum)); /* ends the request that is under way */
    CHECK_OK(tddp_store_set(other, text("p/a"), text("3"), NULL));
    CHECK_OK(tddp_store_set(other, text("p/a"), text("1"), NULL));
    CHECK_OK(tddp_store_add(other, text("q"), 1, NULL, &sum));
    CHECK_TEXT(seen(store, "p/"), "p/a=1 p/b=2"); /* it has changed, and back */
    CHECK_OK(tddp_store_delete_key(other, text("p/a"), NULL, &deleted));
    CHECK_TEXT(seen(store, "p/"), "p/b=2");
    CHECK_TEXT(seen(store, "q"), "q=3"); /* another prefix is told at once */
    CHECK_TEXT(seen(store, "p/"), "p/b=2");
    CHECK_OK(tddp_store_set(store, text("p/mine"), text("4"), NULL)); /* one's own changes too */
    CHECK_TEXT(seen(store, "p/"), "p/b=2 p/mine=4");
    tddp_store_release(store);
    tddp_store_release(other);
    tddp_store_server_stop(server);
}

/* Whatever comes between two watches, and when. */
TEST(a_watch_that_was_ended_early_loses_no_change)
{
    tddp_store_server *server = loopback_server();
    tddp_store *other = client_of(tddp_store_server_port(server));
    tddp_store *store = client_of(tddp_store_server_port(server));
    tddp_cancel *cancel;
    tddp_store_entries got;
    int64_t number;
    char value[16];
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_wait wait = {.timeout_ms = 20000, .cancel = cancel};
    CHECK_TEXT(seen(store, "k"), "");
    for (int i = 0; i < 12; i++) {
        if (i % 2) {
            check_quiet(store, "k");
        } else {
            pthread_t thread;
            tddp_cancel_reset(cancel);
            CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
            CHECK_STATUS(tddp_store_watch(store, text("k"), &wait, &got), TDDP_CANCELED);
            CHECK_CONTAINS(tddp_error_message(), "interrupted while watching keys that begin with");
            pthread_join(thread, NULL);
        }
        if (i % 3 == 0) { /* ends the request that is under way */
            CHECK_OK(tddp_store_num_keys(store, NULL, &number));
        }
        snprintf(value, sizeof value, "%d", i);
        CHECK_OK(tddp_store_set(other, text("k"), text(value), NULL));
        CHECK_VALUE(other, "k", value);
        if (i % 3 == 1) { /* finds its answer, which the next watch gets all the same */
            CHECK_VALUE(store, "k", value);
        }
        char expected[32];
        snprintf(expected, sizeof expected, "k=%d", i);
        CHECK_TEXT(seen(store, "k"), expected);
    }
    check_quiet(store, "k");
    CHECK_CONTAINS(tddp_error_message(),
                   "timed out after 20 ms watching keys that begin with \"k\" (store 127.0.0.1:");
    tddp_cancel_free(cancel);
    tddp_store_release(store);
    tddp_store_release(other);
    tddp_store_server_stop(server);
}

TEST(on_the_wire_a_watch_is_ended_as_a_wait_is)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    int other = greet(tddp_store_server_port(server));
    raw_send(fd, "f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [0]");
    raw_send(fd, "f3 [2]2f61 00 0c");
    CHECK_RAW(fd, "01");
    raw_send(other, "01 [2]2f61 [1]31 07");
    CHECK_RAW(other, "[1]");
    CHECK_SILENT(fd);
    raw_send(fd, "f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]31");
    raw_send(fd, "f3 [2]2f61 01"); /* at once */
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]31");
    raw_send(fd, "f3 [2]2f61 00 06 [1] [2]2f62"); /* a wait takes its place */
    raw_send(other, "01 [2]2f61 [1]32 01 [2]2f62 [0] 07");
    CHECK_RAW(other, "[2]");
    CHECK_RAW(fd, "00");
    CHECK_SILENT(fd);
    raw_send(fd, "f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]32");
    tddp_net_close(fd);
    tddp_net_close(other);
    tddp_store_server_stop(server);
}

TEST(several_changes_at_a_time_make_one_answer)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    int other = greet(tddp_store_server_port(server));
    raw_send(other, "f2 [2]2f61 [1]31 [0] 00 f2 [2]2f62 [1]32 [0] 00");
    CHECK_RAW(other, "01 [1]31 01 [1]32");
    raw_send(fd, "f3 [2]2f61 00 f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]31");
    tddp_net_close(other);
    CHECK_RAW(fd, "00 [0]");
    raw_send(fd, "f3 [2]2f61 00 07");
    CHECK_RAW(fd, "[0]"); /* no second answer, and no second key */
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

/* --- a server that is stopped ---------------------------------------------------------------- */

static void stop_server(bool stop)
{
    pid_t pid = check_rank_pid(1);
    CHECK_INT(kill(pid, stop ? SIGSTOP : SIGCONT), 0);
    if (stop) {
        CHECK_AWAIT_STOPPED(pid);
    }
}

/* Whether the key was there all the time, while its client sent something in each period of its
 * limit and the server was stopped for longer than that. */
static bool outlives_a_stop(tddp_store *watcher, int port_used)
{
    static const char renew[] = "f2 [2]2f6b [1]76 [300] 00";
    int fd = greet(port_used);
    raw_send(fd, renew);
    CHECK_RAW(fd, "01 [1]76");
    (void)seen(watcher, "k");
    stop_server(true);
    raw_send(fd, renew);
    usleep(450 * 1000);
    stop_server(false);
    CHECK_RAW(fd, "01 [1]76");
    tddp_store_entries got = {0};
    tddp_wait soon = within_ms(20);
    tddp_status status = tddp_store_watch(watcher, text("k"), &soon, &got);
    /* On a busy machine something else may have taken longer than the limit. */
    bool there = status == TDDP_TIMEOUT || got.keys.count > 0;
    tddp_store_entries_free(&got);
    while (there) { /* and it does go when the client is silent */
        there = *seen(watcher, "k");
    }
    tddp_net_close(fd);
    return status == TDDP_TIMEOUT;
}

/* A watch that runs out of time while the server is stopped costs nothing. */
static void check_patience(tddp_store *watcher, int port_used)
{
    tddp_store *store = client_of(port_used);
    own(store, "mine", "1", 0);
    CHECK_TEXT(seen(store, "mine"), "mine=1");
    CHECK_TEXT(seen(watcher, "mine"), "mine=1");
    stop_server(true);
    for (int i = 0; i < 3; i++) {
        check_quiet(store, "mine");
    }
    stop_server(false);
    own(store, "mine", "1", 0);
    check_quiet(watcher, "mine"); /* it was there all the time */
    tddp_store_release(store);
    CHECK_TEXT(seen(watcher, "mine"), "");
}

MULTI_TEST(a_server_that_was_stopped_reads_what_lies_there_before_anything_expires, 2, 60)
{
    if (rank == 1) {
        tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
        opts.host = "127.0.0.1";
        opts.port = port;
        tddp_store_server *server = start(&opts);
        check_signal(READY);
        CHECK_AWAIT(OVER, 1);
        tddp_store_server_stop(server);
        return;
    }
    CHECK_AWAIT(READY, 1);
    tddp_store *watcher = client_of(port);
    bool outlived = false;
    for (int i = 0; i < 10 && !outlived; i++) {
        outlived = outlives_a_stop(watcher, port);
    }
    CHECK(outlived);
    check_patience(watcher, port);
    tddp_store_release(watcher);
    check_signal(OVER);
}

/* --- other stores ---------------------------------------------------------------------------- */

TEST(stores_without_a_server_say_that_they_have_neither)
{
    static const char *const others[] = {"hash", "prefix/hash", "file"};
    for (int i = 0; i < 3; i++) {
        fixture f = fixture_open(others[i]);
        int set = 7;
        tddp_store_entries got;
        CHECK_STATUS(
            tddp_store_set_ephemeral(f.store, text("k"), text("v"), 0, 0, NULL, &set, NULL),
            TDDP_UNSUPPORTED);
        CHECK_CONTAINS(tddp_error_message(), i < 2 ? "a hash store has no ephemeral keys"
                                                   : "a file store has no ephemeral keys");
        CHECK_INT(set, 7);
        CHECK_STATUS(tddp_store_watch(f.store, text("k"), NULL, &got), TDDP_UNSUPPORTED);
        CHECK_CONTAINS(tddp_error_message(), "has no watches");
        CHECK_OK(tddp_store_set(f.store, text("k"), text("v"), NULL));
        CHECK_VALUE(f.store, "k", "v");
        fixture_close(&f);
    }
}

TEST(arguments_are_checked)
{
    tddp_store_server *server = loopback_server();
    tddp_store *store = client_of(tddp_store_server_port(server));
    tddp_slice k = text("k");
    tddp_store_entries got;
    int set;
    CHECK_STATUS(tddp_store_set_ephemeral(NULL, k, k, 0, 0, NULL, &set, NULL),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_store_set_ephemeral(store, text(""), k, 0, 0, NULL, &set, NULL),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_store_set_ephemeral(store, k, (tddp_slice){NULL, 1}, 0, 0, NULL, &set, NULL),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_store_set_ephemeral(store, k, k, -1, 0, NULL, &set, NULL),
                 TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "limit -1 ms: expected 0 or more");
    CHECK_STATUS(tddp_store_set_ephemeral(store, k, k, 0, 0, NULL, NULL, NULL),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_store_watch(store, (tddp_slice){NULL, 1}, NULL, &got), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_store_watch(store, k, NULL, NULL), TDDP_INVALID_ARGUMENT);
    tddp_store_entries_free(NULL);
    tddp_store_release(store);
    tddp_store_server_stop(server);
}
