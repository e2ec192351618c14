/*
 * The listener and its connections, each for one request, within a time and a size. Nobody is kept
 * out: where all connections are in use, a new one takes the place of the oldest. Main thread.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/health/health.h"
#include "net/net.h"

enum { CONNECTIONS = 16, CLIENT_MS = 2000, PAUSE_MS = 50 };

typedef struct connection {
    tddp_launch_health *health; /* NULL: not in use */
    tddp_launch_source source;  /* its time is the connection's end */
    char request[TDDP_LAUNCH_HEALTH_REQUEST_BYTES];
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

/* --- requests -------------------------------------------------------------------------------- */

int tddp_launch_health_parse(const char *data, size_t size, bool *head)
{
    char text[TDDP_LAUNCH_HEALTH_REQUEST_BYTES + 1] = "";
    memcpy(text, data, size);
    *head = strncmp(text, "HEAD ", 5) == 0;
    if (!strstr(text, "\r\n\r\n") && !strstr(text, "\n\n")) {
        return size < TDDP_LAUNCH_HEALTH_REQUEST_BYTES ? 0 : 404;
    }
    const char *path = text + (*head ? 5 : 4);
    text[strcspn(text, "\r\n")] = '\0';
    if ((!*head && strncmp(text, "GET ", 4) != 0) || strncmp(path, "/health", 7) != 0 ||
        !strstr(path, " HTTP/1.")) {
        return 404;
    }
    path += path[7] == 'z' ? 8 : 7; /* "/health", "/healthz", "/health/live", "/health?all" */
    return strchr(" /?", *path) ? 200 : 404;
}

static char *make_answer(const tddp_launch_health *health, int code, bool head)
{
    bool healthy = true;
    char *body = code == 200 ? health->view(health->data, &healthy) : tddp_copy_string("");
    const char *what = code == 404 ? "404 Not Found"
                       : healthy   ? "200 OK"
                                   : "503 Service Unavailable";
    char *answer = !body ? NULL
                         : tddp_format("HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
                                       "Content-Length: %zu\r\nCache-Control: no-store\r\n"
                                       "Connection: close\r\n\r\n%s",
                                       what, strlen(body), head ? "" : body);
    free(body);
    return answer;
}

/* --- connections ----------------------------------------------------------------------------- */

static void drop(connection *self)
{
    if (self->health) {
        tddp_launch_loop_remove(self->health->loop, &self->source);
        tddp_net_close(self->source.fd);
        free(self->answer);
        self->health = NULL;
        self->source.time = 0;
    }
}

static bool would_block(void)
{
    return errno == EAGAIN || errno == EINTR;
}

/* Reads the request, and sends the answer; returns whether there is more to do. */
static bool advance(connection *self)
{
    bool head;
    const int fd = self->source.fd;
    if (!self->answer) {
        ssize_t got = recv(fd, self->request + self->size, sizeof self->request - self->size, 0);
        if (got <= 0) {
            return got < 0 && would_block();
        }
        self->size += (size_t)got;
        int code = tddp_launch_health_parse(self->request, self->size, &head);
        if (code == 0) {
            return true;
        }
        self->answer = make_answer(self->health, code, head);
        self->source.events = POLLOUT;
        if (!self->answer) {
            return false;
        }
    }
    size_t left = strlen(self->answer + self->sent);
    ssize_t sent = send(fd, self->answer + self->sent, left, MSG_NOSIGNAL);
    self->sent += sent > 0 ? (size_t)sent : 0;
    return sent < 0 ? would_block() : (size_t)sent < left;
}

/* What came in time is answered, however late it is looked at. */
static tddp_status on_connection(void *data, int events)
{
    connection *self = data;
    if ((events != TDDP_LAUNCH_TIME && !advance(self)) || (events & TDDP_LAUNCH_TIME)) {
        drop(self);
    }
    return TDDP_OK;
}

/* One that is not in use, or else the oldest. */
static connection *take_connection(tddp_launch_health *health)
{
    connection *found = health->connections;
    for (int i = 1; i < CONNECTIONS; i++) {
        if (health->connections[i].source.time < found->source.time) {
            found = &health->connections[i];
        }
    }
    drop(found);
    return found;
}

static tddp_status on_listener(void *data, int events)
{
    int fd;
    tddp_net_address from;
    tddp_launch_health *health = data;
    health->listener.events = POLLIN;
    if (events == TDDP_LAUNCH_TIME) {
        return TDDP_OK;
    }
    if (!tddp_net_accept(health->listener.fd, &fd, &from)) {
        health->listener.events = 0; /* short of descriptors it would be ready at once again */
        health->listener.time = tddp_deadline_after_ms(PAUSE_MS);
        return TDDP_OK;
    }
    connection *self = take_connection(health);
    *self = (connection){.health = health, .source = health->listener};
    self->source.fd = fd;
    self->source.time = tddp_deadline_after_ms(CLIENT_MS);
    self->source.callback = on_connection;
    self->source.data = self;
    if (tddp_launch_loop_add(health->loop, &self->source) != TDDP_OK) {
        drop(self);
    }
    return TDDP_OK;
}

/* --- the health check ------------------------------------------------------------------------ */

tddp_status tddp_launch_health_open(tddp_launch_loop *loop, const char *host, int port,
                                    tddp_launch_health_view *view, void *data,
                                    tddp_launch_health **out)
{
    tddp_launch_health *health = tddp_alloc(sizeof *health);
    if (!health) {
        return TDDP_OUT_OF_MEMORY;
    }
    health->loop = loop;
    health->view = view;
    health->data = data;
    health->listener =
        (tddp_launch_source){-1, POLLIN, TDDP_LAUNCH_PRIORITY_REQUEST, 0, on_listener, health};
    tddp_status status = tddp_net_listen(host, port, &health->listener.fd);
    if (status == TDDP_OK) {
        status = tddp_launch_loop_add(loop, &health->listener);
    }
    if (status != TDDP_OK) {
        tddp_launch_health_close(health);
        return status;
    }
    *out = health;
    return TDDP_OK;
}

int tddp_launch_health_port(const tddp_launch_health *health)
{
    tddp_net_address local;
    return tddp_net_local(health->listener.fd, &local) == TDDP_OK ? tddp_net_port(&local) : 0;
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
