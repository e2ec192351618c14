/*
 * What the health check knows, and what it answers. The agent's thread reports, the health check's
 * own answers; a lock guards the state, and the last turn is atomic.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/health/health.h"
#include "net/net.h"

enum { TURN_MS = 1000 };

struct tddp_launch_health {
    int listen_fd;
    int port;
    int stop[2]; /* a pipe; the thread ends when it is closed */
    pthread_t thread;
    int64_t limit_ms;
    _Atomic int64_t turned; /* when the loop turned last */
    pthread_mutex_t lock;
    bool healthy;
    tddp_bytes members;
};

/* --- the agent's side ------------------------------------------------------------------------ */

static void *serve(void *data)
{
    tddp_launch_health *health = data;
    tddp_launch_health_serve(health, health->listen_fd, health->stop[0]);
    return NULL;
}

static void release(tddp_launch_health *health)
{
    tddp_close(health->listen_fd);
    tddp_close(health->stop[0]);
    tddp_close(health->stop[1]);
    tddp_bytes_free(&health->members);
    pthread_mutex_destroy(&health->lock);
    free(health);
}

static tddp_status listen_on(tddp_launch_health *health, int port)
{
    tddp_net_address local;
    tddp_status status = tddp_net_listen(NULL, port, &health->listen_fd);
    if (status == TDDP_OK) {
        status = tddp_net_local(health->listen_fd, &local);
    }
    if (status == TDDP_OK) {
        health->port = tddp_net_port(&local);
    }
    return status;
}

tddp_status tddp_launch_health_start(int port, int64_t limit_ms, tddp_launch_health **out)
{
    tddp_launch_health *health = tddp_alloc(sizeof *health);
    if (!health) {
        return TDDP_OUT_OF_MEMORY;
    }
    health->listen_fd = health->stop[0] = health->stop[1] = -1;
    health->limit_ms = limit_ms;
    health->healthy = true;
    pthread_mutex_init(&health->lock, NULL);
    tddp_launch_health_turn(health);
    tddp_status status = listen_on(health, port);
    if (status == TDDP_OK && pipe2(health->stop, O_CLOEXEC) != 0) {
        status = tddp_fail_errno("pipe");
    }
    if (status == TDDP_OK) {
        status = tddp_thread_start(&health->thread, "health", serve, health);
    }
    if (status != TDDP_OK) {
        release(health);
        return tddp_fail(status, "--health-check-port: %s", tddp_error_message());
    }
    *out = health;
    return TDDP_OK;
}

int tddp_launch_health_port(const tddp_launch_health *health)
{
    return health->port;
}

void tddp_launch_health_turn(tddp_launch_health *health)
{
    if (health) {
        atomic_store(&health->turned, tddp_now_ns());
    }
}

int64_t tddp_launch_health_deadline(const tddp_launch_health *health)
{
    return health ? atomic_load(&health->turned) + TURN_MS * TDDP_NS_PER_MS : INT64_MAX;
}

void tddp_launch_health_publish(tddp_launch_health *health, bool healthy, tddp_bytes *members)
{
    pthread_mutex_lock(&health->lock);
    tddp_bytes_free(&health->members);
    health->members = *members;
    health->healthy = healthy;
    pthread_mutex_unlock(&health->lock);
    *members = (tddp_bytes){0};
}

void tddp_launch_health_end(tddp_launch_health *health)
{
    if (health) {
        tddp_close(health->stop[1]);
        health->stop[1] = -1;
        pthread_join(health->thread, NULL);
        release(health);
    }
}

/* --- the answer ------------------------------------------------------------------------------ */

static const char *reason_of(tddp_launch_health_status status)
{
    switch (status) {
    case TDDP_LAUNCH_HEALTH_OK:
        return "OK";
    case TDDP_LAUNCH_HEALTH_NOT_FOUND:
        return "Not Found";
    case TDDP_LAUNCH_HEALTH_METHOD:
        return "Method Not Allowed\r\nAllow: GET, HEAD";
    case TDDP_LAUNCH_HEALTH_TOO_LARGE:
        return "Request Header Fields Too Large";
    case TDDP_LAUNCH_HEALTH_UNAVAILABLE:
        return "Service Unavailable";
    case TDDP_LAUNCH_HEALTH_INCOMPLETE:
    case TDDP_LAUNCH_HEALTH_BAD:
        break;
    }
    return "Bad Request";
}

/* Returns whether all is well. */
static bool put_body(tddp_launch_health *health, tddp_bytes *out, tddp_status *status)
{
    char head[96];
    int64_t idle_ms = (tddp_now_ns() - atomic_load(&health->turned)) / TDDP_NS_PER_MS;
    bool hangs = idle_ms > health->limit_ms;
    pthread_mutex_lock(&health->lock);
    bool healthy = health->healthy && !hangs;
    int length = snprintf(head, sizeof head,
                          "{\n\"healthy\": %s,\n\"hangs\": %s,\n\"ms_since_turn\": %" PRId64,
                          healthy ? "true" : "false", hangs ? "true" : "false", idle_ms);
    *status = tddp_bytes_append(out, head, (size_t)length);
    if (*status == TDDP_OK) {
        *status = tddp_bytes_append(out, health->members.data, health->members.size);
    }
    pthread_mutex_unlock(&health->lock);
    if (*status == TDDP_OK) {
        *status = tddp_bytes_append(out, "}\n", 2);
    }
    return healthy;
}

tddp_status tddp_launch_health_answer(tddp_launch_health *health, tddp_launch_health_status outcome,
                                      bool head, tddp_bytes *out)
{
    char header[256];
    tddp_bytes body = {0};
    tddp_status status = TDDP_OK;
    if (outcome == TDDP_LAUNCH_HEALTH_OK && !put_body(health, &body, &status)) {
        outcome = TDDP_LAUNCH_HEALTH_UNAVAILABLE;
    }
    int length = snprintf(header, sizeof header,
                          "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n"
                          "Content-Length: %zu\r\nCache-Control: no-store\r\n"
                          "Connection: close\r\n\r\n",
                          (int)outcome, reason_of(outcome), body.size);
    if (status == TDDP_OK) {
        status = tddp_bytes_append(out, header, (size_t)length);
    }
    if (status == TDDP_OK && !head && body.size > 0) {
        status = tddp_bytes_append(out, body.data, body.size);
    }
    tddp_bytes_free(&body);
    return status;
}
