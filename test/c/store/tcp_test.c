/*
 * The TCP client: opening, waiting for workers, failures, forks, and what becomes of a store after
 * each.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "store_fixture.h"
#include "store/tcp/tcp.h"

/* --- opening --------------------------------------------------------------------------------- */

enum { RANK_0, RANK_1, COMES, HOLDER, SETTER }; /* events */

static tddp_tcp_store_opts opts_for(int port, int world_size, bool is_server, int64_t timeout_ms)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = port;
    opts.world_size = world_size;
    opts.is_server = is_server;
    opts.timeout_ms = timeout_ms;
    return opts;
}

TEST(options_are_checked)
{
    tddp_store *store = NULL;
    tddp_tcp_store_opts opts = opts_for(0, 0, false, 1000);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "port 0: expected 1 to 65535");
    opts = opts_for(29500, -1, false, 1000);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_INVALID_ARGUMENT);
    opts = opts_for(29500, 1, false, 1000);
    opts.host = "";
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_INVALID_ARGUMENT);
    opts.host = "127.0.0.1";
    opts.size = 0;
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_tcp_store_open(NULL, NULL, &store), TDDP_INVALID_ARGUMENT);
    tddp_tcp_store_opts_init(&opts, sizeof opts);
    CHECK_INT(opts.size, sizeof opts);
    CHECK_INT(opts.timeout_ms, TDDP_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_INT(opts.listen_fd, -1);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "TCP store: out is NULL");
    CHECK(!store);
}

TEST(an_unreachable_server_is_named_with_the_reason)
{
    tddp_store *store = NULL;
    tddp_tcp_store_opts opts = opts_for(port, 2, false, 300);
    int64_t start = tddp_now_ns();
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_NETWORK);
    int64_t took_ms = (tddp_now_ns() - start) / TDDP_NS_PER_MS;
    CHECK(took_ms >= 300);
    char expected[128];
    snprintf(expected, sizeof expected, "s: cannot connect to 127.0.0.1:%d: Connection refused",
             port);
    CHECK_CONTAINS(tddp_error_message(), expected);
    snprintf(expected, sizeof expected, "cannot reach the store 127.0.0.1:%d, tried for ", port);
    CHECK_CONTAINS(tddp_error_message(), expected);
    opts.host = "no such host";
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "cannot find the address of \"no such host\"");
    CHECK(!store);
}

TEST(opening_can_be_cancelled)
{
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    tddp_wait wait = {.timeout_ms = -1, .cancel = cancel};
    tddp_tcp_store_opts opts = opts_for(port, 2, false, 20000);
    tddp_store *store;
    CHECK_STATUS(tddp_tcp_store_open(&opts, &wait, &store), TDDP_CANCELED);
    opts = opts_for(0, 2, true, 20000);
    CHECK_STATUS(tddp_tcp_store_open(&opts, &wait, &store), TDDP_CANCELED);
    tddp_cancel_free(cancel);
}

static void *serve_late(void *data)
{
    CHECK_AWAIT_ASLEEP(getpid()); /* between two tries */
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = *(int *)data;
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    return server;
}

TEST(a_server_that_comes_late_is_waited_for)
{
    pthread_t thread;
    void *server;
    CHECK_INT(pthread_create(&thread, NULL, serve_late, &port), 0);
    tddp_store *store = client_of(port);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    pthread_join(thread, &server);
    tddp_store_release(store);
    tddp_store_server_stop(server);
}

/* Answers every hello with `answer`, or hangs up at once if it is NULL. */
typedef struct stranger {
    int fd;
    const char *answer;
    atomic_int stop;
} stranger;

static void *be_strange(void *data)
{
    stranger *s = data;
    while (!atomic_load(&s->stop)) {
        int fd;
        tddp_net_address from;
        if (tddp_net_accept(s->fd, &fd, &from)) {
            if (s->answer) {
                CHECK_RAW(fd, "00 cef7853c 0d");
                raw_send(fd, s->answer);
                CHECK_OK(tddp_net_poll(fd, POLLIN, tddp_deadline_after_ms(5000), -1));
            }
            tddp_net_close(fd);
        }
        usleep(1000);
    }
    return NULL;
}

