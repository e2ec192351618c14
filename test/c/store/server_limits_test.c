/*
 * What a server takes and for how long it waits: limits from options and from the environment, each
 * with a client that goes beyond and one that notices nothing; clients that are silent or stop in
 * the middle.
 */
#include <sys/resource.h>

#include "store/server/server.h"
#include "store_fixture.h"

/* Sends what goes beyond; the client is dropped with one line, and `good` is served on. */
static void check_dropped(tddp_store *good, const char *hex, const char *line)
{
    int before = log_lines();
    int fd = greet(tddp_tcp_store_port(good));
    raw_send(fd, hex);
    CHECK_HUNG_UP(fd);
    CHECK_LOG_LINES(before + 1);
    CHECK_LOG(line);
    CHECK_LOG("dropped client 127.0.0.1:");
    tddp_net_close(fd);
    CHECK_OK(tddp_store_set(good, text("still"), text("here"), NULL));
    CHECK_VALUE(good, "still", "here");
}

static void check_limits(tddp_store_server *server)
{
    tddp_store *good = client_of(tddp_store_server_port(server));
    check_dropped(good, "01 [11]",
                  "key of bytes 11, at most 10 allowed (TDDP_STORE_MAX_KEY_BYTES)");
    check_dropped(good, "01 [2]2f6b [65]",
                  "value of bytes 65, at most 64 allowed (TDDP_STORE_MAX_VALUE_BYTES)");
    check_dropped(good, "06 [4]",
                  "keys in one request: 4, at most 3 allowed (TDDP_STORE_MAX_KEYS)");
    check_dropped(good, "0b [3] [10]30313233343536373839 [60]",
                  "request of bytes 127, at most 120 allowed (TDDP_STORE_MAX_REQUEST_BYTES)");
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(limits_by_options)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_key_bytes = 10;
    opts.max_value_bytes = 64;
    opts.max_keys = 3;
    opts.max_request_bytes = 120;
    setenv("TDDP_STORE_MAX_KEY_BYTES", "1", 1); /* the option wins */
    check_limits(start(&opts));
}

TEST(limits_by_the_environment)
{
    tddp_store_server_opts opts = loopback_opts();
    setenv("TDDP_STORE_MAX_KEY_BYTES", "10", 1);
    setenv("TDDP_STORE_MAX_VALUE_BYTES", "64", 1);
    setenv("TDDP_STORE_MAX_KEYS", "3", 1);
    setenv("TDDP_STORE_MAX_REQUEST_BYTES", "120", 1);
    check_limits(start(&opts));
}

/* A server's settings without its thread. */
static tddp_store_server configured(void)
{
    tddp_store_server server = {0};
    tddp_store_server_opts opts = loopback_opts();
    CHECK_OK(tddp_server_configure(&server, &opts));
    CHECK(server.secret == NULL);
    return server;
}

TEST(what_is_not_set_is_as_documented)
{
    const uint64_t mib = 1 << 20;
    struct rlimit descriptors;
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &descriptors), 0);
    tddp_store_server server = configured();
    CHECK_INT(server.limits.key_bytes, 8 * 1024);
    CHECK_INT(server.limits.value_bytes, 8 * mib);
    CHECK_INT(server.limits.keys, 131072);
    CHECK_INT(server.limits.request_bytes, 16 * 8 * mib);
    CHECK_INT(server.most_bytes, 1024 * mib);
    CHECK_INT(server.most_clients, 65536);
    CHECK_INT(server.most_buffered, 1024 * mib);
    CHECK_INT(server.client_timeout_ms, 60000);
    descriptors.rlim_cur = 400;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &descriptors), 0);
    CHECK_INT(configured().most_pending, 101);
    CHECK_INT(setenv("TDDP_STORE_MAX_VALUE_BYTES", "33554432", 1), 0);
    server = configured();
    CHECK_INT(server.limits.request_bytes, 16 * 32 * mib);
    CHECK_INT(server.most_buffered, 4 * 16 * 32 * mib);
    CHECK_INT(setenv("TDDP_STORE_MAX_VALUE_BYTES", "10", 1), 0);
    CHECK_INT(configured().limits.request_bytes, 16 * 8 * mib);
}

