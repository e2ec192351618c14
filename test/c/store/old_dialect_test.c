/*
 * The server as PyTorch 1.13 knows it: its recorded bytes, its way to leave a wait, and both
 * dialects on one server.
 */
#include <endian.h>

#include "store_fixture.h"

static const struct {
    const char *request;
    const char *answer;
} record[] = {
    {"00 [2]2f6b [1]76", ""},
    {"00 [2]2f65 [0]", ""},
    {"05 [1] [2]2f6b", "00"},
    {"02 [2]2f6b", "[1]76"},
    {"05 [1] [2]2f65", "00"},
    {"02 [2]2f65", "[0]"},
    {"03 [2]2f6e [5]", "[5]"},
    {"03 [2]2f6e f9ffffffffffffff", "feffffffffffffff"},
    {"02 [2]2f6e", "[2]2d32"},
    {"06", "[3]"},
    {"01 [2]2f63 [0] [1]78", "[1]78"},
    {"01 [2]2f63 [1]78 [1]79", "[1]79"},
    {"01 [2]2f63 [3]626164 [1]7a", "[1]79"},
    {"01 [8]2f6d697373696e67 [3]6f6c64 [3]6e6577", "[3]6f6c64"},
    {"04 [2] [2]2f6b [2]2f6e", "00"},
    {"04 [2] [2]2f6b [5]2f6e6f7065", "01"},
    {"05 [2] [2]2f6b [2]2f6e", "00"},
    {"05 [0]", "00"},
    {"00 [3]2f6b32 [1]31", ""},
    {"08 [3]2f6b32", "[1]"},
    {"08 [5]2f6e6f7065", "[0]"},
    {"02 [5]2f6e6f7065", "[0]"}, /* absent: empty */
    {"03 [5]696e69742f [1]", "[1]"},
    {"00 [5]2f636cc3a9 [1]76", ""},
    {"02 [5]2f636cc3a9", "[1]76"},
    {"06", "[6]"},
};
enum { RECORDED = sizeof record / sizeof *record };

TEST(recorded_requests_get_recorded_answers)
{
    tddp_store_server *server = loopback_server();
    int fd = raw_connect(tddp_store_server_port(server));
    for (int i = 0; i < RECORDED; i++) {
        printf("%s\n", record[i].request);
        raw_send(fd, record[i].request);
        CHECK_RAW(fd, record[i].answer);
    }
    CHECK_SILENT(fd);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(requests_may_come_in_any_pieces)
{
    char all[4096];
    char answers[4096] = "";
    size_t size = 0;
    for (int i = 0; i < RECORDED; i++) {
        size += from_hex(record[i].request, all + size);
        strcat(answers, record[i].answer);
    }
    static const size_t pieces[] = {1, 3, 7, sizeof all};
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        tddp_store_server *server = loopback_server();
        int fd = raw_connect(tddp_store_server_port(server));
        for (size_t at = 0; at < size; at += pieces[p]) {
            size_t piece = size - at < pieces[p] ? size - at : pieces[p];
            size_t done = 0;
            CHECK_OK(tddp_net_send(fd, all + at, piece, &done, tddp_deadline_after_ms(5000), -1));
            if (pieces[p] < 16) {
                usleep(100);
            }
        }
        CHECK_RAW(fd, answers);
        tddp_net_close(fd);
        tddp_store_server_stop(server);
    }
}