TEST(a_stranger_on_the_port_is_named)
{
    stranger s = {.answer = "ffffffff"};
    CHECK_OK(tddp_net_listen("127.0.0.1", port, &s.fd));
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, be_strange, &s), 0);
    tddp_store *store;
    tddp_tcp_store_opts opts = opts_for(port, 0, false, 3000);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_PROTOCOL);
    CHECK_CONTAINS(tddp_error_message(), "not a store of PyTorch 2.x");
    atomic_store(&s.stop, 1);
    pthread_join(thread, NULL);
    tddp_net_close(s.fd);
}

TEST(a_server_that_hangs_up_on_the_hello_is_tried_until_the_time_is_up)
{
    stranger s = {.answer = NULL};
    CHECK_OK(tddp_net_listen("127.0.0.1", port, &s.fd));
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, be_strange, &s), 0);
    tddp_store *store;
    tddp_tcp_store_opts opts = opts_for(port, 0, false, 300);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "the hello was not answered");
    atomic_store(&s.stop, 1);
    pthread_join(thread, NULL);
    tddp_net_close(s.fd);
}

TEST(a_port_in_use_is_named)
{
    tddp_store *first;
    tddp_store *second;
    tddp_tcp_store_opts opts = opts_for(0, 1, true, 5000);
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &first));
    CHECK_TEXT(tddp_tcp_store_host(first), "127.0.0.1");
    opts.port = tddp_tcp_store_port(first);
    CHECK(opts.port > 0);
    tddp_store *view;
    CHECK_OK(tddp_prefix_store_create("p", first, &view));
    CHECK_TEXT(tddp_tcp_store_host(view), "127.0.0.1");
    CHECK_INT(tddp_tcp_store_port(view), opts.port);
    tddp_store_release(view);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &second), TDDP_ADDRESS_IN_USE);
    char expected[64];
    snprintf(expected, sizeof expected, ":%d: Address already in use", opts.port);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_store_release(first);
}

TEST(missing_workers_are_counted)
{
    tddp_store *store;
    tddp_tcp_store_opts opts = opts_for(port, 2, true, 250);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_TIMEOUT);
    char expected[128];
    snprintf(expected, sizeof expected,
             "timed out after 0.25 s waiting for clients: 1 of 2 joined (127.0.0.1:%d)", port);
    CHECK_TEXT(tddp_error_message(), expected);
    opts.wait_for_workers = 0;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    int64_t keys;
    CHECK_OK(tddp_store_num_keys(store, NULL, &keys));
    CHECK_INT(keys, 0);
    tddp_store_release(store);
}

/* Every ten seconds, were it not for the test. */
MULTI_TEST(a_line_tells_now_and_then_what_is_waited_for, 2, 30)
{
    CHECK_INT(tddp_tcp_report_every_ms, 10000);
    tddp_tcp_report_every_ms = 1000;
    tddp_log_set_sink(keep_log, NULL);
    tddp_store *store;
    /* One hosts a server and misses workers, the other asks at a port where nobody is. */
    tddp_tcp_store_opts opts = opts_for(rank == 0 ? 0 : port, 3, rank == 0, 1900);
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), rank == 0 ? TDDP_TIMEOUT : TDDP_NETWORK);
    CHECK_INT(*log_count(), 1);
    CHECK_LOG(rank == 0 ? "waiting for 2 of 3 workers at the store 127.0.0.1:"
                        : "does not answer after 1 s: cannot connect to 127.0.0.1:");
}

MULTI_TEST(only_the_servers_process_waits_for_the_workers, 2, 20)
{
    tddp_store *store;
    tddp_tcp_store_opts opts = opts_for(port, 2, rank == 0, 20000);
    if (rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK_0);
        check_signal(COMES);
    } else {
        check_will_block(RANK_0);
    }
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    if (rank == 0) {
        CHECK_INT(check_signals(COMES), 1);
        CHECK_VALUE(store, "bye", "1");
    } else {
        CHECK_OK(tddp_store_set(store, text("bye"), text("1"), NULL));
    }
    tddp_store_release(store);
}

