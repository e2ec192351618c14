/*
 * The server as seen from the wire: PyTorch's recorded bytes, misbehaving clients, crowds.
 */
#include <stdatomic.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "store_fixture.h"

static const struct {
    const char *request;
    const char *answer;
} record[] = {
    {"01 [2]2f6b [1]76", ""},
    {"01 [2]2f65 [0]", ""},
    {"06 [1] [2]2f6b", "00"},
    {"03 [2]2f6b", "[1]76"},
    {"06 [1] [2]2f65", "00"},
    {"03 [2]2f65", "[0]"},
    {"04 [2]2f6e [5]", "[5]"},
    {"04 [2]2f6e f9ffffffffffffff", "feffffffffffffff"},
    {"03 [2]2f6e", "[2]2d32"},
    {"07", "[3]"},
    {"02 [2]2f63 [0] [1]78", "[1]78"},
    {"02 [2]2f63 [1]78 [1]79", "[1]79"},
    {"02 [2]2f63 [3]626164 [1]7a", "[1]79"},
    {"02 [8]2f6d697373696e67 [3]6f6c64 [3]6e6577", "[3]6f6c64"},
    {"05 [2] [2]2f6b [2]2f6e", "00"},
    {"05 [2] [2]2f6b [5]2f6e6f7065", "01"},
    {"05 [0]", "00"},
    {"06 [2] [2]2f6b [2]2f6e", "00"},
    {"06 [0]", "00"},
    {"06 [2] [2]2f6b [2]2f6b", "00"},
    {"01 [3]2f6b32 [1]31", ""},
    {"08 [3]2f6b32", "[1]"},
    {"08 [5]2f6e6f7065", "[0]"},
    {"09 [2]2f61 [2]3132", ""},
    {"09 [2]2f61 [1]33", ""},
    {"03 [2]2f61", "[3]313233"},
    {"0b [2] [3]2f6d31 [1]31 [3]2f6d32 [2]3232", ""},
    {"0a [2] [3]2f6d31 [3]2f6d32", "[1]31 [2]3232"},
    {"0a [0]", ""},
    {"03 [5]2f6e6f7065", "[0]"}, /* absent: empty */
    {"0c", "01"},
    {"0d 01020304", "01020304"},
    {"04 [5]696e69742f [1]", "[1]"},
    {"10 [2]2f71", "[0]"},
    {"0f [2]2f71", "[0]"},
    {"0e [2]2f71 [1]76", ""},
    {"0e [2]2f71 [2]7777", ""},
    {"05 [1] [2]2f71", "00"},
    {"06 [1] [2]2f71", "00"},
    {"10 [2]2f71", "[2]"},
    {"0f [2]2f71", "[2] [1]76"},
    {"0f [2]2f71", "[1] [2]7777"},
    {"05 [1] [2]2f71", "01"},
    {"07", "[8]"},
    {"12 [2]2f62 [1]", "00"},
    {"03 [2]2f62", "[1]31"},
};
enum { RECORDED = sizeof record / sizeof *record };