/* Requests shorter than the newer dialect's hello do not wait for more bytes. */
TEST(the_shortest_first_requests_are_answered_at_once)
{
    tddp_store_server *server = loopback_server();
    int fd = raw_connect(tddp_store_server_port(server));
    raw_send(fd, "06");
    CHECK_RAW(fd, "[0]");
    tddp_net_close(fd);
    fd = raw_connect(tddp_store_server_port(server));
    raw_send(fd, "05 [0]");
    CHECK_RAW(fd, "00");
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(a_first_set_that_looks_like_a_hello_is_a_set)
{
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.max_key_bytes = 1 << 20;
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    int fd = raw_connect(tddp_store_server_port(server));
    size_t key = 0x85f7ce % (1 << 20); /* its length's first two bytes are the hello's */
    char *bytes = calloc(1, 9 + key + 8);
    uint64_t length = htole64(key);
    memcpy(bytes + 1, &length, sizeof length);
    CHECK_INT((unsigned char)bytes[1], 0xce);
    CHECK_INT((unsigned char)bytes[2], 0xf7);
    size_t done = 0;
    CHECK_OK(tddp_net_send(fd, bytes, 2, &done, tddp_deadline_after_ms(5000), -1));
    usleep(20000);
    CHECK_OK(tddp_net_send(fd, bytes, 9 + key + 8, &done, tddp_deadline_after_ms(5000), -1));
    raw_send(fd, "06");
    CHECK_RAW(fd, "[1]");
    free(bytes);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(both_dialects_share_one_server)
{
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    int old = raw_connect(port_used);
    int idle = raw_connect(port_used); /* the second connection that such a client opens */
    int fresh = greet(port_used);
    raw_send(old, "00 [2]2f6b [1]76 06");
    CHECK_RAW(old, "[1]");
    raw_send(fresh, "03 [2]2f6b");
    CHECK_RAW(fresh, "[1]76");
    /* Each waits for the other, and all that stores wakes. */
    raw_send(old, "05 [2] [2]2f78 [2]2f79");
    raw_send(fresh, "01 [2]2f78 [0] 02 [2]2f79 [0] [1]31");
    CHECK_RAW(fresh, "[1]31");
    CHECK_RAW(old, "00");
    raw_send(fresh, "06 [1] [2]2f7a");
    CHECK_SILENT(fresh);
    raw_send(old, "01 [2]2f7a [0] [1]31");
    CHECK_RAW(old, "[1]31");
    CHECK_RAW(fresh, "00");
    tddp_store *ours = client_of(port_used);
    CHECK_OK(tddp_store_set(ours, text("o"), text("urs"), NULL));
    CHECK_VALUE(ours, "k", "v");
    raw_send(old, "05 [1] [2]2f6f 02 [2]2f6f");
    CHECK_RAW(old, "00 [3]757273");
    tddp_store_release(ours);
    tddp_net_close(old);
    tddp_net_close(idle);
    tddp_net_close(fresh);
    tddp_store_server_stop(server);
}

/* A client does not announce its timeout; its next request shows that it waits no more. */
TEST(a_wait_left_behind_is_not_answered_into_the_next_request)
{
    tddp_store_server *server = loopback_server();
    int port_used = tddp_store_server_port(server);
    int old = raw_connect(port_used);
    int other = raw_connect(port_used);
    raw_send(old, "05 [1] [2]2f78");
    CHECK_SILENT(old);
    raw_send(old, "06");
    CHECK_RAW(old, "[0]");
    raw_send(other, "00 [2]2f78 [1]31 06");
    CHECK_RAW(other, "[1]");
    CHECK_SILENT(old);
    raw_send(old, "02 [2]2f78");
    CHECK_RAW(old, "[1]31");
    /* It may also just go. */
    raw_send(old, "05 [1] [2]2f79");
    tddp_net_close(old);
    raw_send(other, "00 [2]2f79 [1]31 06");
    CHECK_RAW(other, "[2]");
    tddp_net_close(other);
    tddp_store_server_stop(server);
}

/* PyTorch itself has given it up. */
TEST(a_client_that_wants_to_watch_a_key_is_dropped)
{
    tddp_store_server_opts opts = loopback_opts();
    tddp_store_server *server = start(&opts);
    int fd = raw_connect(tddp_store_server_port(server));
    raw_send(fd, "06 07 [2]2f78");
    CHECK_RAW(fd, "[0]");
    CHECK_HUNG_UP(fd);
    CHECK_LOG("unknown opcode 0x07");
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}