TEST(a_listening_socket_can_be_taken_over)
{
    tddp_store *store;
    tddp_tcp_store_opts opts = opts_for(0, 1, true, 5000);
    opts.host = "some-name-that-is-not-looked-up";
    CHECK_OK(tddp_net_listen("127.0.0.1", port, &opts.listen_fd));
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    CHECK_INT(tddp_tcp_store_port(store), port);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    tddp_store_release(store);
}

/* --- failures afterwards --------------------------------------------------------------------- */

static void *stop_soon(void *server)
{
    CHECK_AWAIT_ASLEEP(getpid());
    tddp_store_server_stop(server);
    return NULL;
}

TEST(the_servers_death_ends_a_wait_at_once)
{
    tddp_store_server *server = loopback_server();
    tddp_store *store = client_of(tddp_store_server_port(server));
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, stop_soon, server), 0);
    tddp_blob blob;
    CHECK_STATUS(tddp_store_get(store, text("k"), NULL, &blob), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "get: connection to 127.0.0.1:");
    CHECK_STATUS(tddp_store_set(store, text("k"), text("v"), NULL), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "is of no further use");
    pthread_join(thread, NULL);
    tddp_store_release(store);
}

MULTI_TEST(a_killed_server_process_ends_waits_at_once, 2, 20)
{
    if (rank == 0) {
        pid_t child = fork();
        if (child == 0) {
            tddp_store *store;
            tddp_tcp_store_opts opts = opts_for(port, 2, true, 20000);
            CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
            CHECK_AWAIT_BLOCKED(RANK_1);
            kill(getpid(), SIGKILL);
        }
        CHECK_INT(waitpid(child, NULL, 0), child);
        return;
    }
    tddp_store *store;
    tddp_tcp_store_opts opts = opts_for(port, 2, false, 20000);
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    tddp_slice key = text("never");
    check_will_block(RANK_1);
    CHECK_STATUS(tddp_store_wait(store, &key, 1, NULL), TDDP_NETWORK);
    tddp_store_release(store);
}

TEST(too_long_a_key_or_value_is_explained)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server *server = loopback_server();
    size_t size = (8 << 20) + 1;
    char *big = calloc(1, size);
    int64_t number;
    tddp_store *store = client_of(tddp_store_server_port(server));
    CHECK_STATUS(tddp_store_add(store, (tddp_slice){big, 9000}, 1, NULL, &number), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "keys of more than 8 KiB are refused");
    tddp_store_release(store);
    store = client_of(tddp_store_server_port(server));
    tddp_blob blob = {0};
    CHECK_STATUS(
        tddp_store_compare_set(store, text("k"), text(""), (tddp_slice){big, size}, NULL, &blob),
        TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "values of more than 8 MiB are refused");
    tddp_store_release(store);
    free(big);
    tddp_store_server_stop(server);
}

typedef struct hold {
    tddp_store *store;
    tddp_cancel *cancel;
} hold;

static void *hold_the_store(void *data)
{
    hold *h = data;
    tddp_slice key = text("never");
    tddp_wait wait = {.timeout_ms = 20000, .cancel = h->cancel};
    check_will_block(HOLDER);
    CHECK_STATUS(tddp_store_wait(h->store, &key, 1, &wait), TDDP_CANCELED);
    return NULL;
}

static void *trigger_it(void *cancel)
{
    tddp_cancel_trigger(cancel);
    return NULL;
}