TEST(recorded_requests_get_recorded_answers)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    for (int i = 0; i < RECORDED; i++) {
        printf("%s\n", record[i].request);
        raw_send(fd, record[i].request);
        CHECK_RAW(fd, record[i].answer);
    }
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(requests_may_come_in_any_pieces)
{
    tddp_store_server *server = loopback_server();
    /* Byte by byte. */
    int fd = raw_connect(tddp_store_server_port(server));
    char all[4096];
    size_t size = from_hex(HELLO, all);
    char answers[4096] = "d5590000";
    for (int i = 0; i < RECORDED; i++) {
        size += from_hex(record[i].request, all + size);
        strcat(answers, record[i].answer);
    }
    for (size_t i = 0; i < size; i++) {
        size_t done = 0;
        CHECK_OK(tddp_net_send(fd, all + i, 1, &done, tddp_deadline_after_ms(5000), -1));
        if (i % 16 == 0) {
            usleep(100);
        }
    }
    CHECK_RAW(fd, answers);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
    /* All in one. */
    server = loopback_server();
    fd = raw_connect(tddp_store_server_port(server));
    size_t done = 0;
    CHECK_OK(tddp_net_send(fd, all, size, &done, tddp_deadline_after_ms(5000), -1));
    CHECK_RAW(fd, answers);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(keys_are_listed)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    raw_send(fd, "11");
    CHECK_RAW(fd, "[0]");
    raw_send(fd, "01 [2]2f6b [1]76 11");
    CHECK_RAW(fd, "[1] [2]2f6b");
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(waits_end_when_the_last_key_comes)
{
    static const char *const waking[] = {
        "01 [2]2f79 [0]",       "04 [2]2f79 [3]",   "09 [2]2f79 [1]31", "02 [2]2f79 [0] [1]31",
        "0b [1] [2]2f79 [1]31", "0e [2]2f79 [1]31", "12 [2]2f79 [1]"};
    for (size_t i = 0; i < sizeof waking / sizeof *waking; i++) {
        tddp_store_server *server = loopback_server();
        int waiter = greet(tddp_store_server_port(server));
        int other = greet(tddp_store_server_port(server));
        raw_send(waiter, "06 [3] [2]2f78 [2]2f79 [2]2f79");
        raw_send(other, "01 [2]2f78 [1]31");
        CHECK_SILENT(waiter);
        /* What came counts, also when it goes again. */
        raw_send(other, "08 [2]2f78");
        CHECK_RAW(other, "[1]");
        raw_send(other, waking[i]);
        if (waking[i][1] == 'e') { /* a push wakes one wait, and this client has two for the key */
            raw_send(other, waking[i]);
        }
        CHECK_RAW(waiter, "00");
        CHECK_SILENT(waiter);
        tddp_net_close(waiter);
        tddp_net_close(other);
        tddp_store_server_stop(server);
    }
}

TEST(a_cancelled_wait_stays_cancelled)
{
    tddp_store_server *server = loopback_server();
    int waiter = greet(tddp_store_server_port(server));
    raw_send(waiter, "06 [1] [2]2f78 0c");
    CHECK_RAW(waiter, "01");
    raw_send(waiter, "01 [2]2f78 [1]31");
    CHECK_SILENT(waiter);
    /* The race: the keys come first. */
    raw_send(waiter, "06 [1] [2]2f78 0c");
    CHECK_RAW(waiter, "00 01");
    tddp_net_close(waiter);
    tddp_store_server_stop(server);
}

TEST(a_second_wait_replaces_the_first)
{
    tddp_store_server *server = loopback_server();
    int waiter = greet(tddp_store_server_port(server));
    raw_send(waiter, "06 [1] [2]2f78 06 [1] [2]2f79");
    raw_send(waiter, "01 [2]2f78 [1]31");
    CHECK_SILENT(waiter);
    raw_send(waiter, "01 [2]2f79 [1]31");
    CHECK_RAW(waiter, "00");
    tddp_net_close(waiter);
    tddp_store_server_stop(server);
}

TEST(a_barrier_lets_all_go_at_once)
{
    tddp_store_server *server = loopback_server();
    int fds[3];
    for (int i = 0; i < 3; i++) {
        fds[i] = greet(tddp_store_server_port(server));
        raw_send(fds[i], "12 [2]2f62 [3]");
        if (i < 2) {
            CHECK_SILENT(fds[i]);
        }
    }
    for (int i = 0; i < 3; i++) {
        CHECK_RAW(fds[i], "00");
        tddp_net_close(fds[i]);
    }
    tddp_store_server_stop(server);
}

TEST(a_push_wakes_one_waiter)
{
    tddp_store_server *server = loopback_server();
    int first = greet(tddp_store_server_port(server));
    int second = greet(tddp_store_server_port(server));
    raw_send(first, "06 [1] [2]2f71");
    CHECK_SILENT(first);
    raw_send(second, "06 [1] [2]2f71");
    CHECK_SILENT(second);
    int other = greet(tddp_store_server_port(server));
    raw_send(other, "0e [2]2f71 [1]76 10 [2]2f71");
    CHECK_RAW(other, "[1]");
    char byte;
    int woken = 0;
    int fds[] = {first, second};
    for (int i = 0; i < 2; i++) {
        size_t done = 0;
        woken += tddp_net_recv(fds[i], &byte, 1, &done, tddp_deadline_after_ms(100), -1) == TDDP_OK;
        tddp_net_close(fds[i]);
    }
    CHECK_INT(woken, 1);
    tddp_net_close(other);
    tddp_store_server_stop(server);
}

/* What ends a client, and what the line about it says. */
static const struct {
    const char *bytes;
    const char *line;
} misdeeds[] = {
    {"474554202f20485454502f312e310d0a", "uses the store protocol of neither PyTorch 2.x nor 1.13"},
    {"00 cef7853d 00000000", "key of bytes 1032189902, at most 8192"},
    {"0d d5590000", "neither"},
    {"16 03 01 02 00 01 00 01 fc", "neither"},
    {"02 [9000]", "key of bytes 9000, at most 8192"},
    {"04 [131073]", "keys in one request: 131073"},
    {HELLO "00 cef7853c", "a second VALIDATE"},
    {HELLO "13", "unknown opcode 0x13"},
    {HELLO "01 [9000]", "key of bytes 9000, at most 8192"},
    {HELLO "01 [2]2f6b ffffffffffffff7f", "value of bytes 9223372036854775807"},
    {HELLO "06 [131073]", "keys in one request: 131073"},
    {HELLO "01 [2]2f6b [1]76 04 [2]2f6b [1]", "its value is not a number"},
};

TEST(misbehaving_clients_are_dropped_with_a_line_and_hurt_nobody)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    for (size_t i = 0; i < sizeof misdeeds / sizeof *misdeeds; i++) {
        printf("%s\n", misdeeds[i].bytes);
        int before = *log_count();
        int fd = raw_connect(port_used);
        raw_send(fd, misdeeds[i].bytes);
        if (strncmp(misdeeds[i].bytes, HELLO, strlen(HELLO)) == 0) {
            CHECK_RAW(fd, "d5590000");
        }
        CHECK_HUNG_UP(fd);
        CHECK_LOG(misdeeds[i].line);
        CHECK_LOG("dropped client 127.0.0.1:");
        CHECK_INT(*log_count(), before + 1);
        tddp_net_close(fd);
        CHECK_OK(tddp_store_set(good, text("still"), text("here"), NULL));
        CHECK_VALUE(good, "still", "here");
    }
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* Counts the clients that lines are about, and the lines. */
typedef struct counted {
    atomic_int lines;
    atomic_int clients;
} counted;

static void count_clients(tddp_log_level level, const char *room, const char *line, void *data)
{
    (void)level, (void)room;
    counted *self = data;
    int more = 1;
    (void)sscanf(line, "refused or dropped %d more clients, the last: dropped client", &more);
    atomic_fetch_add(&self->lines, 1);
    atomic_fetch_add(&self->clients, more);
}

TEST(many_misbehaving_clients_make_few_lines_that_count_them_all)
{
    enum { CLIENTS = 400, AT_ONCE = 20 };
    static counted seen;
    tddp_log_set_sink(count_clients, &seen);
    tddp_store_server *server = loopback_server();
    int64_t start = tddp_now_ns();
    for (int i = 0; i < CLIENTS; i++) {
        int fd = raw_connect(tddp_store_server_port(server));
        raw_send(fd, "ff");
        CHECK_HUNG_UP(fd);
        tddp_net_close(fd);
    }
    tddp_store_server_stop(server);
    int64_t seconds = (tddp_now_ns() - start) / TDDP_NS_PER_S;
    tddp_log_set_sink(NULL, NULL);
    CHECK_INT(atomic_load(&seen.clients), CLIENTS);
    CHECK(atomic_load(&seen.lines) <= AT_ONCE + seconds + 2);
}

TEST(half_messages_delay_nobody)
{
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    static const char *const halves[] = {"",
                                         "00",
                                         "00 cef785",
                                         "00 [2]2f",
                                         "05 [9] [2]2f6b",
                                         HELLO,
                                         HELLO "01 [2]2f",
                                         HELLO "01 [2]2f6b [100]3132",
                                         HELLO "06 [9] [2]2f6b"};
    enum { HALVES = sizeof halves / sizeof *halves };
    int fds[HALVES];
    for (int i = 0; i < HALVES; i++) {
        fds[i] = raw_connect(port_used);
        raw_send(fds[i], halves[i]);
    }
    tddp_store *good = client_of(port_used);
    for (int i = 0; i < 200; i++) {
        int64_t sum;
        CHECK_OK(tddp_store_add(good, text("n"), 1, NULL, &sum));
        CHECK_INT(sum, i + 1);
    }
    for (int i = 0; i < HALVES; i++) {
        tddp_net_close(fds[i]);
    }
    CHECK_VALUE(good, "n", "200");
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(a_client_that_never_reads_costs_a_bounded_buffer)
{
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    size_t size = 1 << 20;
    char *big = malloc(size);
    memset(big, 'x', size);
    CHECK_OK(tddp_store_set(good, text("big"), (tddp_slice){big, size}, NULL));
    tddp_slice key = text("big");
    CHECK_OK(tddp_store_wait(good, &key, 1, NULL)); /* a SET has no answer of its own */
    int fd = greet(port_used);
    int asked = 0;
    for (; asked < 64; asked++) {
        raw_send(fd, "03 [4]2f626967");
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    long before_kb = usage.ru_maxrss;
    for (int i = 0; i < 50; i++) {
        CHECK_OK(tddp_store_set(good, text("k"), text("v"), NULL));
        CHECK_VALUE(good, "k", "v");
    }
    getrusage(RUSAGE_SELF, &usage);
    CHECK(usage.ru_maxrss - before_kb < 16 << 10);
    /* It reads after all: everything it asked for is there, in order. */
    for (int i = 0; i < asked; i++) {
        CHECK_RAW(fd, "[1048576]");
        size_t done = 0;
        CHECK_OK(tddp_net_recv(fd, big, size, &done, tddp_deadline_after_ms(10000), -1));
        CHECK(big[0] == 'x' && big[size - 1] == 'x');
    }
    CHECK_SILENT(fd);
    free(big);
    tddp_net_close(fd);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(too_large_an_answer_is_refused)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    tddp_store *good = client_of(tddp_store_server_port(server));
    size_t size = 8 << 20;
    char *big = malloc(size);
    memset(big, 'x', size);
    CHECK_OK(tddp_store_set(good, text("big"), (tddp_slice){big, size}, NULL));
    CHECK_OK(tddp_store_set(good, text("go"), text("1"), NULL));
    CHECK_VALUE(good, "go", "1");
    raw_send(fd, "0a [40]");
    for (int i = 0; i < 40; i++) {
        raw_send(fd, "[4]2f626967");
    }
    CHECK_LOG("bytes of answers wait for it");
    CHECK_HUNG_UP(fd);
    CHECK_VALUE(good, "go", "1");
    free(big);
    tddp_net_close(fd);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

/* Many clients wait for one key; each of as many SETs of other keys must not look at them all. */
TEST(a_crowd_of_waiters_slows_nobody)
{
    enum { CROWD = 400 };
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    int fds[CROWD];
    for (int i = 0; i < CROWD; i++) {
        fds[i] = greet(port_used);
        raw_send(fds[i], "06 [1] [3]2f676f");
    }
    tddp_store *good = client_of(port_used);
    for (int i = 0; i < 2000; i++) {
        CHECK_OK(tddp_store_set(good, text("other"), text("1"), NULL));
    }
    for (int i = 0; i < CROWD; i += 2) {
        tddp_net_close(fds[i]); /* half of them give up */
    }
    CHECK_OK(tddp_store_set(good, text("go"), text("1"), NULL));
    for (int i = 1; i < CROWD; i += 2) {
        CHECK_RAW(fds[i], "00");
        tddp_net_close(fds[i]);
    }
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

TEST(limits_of_a_server_can_be_chosen)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.max_key_bytes = 10;
    opts.max_value_bytes = 4;
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    int fd = greet(tddp_store_server_port(server));
    raw_send(fd, "09 [2]2f6b [4]31323334 09 [2]2f6b [1]35");
    CHECK_LOG("APPEND would make a value of more than 4 bytes");
    CHECK_HUNG_UP(fd);
    tddp_net_close(fd);
    fd = greet(tddp_store_server_port(server));
    raw_send(fd, "01 [11]");
    CHECK_LOG("key of bytes 11, at most 10");
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}
