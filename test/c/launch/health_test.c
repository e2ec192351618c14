#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "launch/command/options.h"
#include "launch/health/health.h"
#include "net/net.h"

enum { LONG_MS = 60000, SILENT = 40 };

static tddp_launch_loop loop;
static tddp_launch_health *health;
static bool is_healthy = true;
static int listening;
static size_t body_bytes = 20;

static char *view(void *data, bool *healthy)
{
    char *text = tddp_alloc(body_bytes + 1);
    CHECK(data == &loop);
    *healthy = is_healthy;
    if (text) {
        memset(text, 's', body_bytes);
    }
    return text;
}

static void open_health(void)
{
    listening = 0;
    CHECK_OK(tddp_launch_health_open(&loop, tddp_net_loopback(), &listening, view, &loop, &health));
    CHECK(listening > 0);
}

static void close_health(void)
{
    tddp_launch_health_close(health);
    tddp_launch_loop_free(&loop);
}

static int open_client(void)
{
    int fd;
    CHECK_OK(tddp_net_connect_host(tddp_net_loopback(), listening, tddp_deadline_after_ms(LONG_MS),
                                   -1, &fd));
    return fd;
}

static void put(int fd, const char *text)
{
    size_t done = 0;
    CHECK_OK(tddp_net_send(fd, text, strlen(text), &done, tddp_deadline_after_ms(LONG_MS), -1));
}

/* Has the loop answer, and reads until the server has closed the connection; returns how much. */
static size_t answer_on(int fd, char *text, size_t size)
{
    size_t got = 0;
    ssize_t more;
    CHECK_OK(tddp_launch_loop_turn(&loop));
    do {
        CHECK_OK(tddp_net_poll(fd, POLLIN, tddp_deadline_after_ms(LONG_MS), -1));
        more = recv(fd, text + got, size - 1 - got, MSG_DONTWAIT);
        got += more > 0 ? (size_t)more : 0;
    } while (more > 0);
    text[got] = '\0';
    tddp_net_close(fd);
    return got;
}

static const char *ask(const char *request, char text[4096])
{
    int fd = open_client();
    put(fd, request);
    (void)answer_on(fd, text, 4096);
    return text;
}

static const char asking[] = "GET /health HTTP/1.1\r\n\r\n";

TEST(the_state_is_answered)
{
    char text[4096];
    open_health();
    CHECK_CONTAINS(ask(asking, text), "HTTP/1.1 200 OK\r\n");
    CHECK_CONTAINS(text, "\r\nContent-Length: 20\r\n");
    CHECK_TEXT(strstr(text, "\r\n\r\n"), "\r\n\r\nssssssssssssssssssss");
    is_healthy = false;
    CHECK_CONTAINS(ask(asking, text), "HTTP/1.1 503 Service Unavailable\r\n");
    CHECK_CONTAINS(text, "\r\n\r\nssssssssssssssssssss");
    CHECK_CONTAINS(ask("HEAD /health HTTP/1.1\r\n\r\n", text), "HTTP/1.1 503 ");
    CHECK_TEXT(strstr(text, "\r\n\r\n"), "\r\n\r\n");
    CHECK_CONTAINS(ask("GET / HTTP/1.0\r\na: b\r\n\r\n", text), "HTTP/1.1 503 ");
    CHECK_CONTAINS(ask("\r\n\r\n", text), "HTTP/1.1 503 ");
    is_healthy = true;
    close_health();
}

/* What does not fit in a read is read all the same, or the client would lose the answer. */
TEST(a_long_request_is_answered)
{
    char text[4096];
    char line[20000];
    memset(line, 'A', sizeof line - 1);
    line[sizeof line - 1] = '\0';
    open_health();
    CHECK_CONTAINS(ask(line, text), "HTTP/1.1 200 OK\r\n");
    close_health();
}

/* The state of as many workers as a node has at most; the client reads it later. */
TEST(a_long_answer_arrives_whole)
{
    enum { LONG_BYTES = TDDP_LAUNCH_MAX_LOCAL * 50 };
    char *text = malloc(LONG_BYTES + 4096);
    CHECK(text != NULL);
    body_bytes = LONG_BYTES;
    open_health();
    int fd = open_client();
    put(fd, asking);
    size_t got = answer_on(fd, text, LONG_BYTES + 4096);
    char *body = strstr(text, "\r\n\r\n");
    CHECK(body != NULL);
    CHECK_INT(got - (size_t)(body + 4 - text), LONG_BYTES);
    free(text);
    close_health();
}

/* They do not even wake the loop, until the kernel gives them up. */
TEST(clients_that_send_nothing_keep_nobody_out)
{
    char text[4096];
    int silent[SILENT];
    open_health();
    for (int i = 0; i < SILENT; i++) {
        silent[i] = open_client();
    }
    CHECK_CONTAINS(ask(asking, text), "HTTP/1.1 200 OK\r\n");
    for (int i = 0; i < SILENT; i++) {
        CHECK_OK(tddp_launch_loop_turn(&loop));
    }
    for (int i = 0; i < SILENT; i++) {
        CHECK_OK(tddp_net_poll(silent[i], POLLIN, tddp_deadline_after_ms(LONG_MS), -1));
        CHECK_INT(recv(silent[i], text, 1, MSG_DONTWAIT), 0);
        tddp_net_close(silent[i]);
    }
    int last = open_client();
    close_health(); /* which waits for nobody */
    tddp_net_close(last);
}

TEST(a_port_in_use_is_named)
{
    tddp_launch_health *other;
    open_health();
    CHECK_STATUS(
        tddp_launch_health_open(&loop, tddp_net_loopback(), &listening, view, &loop, &other),
        TDDP_ADDRESS_IN_USE);
    CHECK_CONTAINS(tddp_error_message(), "cannot listen on 127.0.0.1:");
    close_health();
}

TEST(short_memory_is_survived)
{
    char text[4096];
    bool whole = false;
    open_health();
    for (long nth = 1; nth < 100 && !whole; nth++) {
        int fd = open_client();
        put(fd, asking);
        tddp_fail_allocation(nth);
        size_t got = answer_on(fd, text, sizeof text);
        whole = !tddp_fail_allocation(0);
        CHECK(got == 0 || strncmp(text, "HTTP/1.1 200 OK\r\n", 17) == 0);
        CHECK(!whole || got > 0);
    }
    CHECK(whole);
    close_health();
}
