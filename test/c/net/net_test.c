#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "check.h"
#include "net/net.h"

static int64_t in_ms(int64_t ms)
{
    return tddp_deadline_after_ms(ms);
}

static const char *parsed(const char *host, int port)
{
    static char text[TDDP_NET_TEXT_BYTES];
    tddp_net_address address;
    return tddp_net_parse(host, port, &address) ? tddp_net_text(&address, text) : NULL;
}

TEST(numeric_addresses_are_read_and_written)
{
    CHECK_TEXT(parsed("127.0.0.1", 29500), "127.0.0.1:29500");
    CHECK_TEXT(parsed("::1", 1), "[::1]:1");
    CHECK_TEXT(parsed("[2001:DB8::1]", 65535), "[2001:db8::1]:65535");
    CHECK_TEXT(parsed("fe80::1%lo", 9), "[fe80::1%lo]:9");
    CHECK(!parsed("localhost", 1));
    CHECK(!parsed("1.2.3", 1));
    CHECK(!parsed("1.2.3.4.5", 1));
    CHECK(!parsed("256.1.1.1", 1));
    CHECK(!parsed("", 1));
    CHECK(!parsed("[]", 1));
    CHECK(!parsed("fe80::1%no-such-interface", 1));
    CHECK(!parsed("1111:2222:3333:4444:5555:6666:7777:8888:9999:1111:2222:3333:4444:5555:6666", 1));
}

TEST(loopback_addresses_are_known)
{
    static const struct {
        const char *host;
        bool loopback;
    } cases[] = {{"127.0.0.1", true}, {"127.9.9.9", true},        {"::1", true},
                 {"10.0.0.1", false}, {"::ffff:127.0.0.1", true}, {"::2", false},
                 {"0.0.0.0", false},  {"::ffff:10.0.0.1", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tddp_net_address address;
        CHECK(tddp_net_parse(cases[i].host, 1, &address));
        CHECK_INT(tddp_net_is_loopback(&address), cases[i].loopback);
    }
}

static void check_endpoint(const char *text, int default_port, const char *host, int port)
{
    char *got;
    int got_port;
    CHECK_OK(tddp_net_split_endpoint(text, default_port, &got, &got_port));
    CHECK_TEXT(got, host);
    CHECK_INT(got_port, port);
    free(got);
}

static void check_bad_endpoint(const char *text, const char *part)
{
    char *host;
    int port;
    CHECK_STATUS(tddp_net_split_endpoint(text, -1, &host, &port), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), part);
}

TEST(endpoints_are_split)
{
    check_endpoint("node7:29400", -1, "node7", 29400);
    check_endpoint("node7", 29400, "node7", 29400);
    check_endpoint("127.0.0.1:0", -1, "127.0.0.1", 0);
    check_endpoint("[::1]:29500", -1, "::1", 29500);
    check_endpoint("[::1]", 5, "::1", 5);
    check_endpoint("fe80::1", 5, "fe80::1", 5);
    check_bad_endpoint("node7", "the port is missing");
    check_bad_endpoint("node7:", "after the last colon, got \"\"");
    check_bad_endpoint("node7:x", "got \"x\"");
    check_bad_endpoint("node7:65536", "got \"65536\"");
    check_bad_endpoint(":29500", "the host is missing");
    check_bad_endpoint("a:b:1", "in brackets");
}

TEST(ports_are_checked)
{
    CHECK_OK(tddp_net_check_port(65535, 1));
    CHECK_STATUS(tddp_net_check_port(65536, 1), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "port 65536: expected 1 to 65535");
    CHECK_STATUS(tddp_net_check_port(0, 1), TDDP_INVALID_ARGUMENT);
}

TEST(localhost_resolves_and_nonsense_does_not)
{
    tddp_net_address found[8];
    size_t count;
    CHECK_OK(tddp_net_resolve("localhost", 77, in_ms(10000), -1, found, 8, &count));
    CHECK(count >= 1);
    CHECK(tddp_net_is_loopback(&found[0]));
    CHECK_INT(tddp_net_port(&found[0]), 77);
    CHECK_STATUS(tddp_net_resolve("no such host", 77, in_ms(10000), -1, found, 8, &count),
                 TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "cannot find the address of \"no such host\": ");
    CHECK_STATUS(tddp_net_resolve("", 77, in_ms(10000), -1, found, 8, &count),
                 TDDP_INVALID_ARGUMENT);
}

