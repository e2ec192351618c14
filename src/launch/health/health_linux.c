/*
 * One socket that listens, and no connection that waits: the kernel shows a connection once a
 * request has arrived (TCP_DEFER_ACCEPT), an answer fits in what it sends by itself. So a client
 * that sends or reads nothing keeps nobody out. Main thread.
 */
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>

#include "launch/health/health.h"
#include "net/net.h"

enum {
    REQUEST_S = 2,          /* then the kernel shows a connection without a request */
    ANSWER_BYTES = 1 << 20, /* at most, as far as the system allows */
    MOST_PARTS = 16,        /* of a request; what is longer is cut off */
    PAUSE_MS = 50
};

struct tddp_launch_health {
    tddp_launch_loop *loop;
    tddp_launch_health_view *view;
    void *data;
    tddp_launch_source listener;
};

static char *make_answer(const tddp_launch_health *health, bool head)
{
    bool healthy;
    char *body = health->view(health->data, &healthy);
    char *answer = !body ? NULL
                         : tddp_format("HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
                                       "Content-Length: %zu\r\nCache-Control: no-store\r\n"
                                       "Connection: close\r\n\r\n%s",
                                       healthy ? "200 OK" : "503 Service Unavailable", strlen(body),
                                       head ? "" : body);
    free(body);
    return answer;
}

static void answer_request(const tddp_launch_health *health, int fd)
{
    char part[4096] = "";
    char *answer = NULL;
    /* All of it is read: a connection that ends before that would lose its answer. */
    for (int i = 0; i < MOST_PARTS && recv(fd, part, sizeof part, 0) > 0; i++) {
        answer = i > 0 ? answer : make_answer(health, strncmp(part, "HEAD ", 5) == 0);
    }
    if (answer) {
        (void)!send(fd, answer, strlen(answer), MSG_NOSIGNAL);
    }
    free(answer);
}

static tddp_status on_listener(void *data)
{
    int fd;
    tddp_net_address from;
    tddp_launch_health *health = data;
    if (health->listener.events == 0) { /* the pause is over */
        health->listener.events = POLLIN;
    } else if (tddp_net_accept(health->listener.fd, &fd, &from)) {
        answer_request(health, fd);
        tddp_net_close(fd);
    } else {
        health->listener.events = 0; /* short of descriptors it would be ready at once again */
        health->listener.time = tddp_deadline_after_ms(PAUSE_MS);
    }
    return TDDP_OK;
}

tddp_status tddp_launch_health_open(tddp_launch_loop *loop, const char *host, int *port,
                                    tddp_launch_health_view *view, void *data,
                                    tddp_launch_health **out)
{
    const int seconds = REQUEST_S;
    const int bytes = ANSWER_BYTES;
    tddp_net_address local;
    tddp_launch_health *health = tddp_alloc(sizeof *health);
    if (!health) {
        return TDDP_OUT_OF_MEMORY;
    }
    *health = (tddp_launch_health){
        loop, view, data,
        .listener = {-1, POLLIN, TDDP_LAUNCH_PRIORITY_REQUEST, 0, on_listener, health}};
    tddp_status status = tddp_net_listen(host, *port, &health->listener.fd);
    int fd = health->listener.fd;
    if (status == TDDP_OK &&
        (setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds) != 0 ||
         setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) != 0)) {
        status = tddp_fail_errno("setsockopt");
    }
    if (status == TDDP_OK) {
        status = tddp_net_local(fd, &local);
    }
    if (status == TDDP_OK) {
        status = tddp_launch_loop_add(loop, &health->listener);
    }
    if (status != TDDP_OK) {
        tddp_launch_health_close(health);
        return status;
    }
    *port = tddp_net_port(&local);
    *out = health;
    return TDDP_OK;
}

void tddp_launch_health_close(tddp_launch_health *health)
{
    if (health) {
        tddp_launch_loop_remove(health->loop, &health->listener);
        tddp_close(health->listener.fd);
        free(health);
    }
}
