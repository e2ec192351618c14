/*
 * Clients that want to keep the server from serving others, or to have it take all memory: answers
 * without end, halves of requests, answers that are not read, silent connections, bytes
 * that trickle. Each beside a client that must be served meanwhile.
 */
#include <errno.h>
#include <sys/resource.h>

#include "bench.h"

static void check_served(tddp_store *good)
{
    CHECK_OK(tddp_store_set(good, text("still"), text("here"), NULL));
    CHECK_VALUE(good, "still", "here");
}

static void send_zeros(int fd, size_t size)
{
    static const char zeros[65536];
    while (size) {
        size_t done = 0;
        size_t part = size < sizeof zeros ? size : sizeof zeros;
        if (tddp_net_send(fd, zeros, part, &done, tddp_deadline_after_ms(10000), -1)) {
            return; /* it was dropped */
        }
        size -= part;
    }
}

/* --- answers --------------------------------------------------------------------------------- */

TEST(a_list_of_keys_has_the_limit_of_every_answer)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_request_bytes = 1000;
    tddp_store_server *server = start(&opts);
    tddp_store *good = client_of(tddp_store_server_port(server));
    int fd = greet(tddp_store_server_port(server));
    for (int i = 0; i < 40; i++) {
        char name[64];
        snprintf(name, sizeof name, "a key of thirty-nine bytes and so on%3d", i);
        CHECK_OK(tddp_store_set(good, text(name), text(""), NULL));
    }
    tddp_blob_list keys; /* 48 bytes each: within twice the limit of a request */
    CHECK_OK(tddp_store_list_keys(good, NULL, &keys));
    CHECK_INT(keys.count, 40);
    tddp_blob_list_free(&keys);
    CHECK_OK(tddp_store_set(good,
                            text("one more, whose ninety bytes make the answer longer than that, "
                                 "as they are just too many here"),
                            text(""), NULL));
    check_served(good);
    raw_send(fd, "11");
    CHECK_HUNG_UP(fd);
    CHECK_LOG("more than 2000 bytes of answers wait for it (TDDP_STORE_MAX_REQUEST_BYTES)");
    check_served(good);
    tddp_net_close(fd);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* Nothing has come, and nothing is under way: the server has looked at what was sent before. */
static void check_held(int fd, tddp_store *good)
{
    for (int i = 0; i < 3; i++) {
        check_served(good);
    }
    char byte;
    CHECK_INT(recv(fd, &byte, 1, MSG_DONTWAIT), -1);
    CHECK_INT(errno, EAGAIN);
}

static void ask_for_big(int fd, int times)
{
    for (int i = 0; i < times; i++) {
        raw_send(fd, "03 [4]2f626967");
    }
}

static void check_big(int fd)
{
    static char answer[8 + (4 << 20)];
    size_t done = 0;
    CHECK_OK(tddp_net_recv(fd, answer, sizeof answer, &done, tddp_deadline_after_ms(10000), -1));
    CHECK_INT(tddp_wire_u64(answer), sizeof answer - 8);
}

/* Long answers wait where others are not read; short ones do not; and all go on in the end. */
TEST(answers_that_nobody_reads_have_a_limit_together)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_buffered_bytes = 32 << 20;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    char *value = calloc(1, 4 << 20);
    CHECK_OK(tddp_store_set(good, text("big"), (tddp_slice){value, 4 << 20}, NULL));
    free(value);
    int greedy[2];
    for (int i = 0; i < 2; i++) { /* more than the system's buffers take */
        greedy[i] = greet(port_used);
        ask_for_big(greedy[i], 12);
        check_served(good);
    }
    int late = greet(port_used);
    ask_for_big(late, 1);
    check_held(late, good);
    raw_send(late, "0d 01020304"); /* behind it, and in order */
    check_held(late, good);
    tddp_net_close(greedy[0]);
    tddp_net_close(greedy[1]);
    check_big(late);
    CHECK_RAW(late, "01020304");
    tddp_net_close(late);
    CHECK_LOG_LINES(0);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* --- requests -------------------------------------------------------------------------------- */