static int listen_on_loopback(int *port)
{
    int fd;
    tddp_net_address local;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &fd));
    CHECK_OK(tddp_net_local(fd, &local));
    *port = tddp_net_port(&local);
    return fd;
}

static void connect_pair(int *left, int *right)
{
    int port;
    int listener = listen_on_loopback(&port);
    CHECK_OK(tddp_net_connect_host("127.0.0.1", port, in_ms(5000), -1, left));
    CHECK_OK(tddp_net_poll(listener, POLLIN, in_ms(5000), -1));
    tddp_net_address from;
    CHECK(tddp_net_accept(listener, right, &from));
    CHECK(tddp_net_is_loopback(&from));
    tddp_net_close(listener);
}

TEST(descriptors_are_cloexec_and_nonblocking)
{
    int left;
    int right;
    connect_pair(&left, &right);
    CHECK(fcntl(left, F_GETFD) & FD_CLOEXEC);
    CHECK(fcntl(right, F_GETFD) & FD_CLOEXEC);
    CHECK(fcntl(left, F_GETFL) & O_NONBLOCK);
    CHECK(fcntl(right, F_GETFL) & O_NONBLOCK);
    CHECK_STATUS(tddp_net_adopt(9999), TDDP_INVALID_ARGUMENT);
    CHECK_OK(tddp_net_adopt(left));
    tddp_net_close(left);
    tddp_net_close(right);
}

enum { BIG = 3 << 20 };

static void *send_big(void *data)
{
    int fd = *(int *)data;
    char *bytes = malloc(BIG);
    memset(bytes, 'x', BIG);
    size_t done = 0;
    CHECK_OK(tddp_net_send(fd, bytes, BIG, &done, in_ms(20000), -1));
    CHECK_INT(done, BIG);
    free(bytes);
    return NULL;
}

TEST(big_messages_arrive_whole)
{
    int left;
    int right;
    connect_pair(&left, &right);
    pthread_t sender;
    CHECK_INT(pthread_create(&sender, NULL, send_big, &left), 0);
    char *bytes = calloc(1, BIG);
    size_t done = 0;
    CHECK_OK(tddp_net_recv(right, bytes, BIG, &done, in_ms(20000), -1));
    pthread_join(sender, NULL);
    for (int i = 0; i < BIG; i++) {
        CHECK(bytes[i] == 'x');
    }
    free(bytes);
    tddp_net_close(left);
    tddp_net_close(right);
}

TEST(a_receive_that_ran_out_of_time_goes_on)
{
    int left;
    int right;
    connect_pair(&left, &right);
    char bytes[4] = "";
    size_t done = 0;
    size_t sent = 0;
    CHECK_OK(tddp_net_send(left, "ab", 2, &sent, in_ms(1000), -1));
    CHECK_STATUS(tddp_net_recv(right, bytes, 4, &done, in_ms(100), -1), TDDP_TIMEOUT);
    CHECK_INT(done, 2);
    sent = 0;
    CHECK_OK(tddp_net_send(left, "cd", 2, &sent, in_ms(1000), -1));
    CHECK_OK(tddp_net_recv(right, bytes, 4, &done, in_ms(1000), -1));
    CHECK_INT(memcmp(bytes, "abcd", 4), 0);
    tddp_net_close(left);
    done = 0;
    CHECK_STATUS(tddp_net_recv(right, bytes, 4, &done, in_ms(1000), -1), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "the other side closed it");
    tddp_net_close(right);
}

TEST(writing_to_a_closed_connection_raises_no_signal)
{
    int left;
    int right;
    connect_pair(&left, &right);
    tddp_net_close(right);
    tddp_status status = TDDP_OK;
    for (int i = 0; i < 100 && status == TDDP_OK; i++) {
        size_t done = 0;
        status = tddp_net_send(left, "x", 1, &done, in_ms(1000), -1);
    }
    CHECK_STATUS(status, TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "lost: ");
    tddp_net_close(left);
}