TEST(waiting_for_another_threads_call_has_a_deadline_and_can_be_cancelled)
{
    tddp_store_server *server = loopback_server();
    hold h = {.store = client_of(tddp_store_server_port(server))};
    CHECK_OK(tddp_cancel_create(&h.cancel));
    tddp_cancel *mine;
    CHECK_OK(tddp_cancel_create(&mine));
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, hold_the_store, &h), 0);
    CHECK_AWAIT_BLOCKED(HOLDER);
    tddp_wait wait = {.timeout_ms = 50};
    CHECK_STATUS(tddp_store_set(h.store, text("k"), text("v"), &wait), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "timed out after 50 ms waiting for another thread's call");
    pthread_t trigger;
    wait = (tddp_wait){.timeout_ms = 20000, .cancel = mine};
    CHECK_INT(pthread_create(&trigger, NULL, trigger_it, mine), 0);
    CHECK_STATUS(tddp_store_set(h.store, text("k"), text("v"), &wait), TDDP_CANCELED);
    pthread_join(trigger, NULL);
    /* A clone has a connection of its own. */
    tddp_store *clone;
    CHECK_OK(tddp_store_clone(h.store, NULL, &clone));
    CHECK_OK(tddp_store_set(clone, text("k"), text("v"), NULL));
    CHECK_VALUE(clone, "k", "v");
    tddp_cancel_trigger(h.cancel);
    pthread_join(thread, NULL);
    CHECK_VALUE(h.store, "k", "v");
    tddp_store_release(clone);
    tddp_store_release(h.store);
    tddp_cancel_free(h.cancel);
    tddp_cancel_free(mine);
    tddp_store_server_stop(server);
}

/* As groups wait: one short wait directly after the other. */
static void *wait_twice(void *data)
{
    const hold *h = data;
    tddp_slice key = text("k");
    hold_the_store(data);
    CHECK_OK(tddp_store_wait(h->store, &key, 1, NULL));
    return NULL;
}

static void *set_k(void *store)
{
    check_will_block(SETTER);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    return NULL;
}

/* The second wait is for what the thread that came before it is to set. */
TEST(threads_get_the_connection_in_the_order_in_which_they_came)
{
    tddp_store_server *server = loopback_server();
    hold h = {.store = client_of(tddp_store_server_port(server))};
    CHECK_OK(tddp_cancel_create(&h.cancel));
    for (int i = 0; i < 10; i++) {
        pthread_t waits;
        pthread_t sets;
        int deleted;
        check_events_clear();
        tddp_cancel_reset(h.cancel);
        CHECK_INT(pthread_create(&waits, NULL, wait_twice, &h), 0);
        CHECK_AWAIT_BLOCKED(HOLDER);
        CHECK_INT(pthread_create(&sets, NULL, set_k, h.store), 0);
        CHECK_AWAIT_BLOCKED(SETTER);
        tddp_cancel_trigger(h.cancel);
        pthread_join(sets, NULL);
        pthread_join(waits, NULL);
        CHECK_OK(tddp_store_delete_key(h.store, text("k"), NULL, &deleted));
    }
    tddp_cancel_free(h.cancel);
    tddp_store_release(h.store);
    tddp_store_server_stop(server);
}

TEST(a_clone_keeps_the_server_alive)
{
    tddp_store *store;
    tddp_store *clone;
    tddp_tcp_store_opts opts = opts_for(0, 1, true, 5000);
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_OK(tddp_store_clone(store, NULL, &clone));
    CHECK_INT(tddp_tcp_store_port(clone), tddp_tcp_store_port(store));
    tddp_store_release(store);
    CHECK_VALUE(clone, "k", "v");
    tddp_store_release(clone);
}

TEST(a_store_made_before_a_fork_refuses_the_child)
{
    tddp_store *store;
    tddp_store *clone = NULL;
    tddp_tcp_store_opts opts = opts_for(0, 1, true, 5000);
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        tddp_blob blob;
        CHECK_STATUS(tddp_store_set(store, text("k"), text("child"), NULL), TDDP_FORKED);
        CHECK_CONTAINS(tddp_error_message(), "a forked child opens a store of its own");
        CHECK_STATUS(tddp_store_get(store, text("k"), NULL, &blob), TDDP_FORKED);
        CHECK_STATUS(tddp_store_clone(store, NULL, &clone), TDDP_FORKED);
        tddp_store *own = client_of(tddp_tcp_store_port(store));
        CHECK_VALUE(own, "k", "v");
        tddp_store_release(own);
        tddp_store_release(store);
        exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_VALUE(store, "k", "v");
    tddp_store_release(store);
}
