/*
 * The connections of the health check, each for one request. A client that sends slowly, too much
 * or nothing loses its connection at a deadline, and while all are in use others wait in the
 * listener's queue. The health check's thread.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "launch/health/health.h"
#include "net/net.h"

enum { CONNECTIONS = 16, CLIENT_MS = 2000, PAUSE_MS = 50, FIXED = 2 };

typedef struct connection {
    int fd; /* -1: not in use */
    int64_t deadline;
    char request[TDDP_LAUNCH_HEALTH_REQUEST_BYTES];
    size_t size;
    tddp_bytes answer; /* empty: the request is not complete */
} connection;

static void drop(connection *self)
{
    tddp_net_close(self->fd);
    tddp_bytes_free(&self->answer);
    self->answer = (tddp_bytes){0};
    self->fd = -1;
}

static bool would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static void take_request(tddp_launch_health *health, connection *self)
{
    bool head;
    ssize_t got = read(self->fd, self->request + self->size, sizeof self->request - self->size);
    if (got <= 0) {
        if (got == 0 || !would_block()) {
            drop(self);
        }
        return;
    }
    self->size += (size_t)got;
    tddp_launch_health_status status = tddp_launch_health_parse(self->request, self->size, &head);
    if (status != TDDP_LAUNCH_HEALTH_INCOMPLETE &&
        tddp_launch_health_answer(health, status, head, &self->answer) != TDDP_OK) {
        drop(self);
    }
}

static void send_answer(connection *self)
{
    ssize_t sent = send(self->fd, self->answer.data, self->answer.size, MSG_NOSIGNAL);
    if (sent < 0 && would_block()) {
        return;
    }
    if (sent > 0) {
        tddp_bytes_consume(&self->answer, (size_t)sent);
    }
    if (sent < 0 || self->answer.size == 0) {
        drop(self);
    }
}

static void accept_one(int listen_fd, connection *all)
{
    tddp_net_address from;
    for (int i = 0; i < CONNECTIONS; i++) {
        if (all[i].fd < 0) {
            all[i].size = 0;
            all[i].deadline = tddp_deadline_after_ms(CLIENT_MS);
            if (!tddp_net_accept(listen_fd, &all[i].fd, &from)) {
                all[i].fd = -1;
                if (!would_block()) {
                    (void)poll(NULL, 0, PAUSE_MS); /* short of descriptors: not at once again */
                }
            }
            return;
        }
    }
}

/* Fills in what is polled, and returns when the first deadline is. */
static int64_t collect(const connection *all, int listen_fd, int stop_fd, struct pollfd *entries)
{
    int64_t first = INT64_MAX;
    bool room = false;
    for (int i = 0; i < CONNECTIONS; i++) {
        short events = all[i].answer.size > 0 ? POLLOUT : POLLIN;
        entries[FIXED + i] = (struct pollfd){.fd = all[i].fd, .events = events};
        room |= all[i].fd < 0;
        if (all[i].fd >= 0 && all[i].deadline < first) {
            first = all[i].deadline;
        }
    }
    entries[0] = (struct pollfd){.fd = stop_fd, .events = POLLIN};
    entries[1] = (struct pollfd){.fd = room ? listen_fd : -1, .events = POLLIN};
    return first;
}

static void serve_ready(tddp_launch_health *health, connection *self, short events)
{
    if (events && self->answer.size == 0) {
        take_request(health, self);
    } else if (events) {
        send_answer(self);
    }
    if (self->fd >= 0 && tddp_now_ns() >= self->deadline) {
        drop(self);
    }
}

void tddp_launch_health_serve(tddp_launch_health *health, int listen_fd, int stop_fd)
{
    struct pollfd entries[FIXED + CONNECTIONS];
    connection *all = tddp_alloc_array(CONNECTIONS, sizeof *all);
    for (int i = 0; all && i < CONNECTIONS; i++) {
        all[i].fd = -1;
    }
    while (all) {
        int64_t first = collect(all, listen_fd, stop_fd, entries);
        int limit = first == INT64_MAX ? -1 : tddp_deadline_poll_ms(first);
        if ((poll(entries, FIXED + CONNECTIONS, limit) < 0 && errno != EINTR) ||
            entries[0].revents) {
            break;
        }
        for (int i = 0; i < CONNECTIONS; i++) {
            if (all[i].fd >= 0) {
                serve_ready(health, &all[i], entries[FIXED + i].revents);
            }
        }
        if (entries[1].revents) {
            accept_one(listen_fd, all);
        }
    }
    for (int i = 0; all && i < CONNECTIONS; i++) {
        if (all[i].fd >= 0) {
            drop(&all[i]);
        }
    }
    free(all);
}