TEST(a_wait_ends_when_cancelled)
{
    int left;
    int right;
    connect_pair(&left, &right);
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    char byte;
    size_t done = 0;
    CHECK_STATUS(tddp_net_recv(right, &byte, 1, &done, in_ms(20000), tddp_cancel_fd(cancel)),
                 TDDP_CANCELED);
    CHECK_STATUS(tddp_net_sleep(in_ms(20000), tddp_cancel_fd(cancel)), TDDP_CANCELED);
    CHECK_OK(tddp_net_sleep(in_ms(5), -1));
    tddp_cancel_free(cancel);
    tddp_net_close(left);
    tddp_net_close(right);
}

TEST(a_port_in_use_is_named)
{
    int first = listen_on_loopback(&port);
    int second;
    char expected[128];
    CHECK_STATUS(tddp_net_listen("127.0.0.1", port, &second), TDDP_ADDRESS_IN_USE);
    snprintf(expected, sizeof expected, "cannot listen on 127.0.0.1:%d: Address already in use",
             port);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_net_close(first);
    CHECK_OK(tddp_net_listen("127.0.0.1", port, &second));
    tddp_net_close(second);
    CHECK_STATUS(tddp_net_listen("localhost", port, &second), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_net_listen("127.0.0.1", 70000, &second), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_net_listen("192.0.2.1", 0, &second), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "192.0.2.1");
}

TEST(closing_ends_a_listener_that_a_forked_child_still_holds)
{
    int listener = listen_on_loopback(&port);
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    tddp_net_close(listener);
    int fd;
    tddp_status status = tddp_net_connect_host("127.0.0.1", port, in_ms(5000), -1, &fd);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK_STATUS(status, TDDP_NETWORK);
}

TEST(a_refused_connection_is_named)
{
    int fd;
    char expected[128];
    CHECK_STATUS(tddp_net_connect_host("127.0.0.1", port, in_ms(5000), -1, &fd), TDDP_NETWORK);
    snprintf(expected, sizeof expected, "cannot connect to 127.0.0.1:%d: Connection refused", port);
    CHECK_TEXT(tddp_error_message(), expected);
}

TEST(every_address_means_both_families)
{
    int listener;
    tddp_net_address local;
    CHECK_OK(tddp_net_listen(NULL, 0, &listener));
    CHECK_OK(tddp_net_local(listener, &local));
    int fd;
    CHECK_OK(tddp_net_connect_host("127.0.0.1", tddp_net_port(&local), in_ms(5000), -1, &fd));
    tddp_net_close(fd);
    CHECK_OK(tddp_net_connect_host("localhost", tddp_net_port(&local), in_ms(5000), -1, &fd));
    tddp_net_close(fd);
    if (local.of.any.sa_family == AF_INET6) {
        CHECK_OK(tddp_net_connect_host("::1", tddp_net_port(&local), in_ms(5000), -1, &fd));
        tddp_net_close(fd);
    }
    tddp_net_close(listener);
}

MULTI_TEST(processes_of_one_host_have_one_identity, 2, 10)
{
    char mine[TDDP_NET_HOST_ID_BYTES];
    char other[TDDP_NET_HOST_ID_BYTES] = "";
    CHECK_OK(tddp_net_host_id(mine));
    CHECK_INT(strlen(mine), 16);
    int ends[2];
    CHECK_INT(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK_OK(tddp_net_host_id(other));
        _exit(write(ends[1], other, sizeof other) == sizeof other ? 0 : 1);
    }
    CHECK_INT(read(ends[0], other, sizeof other), sizeof other);
    CHECK_TEXT(other, mine);
    CHECK_INT(waitpid(child, NULL, 0), child);
}

TEST(interfaces_and_routes_have_addresses)
{
    char text[TDDP_NET_TEXT_BYTES];
    tddp_net_address address;
    CHECK_OK(tddp_net_interface_address("lo", &address));
    CHECK_TEXT(tddp_net_host_text(&address, text), "127.0.0.1");
    CHECK_STATUS(tddp_net_interface_address("no-such", &address), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"no-such\"");
    CHECK_CONTAINS(tddp_error_message(), "lo");
    CHECK_OK(tddp_net_address_towards("127.0.0.1", 29500, in_ms(5000), -1, &address));
    CHECK_TEXT(tddp_net_text(&address, text), "127.0.0.1:0");
}
