/*
 * The listener and its connections, each for one request, within a time and a size. Nobody is kept
 * out: where all connections are in use, a new one takes the place of the oldest. Main thread.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "launch/health/health.h"
#include "net/net.h"

enum { CONNECTIONS = 16, REQUEST_BYTES = 2048, CLIENT_MS = 2000, PAUSE_MS = 50 };

typedef struct connection {
    tddp_launch_health *health; /* NULL: not in use */
    tddp_launch_source source;  /* its time is the connection's end */
    char request[REQUEST_BYTES];
    size_t size; /* of the request so far */
    char *answer;
    size_t sent; /* of the answer */
} connection;

struct tddp_launch_health {
    tddp_launch_loop *loop;
    tddp_launch_health_view *view;
    void *data;
    tddp_launch_source listener;
    connection connections[CONNECTIONS];
};

static void drop(connection *self)
{
    if (self->health) {
        tddp_launch_loop_remove(self->health->loop, &self->source);
        tddp_net_close(self->source.fd);
        free(self->answer);
        *self = (connection){0};
    }
}

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

/* Reads the request up to its empty line, or as much as there is room for. False once the
 * connection has failed. */
static bool receive(connection *self)
{
    char *end = self->request + self->size;
    ssize_t got = recv(self->source.fd, end, sizeof self->request - self->size, 0);
    if (got <= 0) {
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    }
    self->size += (size_t)got;
    if (self->size == sizeof self->request || memmem(self->request, self->size, "\r\n\r\n", 4)) {
        self->answer = make_answer(self->health, memcmp(self->request, "HEAD", 4) == 0);
        self->source.events = POLLOUT;
        return self->answer != NULL;
    }
    return true;
}

/* What came in time is answered, however late it is looked at. */
static tddp_status on_connection(void *data, int events)
{
    connection *self = data;
    bool more = events == TDDP_LAUNCH_TIME || self->answer || receive(self);
    if (more && self->answer) {
        size_t left = strlen(self->answer + self->sent);
        ssize_t sent = send(self->source.fd, self->answer + self->sent, left, MSG_NOSIGNAL);
        more = sent < 0 ? errno == EAGAIN || errno == EINTR : (size_t)sent < left;
        self->sent += sent > 0 ? (size_t)sent : 0;
    }
    if (!more || (events & TDDP_LAUNCH_TIME)) {
        drop(self);
    }
    return TDDP_OK;
}

static tddp_status on_listener(void *data, int events)
{
    int fd;
    tddp_net_address from;
    tddp_launch_health *health = data;
    connection *self = health->connections;
    health->listener.events = POLLIN;
    if (events == TDDP_LAUNCH_TIME) {
        return TDDP_OK;
    }
    if (!tddp_net_accept(health->listener.fd, &fd, &from)) {
        health->listener.events = 0; /* short of descriptors it would be ready at once again */
        health->listener.time = tddp_deadline_after_ms(PAUSE_MS);
        return TDDP_OK;
    }
    for (int i = 1; i < CONNECTIONS; i++) { /* one that is not in use, or else the oldest */
        connection *other = &health->connections[i];
        self = other->source.time < self->source.time ? other : self;
    }
    drop(self);
    *self = (connection){.health = health,
                         .source = {fd, POLLIN, TDDP_LAUNCH_PRIORITY_REQUEST,
                                    tddp_deadline_after_ms(CLIENT_MS), on_connection, self}};
    if (tddp_launch_loop_add(health->loop, &self->source) != TDDP_OK) {
        drop(self);
    }
    return TDDP_OK;
}

tddp_status tddp_launch_health_open(tddp_launch_loop *loop, const char *host, int *port,
                                    tddp_launch_health_view *view, void *data,
                                    tddp_launch_health **out)
{
    tddp_net_address local;
    tddp_launch_health *health = tddp_alloc(sizeof *health);
    if (!health) {
        return TDDP_OUT_OF_MEMORY;
    }
    health->loop = loop;
    health->view = view;
    health->data = data;
    health->listener =
        (tddp_launch_source){-1, POLLIN, TDDP_LAUNCH_PRIORITY_REQUEST, 0, on_listener, health};
    tddp_status status = tddp_net_listen(host, *port, &health->listener.fd);
    if (status == TDDP_OK) {
        status = tddp_net_local(health->listener.fd, &local);
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
        for (int i = 0; i < CONNECTIONS; i++) {
            drop(&health->connections[i]);
        }
        tddp_launch_loop_remove(health->loop, &health->listener);
        tddp_close(health->listener.fd);
        free(health);
    }
}