TEST(each_variable_sets_its_own_limit)
{
    static const char *const names[] = {
        "TDDP_STORE_MAX_KEY_BYTES",    "TDDP_STORE_MAX_VALUE_BYTES",
        "TDDP_STORE_MAX_KEYS",         "TDDP_STORE_MAX_REQUEST_BYTES",
        "TDDP_STORE_MAX_TOTAL_BYTES",  "TDDP_STORE_MAX_CLIENTS",
        "TDDP_STORE_MAX_PENDING",      "TDDP_STORE_MAX_BUFFERED_BYTES",
        "TDDP_STORE_CLIENT_TIMEOUT_MS"};
    enum { COUNT = sizeof names / sizeof *names };
    for (int i = 0; i < COUNT; i++) {
        char value[16];
        (void)snprintf(value, sizeof value, "%d", 100 + i);
        CHECK_INT(setenv(names[i], value, 1), 0);
    }
    tddp_store_server server = configured();
    const uint64_t got[COUNT] = {
        server.limits.key_bytes,     server.limits.value_bytes, server.limits.keys,
        server.limits.request_bytes, server.most_bytes,         server.most_clients,
        server.most_pending,         server.most_buffered,      (uint64_t)server.client_timeout_ms};
    for (int i = 0; i < COUNT; i++) {
        CHECK_INT(got[i], 100 + i);
    }
}

TEST(variables_are_checked)
{
    static const char *const names[] = {
        "TDDP_STORE_MAX_KEY_BYTES",    "TDDP_STORE_MAX_VALUE_BYTES",
        "TDDP_STORE_MAX_KEYS",         "TDDP_STORE_MAX_REQUEST_BYTES",
        "TDDP_STORE_MAX_TOTAL_BYTES",  "TDDP_STORE_MAX_CLIENTS",
        "TDDP_STORE_MAX_PENDING",      "TDDP_STORE_MAX_BUFFERED_BYTES",
        "TDDP_STORE_CLIENT_TIMEOUT_MS"};
    tddp_store_server_opts opts = loopback_opts();
    tddp_store_server *server;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        static const char *const wrong[] = {"", "0", "-1", "8k", "99999999999999999999"};
        for (size_t j = 0; j < sizeof wrong / sizeof *wrong; j++) {
            char expected[160];
            setenv(names[i], wrong[j], 1);
            CHECK_STATUS(tddp_store_server_start(&opts, &server), TDDP_INVALID_ARGUMENT);
            snprintf(expected, sizeof expected,
                     "%s is \"%s\": expected a whole number of 1 or more", names[i], wrong[j]);
            CHECK_TEXT(tddp_error_message(), expected);
        }
        setenv(names[i], "9223372036854775807", 1); /* no limit at all */
        tddp_store_server_stop(start(&opts));
        unsetenv(names[i]);
    }
}

TEST(all_that_is_stored_has_a_limit)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_total_bytes = 2000;
    tddp_store_server *server = start(&opts);
    tddp_store *good = client_of(tddp_store_server_port(server));
    char kilobyte[1001];
    memset(kilobyte, 'x', 1000);
    kilobyte[1000] = '\0';
    CHECK_OK(tddp_store_set(good, text("a"), text(kilobyte), NULL));
    char too_much[4096];
    static const char *const parts[] = {"09 [2]2f62 [850]", "0e [2]2f62 [850]",
                                        "02 [2]2f62 [0] [850]", "0b [1] [2]2f62 [850]",
                                        "01 [2]2f62 [850]"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        memset(too_much, '\0', sizeof too_much);
        strcpy(too_much, parts[i]);
        memset(too_much + strlen(too_much), '6', 1700);
        check_dropped(good, too_much, "of at most 2000 are stored already");
        CHECK_LOG("(TDDP_STORE_MAX_TOTAL_BYTES)");
    }
    /* The same size again, smaller ones and deleting are fine, and give room again. */
    kilobyte[0] = 'y';
    CHECK_OK(tddp_store_set(good, text("a"), text(kilobyte), NULL));
    CHECK_VALUE(good, "a", kilobyte);
    int deleted;
    CHECK_OK(tddp_store_delete_key(good, text("none"), NULL, &deleted));
    CHECK_INT(deleted, 0);
    CHECK_OK(tddp_store_delete_key(good, text("a"), NULL, &deleted));
    CHECK_INT(deleted, 1);
    for (int i = 0; i < 100; i++) { /* nothing of what is gone counts on */
        CHECK_OK(tddp_store_set(good, text("b"), text(kilobyte), NULL));
        CHECK_OK(tddp_store_delete_key(good, text("b"), NULL, &deleted));
        CHECK_INT(deleted, 1);
    }
    /* Keys without values count too: beside `still`, 20 of 92 bytes have room. */
    int fd = greet(tddp_store_server_port(server));
    for (int i = 0; i < 20; i++) {
        char hex[64];
        snprintf(hex, sizeof hex, "01 [4]2f6b%02x%02x [0]", i, i);
        raw_send(fd, hex);
    }
    raw_send(fd, "07");
    CHECK_RAW(fd, "[21]");
    check_dropped(good, "01 [4]2f6bffff [0]", "a value of 0 bytes, where");
    raw_send(fd, "08 [4]2f6b0000 08 [4]2f6b0101 08 [4]2f6b0202 08 [4]2f6b0303");
    CHECK_RAW(fd, "[1] [1] [1] [1]");
    for (int i = 0; i < 20; i++) { /* nor of what was taken from a queue */
        raw_send(fd, "0e [2]2f71 [2]6162 0e [2]2f71 [3]636465 0f [2]2f71 0f [2]2f71 0f [2]2f71");
        CHECK_RAW(fd, "[2] [2]6162 [1] [3]636465 [0]");
    }
    tddp_net_close(fd);
    int64_t sum;
    CHECK_OK(tddp_store_add(good, text("n"), 1, NULL, &sum));
    for (int i = 0; i < 50; i++) { /* a counter takes no more room for counting */
        CHECK_OK(tddp_store_add(good, text("n"), 1, NULL, &sum));
    }
    CHECK_INT(sum, 51);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(clients_have_a_limit)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_clients = 2;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    for (int i = 0; i < 3; i++) { /* who leaves makes room */
        int second = greet(port_used);
        int before = log_lines();
        int third = raw_connect(port_used);
        CHECK_HUNG_UP(third);
        CHECK_LOG_LINES(before + 1);
        CHECK_LOG("cannot serve client 127.0.0.1:");
        CHECK_LOG("there are 2 already (TDDP_STORE_MAX_CLIENTS)");
        tddp_net_close(third);
        tddp_net_close(second);
        CHECK_OK(tddp_store_set(good, text("k"), text("v"), NULL));
        CHECK_VALUE(good, "k", "v");
    }
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* A client that has to send or read something is dropped after the timeout, with one line each; an
 * idle one never. */
