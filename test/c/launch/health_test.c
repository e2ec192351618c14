#include <string.h>
#include <unistd.h>

#include "check.h"
#include "launch/health/health.h"
#include "net/net.h"

enum { LONG_MS = 60000 };

static void check_parse(const char *text, int expected)
{
    bool head;
    CHECK_INT(tddp_launch_health_parse(text, strlen(text), &head), expected);
    CHECK_INT(head, strncmp(text, "HEAD ", 5) == 0);
}

TEST(requests_are_parsed)
{
    check_parse("GET /health HTTP/1.1\r\nHost: a\r\n\r\n", 200);
    check_parse("GET /healthz HTTP/1.0\n\n", 200);
    check_parse("GET /health/live?all=1 HTTP/1.1\r\n\r\n", 200);
    check_parse("GET /health?x HTTP/1.1\r\n\r\nrest", 200);
    check_parse("HEAD /health HTTP/1.1\r\n\r\n", 200);
    check_parse("GET / HTTP/1.1\r\n\r\n", 404);
    check_parse("GET /healthy HTTP/1.1\r\n\r\n", 404);
    check_parse("GET /healt HTTP/1.1\r\n\r\n", 404);
    check_parse("POST /health HTTP/1.1\r\n\r\n", 405);
    check_parse("GET health HTTP/1.1\r\n\r\n", 400);
    check_parse("GET /health\r\n\r\n", 400);
    check_parse("GET /health HTTP/2\r\n\r\n", 400);
    check_parse(" /health HTTP/1.1\r\n\r\n", 400);
    check_parse("\r\n\r\n", 400);
    check_parse("\x16\x03\x01", 400);
    check_parse("", 0);
    check_parse("GET /health HTTP/1.1\r\n", 0);
}

TEST(a_request_has_a_size)
{
    char text[TDDP_LAUNCH_HEALTH_REQUEST_BYTES];
    bool head;
    memset(text, 'a', sizeof text);
    CHECK_INT(tddp_launch_health_parse(text, sizeof text - 1, &head), 0);
    CHECK_INT(tddp_launch_health_parse(text, sizeof text, &head), 431);
}

static int open_client(const tddp_launch_health *health)
{
    int fd;
    CHECK_OK(tddp_net_connect_host("127.0.0.1", tddp_launch_health_port(health),
                                   tddp_deadline_after_ms(LONG_MS), -1, &fd));
    return fd;
}

static void put(int fd, const char *text)
{
    size_t done = 0;
    CHECK_OK(tddp_net_send(fd, text, strlen(text), &done, tddp_deadline_after_ms(LONG_MS), -1));
}

/* Reads until the server closes. */
static const char *answer_on(int fd, char text[4096])
{
    size_t done = 0;
    tddp_status status = tddp_net_recv(fd, text, 4095, &done, tddp_deadline_after_ms(LONG_MS), -1);
    CHECK_STATUS(status, TDDP_NETWORK);
    text[done] = '\0';
    tddp_net_close(fd);
    return text;
}

static const char *ask(const tddp_launch_health *health, const char *request, char text[4096])
{
    int fd = open_client(health);
    put(fd, request);
    return answer_on(fd, text);
}

static const char asking[] = "GET /health HTTP/1.1\r\n\r\n";

static void publish(tddp_launch_health *health, bool healthy, const char *members)
{
    tddp_bytes text = {0};
    CHECK_OK(tddp_bytes_append(&text, members, strlen(members)));
    tddp_launch_health_publish(health, healthy, &text);
}

TEST(the_state_is_answered)
{
    tddp_launch_health *health;
    char text[4096];
    CHECK_OK(tddp_launch_health_start(0, LONG_MS, &health));
    CHECK_CONTAINS(ask(health, asking, text), "HTTP/1.1 200 OK\r\n");
    publish(health, true, ",\n\"state\": \"running\"");
    CHECK_CONTAINS(ask(health, asking, text), "\"healthy\": true");
    CHECK_CONTAINS(text, ",\n\"state\": \"running\"}\n");
    publish(health, false, ",\n\"state\": \"over\"");
    CHECK_CONTAINS(ask(health, asking, text), "HTTP/1.1 503 Service Unavailable\r\n");
    CHECK_CONTAINS(text, "\"healthy\": false,\n\"hangs\": false");
    ask(health, "HEAD /health HTTP/1.1\r\n\r\n", text);
    CHECK_TEXT(strstr(text, "\r\n\r\n"), "\r\n\r\n");
    CHECK_CONTAINS(ask(health, "PUT /health HTTP/1.1\r\n\r\n", text), "Allow: GET, HEAD\r\n");
    tddp_launch_health_end(health);
}

TEST(a_loop_that_hangs_is_unavailable)
{
    tddp_launch_health *health;
    char text[4096];
    CHECK_OK(tddp_launch_health_start(0, -1, &health));
    CHECK_CONTAINS(ask(health, asking, text), "HTTP/1.1 503 Service Unavailable\r\n");
    CHECK_CONTAINS(text, "\"healthy\": false,\n\"hangs\": true");
    tddp_launch_health_end(health);
}

/* More clients than there are connections send nothing: one that does is answered once their time
 * is over. The end does not wait for clients. */
TEST(clients_that_send_nothing_hold_nobody_up_for_long)
{
    enum { SILENT = 17 };
    tddp_launch_health *health;
    char text[4096];
    int silent[SILENT];
    CHECK_OK(tddp_launch_health_start(0, LONG_MS, &health));
    for (int i = 0; i < SILENT; i++) {
        silent[i] = open_client(health);
    }
    CHECK_CONTAINS(ask(health, asking, text), "HTTP/1.1 200 OK\r\n");
    int last = open_client(health);
    put(last, "GET /hea");
    tddp_launch_health_end(health);
    CHECK_TEXT(answer_on(last, text), "");
    for (int i = 0; i < SILENT; i++) {
        tddp_net_close(silent[i]);
    }
}

TEST(a_port_in_use_is_named)
{
    tddp_launch_health *health;
    tddp_launch_health *other;
    CHECK_OK(tddp_launch_health_start(0, LONG_MS, &health));
    CHECK_STATUS(tddp_launch_health_start(tddp_launch_health_port(health), LONG_MS, &other),
                 TDDP_ADDRESS_IN_USE);
    CHECK_CONTAINS(tddp_error_message(), "--health-check-port: ");
    tddp_launch_health_end(health);
}
