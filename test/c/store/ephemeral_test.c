/*
 * Keys that go with their connection: when they go, and what a server that was stopped makes of its
 * clients. model_test.c has random sequences of them.
 */
#include <signal.h>
#include <sys/wait.h>

#include "bench.h"
#include "ephemeral.h"

enum { READY, OVER, COMES }; /* events */

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

/* Nothing has come for so long, and the server looks `late_ms` after it wanted to. */
static void bench_look(bench *b, int64_t silent_ms, int64_t late_ms)
{
    int64_t now = tddp_now_ns();
    b->client->received_ns = now - silent_ms * TDDP_NS_PER_MS;
    b->server.expire_ns = now - late_ms * TDDP_NS_PER_MS;
    tddp_server_expire(&b->server);
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
static void check_long_wait(tddp_store *watcher, int port_used)
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
    check_long_wait(watcher, port);
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