TEST(who_stops_in_the_middle_is_dropped_in_time)
{
    static const struct {
        const char *bytes;
        const char *line;
    } rows[] = {
        {"", "it sent nothing for 0.6 s (TDDP_STORE_CLIENT_TIMEOUT_MS)"},
        {"00", "its first message is not complete after 0.6 s"},
        {"00 cef785", "its first message is not complete after 0.6 s"},
        {"00 cef7853c", "its first message is not complete after 0.6 s"},
        {"00 [2]2f", "its first message is not complete after 0.6 s"},
        {"05 [9] [2]2f6b", "its first message is not complete after 0.6 s"},
        {HELLO "01 [2]2f", "10 bytes of a message of 11 or more arrived, only 0 more in 0.6 s"},
        {HELLO "01 [2]2f6b [100]3132", "21 bytes of a message of 119 or more arrived"},
    };
    tddp_store_server_opts opts = loopback_opts();
    opts.client_timeout_ms = 600;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    int idle = greet(port_used);
    int waiting = greet(port_used);
    raw_send(waiting, "06 [1] [3]2f676f");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int before = log_lines();
        int64_t start_ns = tddp_now_ns();
        int fd = raw_connect(port_used);
        raw_send(fd, rows[i].bytes);
        if (strncmp(rows[i].bytes, HELLO, strlen(HELLO)) == 0) {
            CHECK_RAW(fd, "d5590000");
        }
        CHECK_HUNG_UP(fd);
        CHECK(tddp_now_ns() - start_ns >= 599 * TDDP_NS_PER_MS);
        CHECK_LOG_LINES(before + 1);
        CHECK_LOG(rows[i].line);
        tddp_net_close(fd);
    }
    CHECK_OK(tddp_store_set(good, text("go"), text("1"), NULL));
    CHECK_RAW(waiting, "00");
    raw_send(idle, "0d 01020304");
    CHECK_RAW(idle, "01020304");
    tddp_net_close(idle);
    tddp_net_close(waiting);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(the_silent_connection_of_an_older_client_stays)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.client_timeout_ms = 600;
    tddp_store_server *server = start(&opts);
    int silent = raw_connect(tddp_store_server_port(server));
    int asking = raw_connect(tddp_store_server_port(server));
    int other = raw_connect(tddp_store_server_port(server));
    raw_send(asking, "06");
    raw_send(other, "06");
    CHECK_RAW(asking, "[0]");
    CHECK_RAW(other, "[0]");
    tddp_net_close(other);
    usleep(1500000); /* longer than that */
    raw_send(silent, "06");
    CHECK_RAW(silent, "[0]");
    CHECK_LOG_LINES(0);
    tddp_net_close(silent);
    /* Once the last client of that protocol has left, silent connections are dropped again. */
    silent = raw_connect(tddp_store_server_port(server));
    tddp_net_close(asking);
    CHECK_HUNG_UP(silent);
    CHECK_LOG("it sent nothing for 0.6 s");
    tddp_net_close(silent);
    tddp_store_server_stop(server);
}