TEST(halves_of_requests_have_a_limit_together)
{
    enum { ATTACKERS = 20, HALF = 6000 }; /* takes 8 KiB */
    tddp_store_server_opts opts = loopback_opts();
    opts.max_buffered_bytes = 64 << 10;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    int slow = greet(port_used);
    raw_send(slow, "01 [2]2f6b [4000]");
    send_zeros(slow, 3000); /* takes 4 KiB: never the largest */
    check_served(good);
    int fds[ATTACKERS];
    for (int i = 0; i < ATTACKERS; i++) {
        fds[i] = greet(port_used);
        raw_send(fds[i], "01 [2]2f61 [100000]");
        send_zeros(fds[i], HALF);
    }
    CHECK_LOG_LINES(ATTACKERS - 3); /* room for three, and for the slow one */
    CHECK_LOG("(TDDP_STORE_MAX_BUFFERED_BYTES)");
    check_served(good);
    send_zeros(slow, 1000);
    raw_send(slow, "05 [1] [2]2f6b");
    CHECK_RAW(slow, "00");
    for (int i = 0; i < ATTACKERS; i++) {
        tddp_net_close(fds[i]);
    }
    tddp_net_close(slow);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(keys_that_are_waited_for_count_as_well)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_buffered_bytes = 64 << 10;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    int fd = greet(port_used);
    raw_send(fd, "06 [300]");
    for (int i = 0; i < 300; i++) {
        char hex[32];
        snprintf(hex, sizeof hex, "[3]2f%02x%02x", i / 256, i % 256);
        raw_send(fd, hex);
    }
    CHECK_HUNG_UP(fd);
    CHECK_LOG("(TDDP_STORE_MAX_BUFFERED_BYTES)");
    check_served(good);
    tddp_net_close(fd);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* --- places ---------------------------------------------------------------------------------- */

TEST(connections_that_say_nothing_give_way)
{
    enum { PLACES = 6 };
    tddp_store_server_opts opts = loopback_opts();
    opts.max_clients = PLACES;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    int silent[PLACES - 1];
    for (int i = 0; i < PLACES - 1; i++) {
        silent[i] = raw_connect(port_used);
        if (i == 0) {
            raw_send(silent[0], "00"); /* a part of a message is as good as nothing */
        }
    }
    int second = greet(port_used);
    CHECK_HUNG_UP(silent[0]);
    CHECK_LOG_LINES(1);
    CHECK_LOG(
        "it has not sent a complete message and gives way to a new one: 5 such are connected");
    int third = greet(port_used);
    CHECK_HUNG_UP(silent[1]);
    raw_send(silent[2], HELLO); /* the younger ones are still served */
    CHECK_RAW(silent[2], "d5590000");
    check_served(good);
    CHECK_LOG_LINES(2);
    tddp_net_close(second);
    tddp_net_close(third);
    for (int i = 0; i < PLACES - 1; i++) {
        tddp_net_close(silent[i]);
    }
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(pending_connections_have_a_limit_of_their_own)
{
    setenv("TDDP_STORE_MAX_PENDING", "2", 1);
    tddp_store_server_opts opts = loopback_opts();
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    int silent[3];
    for (int i = 0; i < 3; i++) {
        silent[i] = raw_connect(port_used);
    }
    CHECK_HUNG_UP(silent[0]);
    for (int i = 1; i < 3; i++) { /* who has spoken is not pending */
        raw_send(silent[i], HELLO);
        CHECK_RAW(silent[i], "d5590000");
    }
    int more[2] = {greet(port_used), greet(port_used)};
    raw_send(silent[1], "0d 01020304");
    CHECK_RAW(silent[1], "01020304");
    for (int i = 0; i < 3; i++) {
        tddp_net_close(silent[i]);
    }
    tddp_net_close(more[0]);
    tddp_net_close(more[1]);
    tddp_store_server_stop(server);
}

TEST(connections_that_say_nothing_do_not_take_the_last_descriptors)
{
    tddp_store_server_opts opts = loopback_opts();
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    int silent = raw_connect(port_used);
    int fd = greet(port_used); /* connections are accepted in their order */
    /* Room for our end of one more connection and nothing else. */
    int highest = dup(fd);
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit low = {.rlim_cur = (rlim_t)highest + 1, .rlim_max = limit.rlim_max};
    close(highest);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &low), 0);
    int late = greet(port_used);
    CHECK_HUNG_UP(silent);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    tddp_net_close(late);
    tddp_net_close(silent);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

/* --- time, which is set here rather than waited for --------------------------------------------
 */

static void bench_take_zeros(bench *b, size_t size)
{
    static const char zeros[1 << 20];
    tddp_server_client_take(&b->server, b->client, zeros, size);
    tddp_server_flush_unsent(&b->server);
}

/* The client's minute is over. */
static bool bench_survives(bench *b)
{
    CHECK(b->client->late_ns != 0);
    b->client->late_ns = 1;
    tddp_server_late_drop(&b->server);
    return !b->client->dropped;
}

TEST(single_bytes_do_not_prolong_a_message)
{
    bench *b = bench_open();
    bench_take(b, HELLO);
    CHECK_INT(b->client->late_ns, 0);
    bench_take(b, "01 [2]2f6b [1000000]");
    int64_t end = b->client->late_ns;
    for (int i = 0; i < 100; i++) {
        bench_take(b, "61");
    }
    CHECK_INT(b->client->late_ns, end);
    CHECK(!bench_survives(b));
    CHECK_LOG("more arrived, only 100 more in 60 s (TDDP_STORE_CLIENT_TIMEOUT_MS)");
    bench_close(b);
}

/* A slow line: 1 KiB in each second is enough, for as long as it takes. */
TEST(a_slow_message_that_moves_has_time)
{
    bench *b = bench_open();
    bench_take(b, HELLO "01 [2]2f6b [1000000]");
    for (int minutes = 0; minutes < 10; minutes++) {
        bench_take_zeros(b, 61440);
        CHECK(bench_survives(b));
    }
    bench_take_zeros(b, 1000000 - 10 * 61440);
    CHECK_INT(b->client->late_ns, 0);
    CHECK_INT(tddp_store_map_find(&b->server.values, (tddp_slice){"/k", 2})->value.size, 1000000);
    bench_take(b, "01 [2]2f6b [1000000]");
    bench_take_zeros(b, 61439);
    CHECK(!bench_survives(b));
    bench_close(b);
}

/* A complete message gives the next one its own period, but not to a client that does not read. */
TEST(whole_messages_do_not_prolong_the_reading)
{
    bench *b = bench_open();
    bench_take(b, HELLO "01 [2]2f6b [4000000]");
    for (int i = 0; i < 4; i++) {
        bench_take_zeros(b, 1000000);
    }
    CHECK_INT(b->client->late_ns, 0);
    bench_take(b, "01 [2]2f6c [9]");
    b->client->late_ns = 2;
    bench_take(b, "303030303030303030 01 [2]2f6c [9]");
    CHECK(b->client->late_ns > 2);
    bench_take(b, "303030303030303030 03 [2]2f6b");
    CHECK(b->client->out.size > 0);
    b->client->late_ns = 2;
    bench_take(b, "01 [2]2f6c [0] 0d 01020304");
    CHECK_INT(b->client->late_ns, 2);
    CHECK(!bench_survives(b));
    CHECK_LOG("bytes of its answers are left, of which it read 0 in 60 s");
    bench_close(b);
}

TEST(a_first_message_has_one_period_however_much_of_it_comes)
{
    bench *b = bench_open();
    bench_take(b, "00 [2]2f6b [1000000]");
    bench_take_zeros(b, 500000);
    CHECK(!bench_survives(b));
    CHECK_LOG("its first message is not complete after 60 s");
    bench_close(b);
}
