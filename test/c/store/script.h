/*
 * A server that reads from a script: what it expects of a client, byte for byte, and what it
 * answers. Each test file says with `play`, on a thread of its own, how the hello goes before.
 */
#ifndef TDDP_TEST_STORE_SCRIPT_H
#define TDDP_TEST_STORE_SCRIPT_H

#include "store_fixture.h"

typedef struct step {
    const char *expect; /* bytes from the client */
    const char *answer; /* NULL, for those who play it: hang up, accept the next connection */
} step;

typedef struct script {
    int listen_fd;
    const step *steps;
    size_t count;
    int fd; /* the connection, still open after the last step */
    pthread_t thread;
} script;

/* Waits for a client; returns its connection. */
static inline int script_accept(const script *s)
{
    int fd;
    tddp_net_address from;
    CHECK_OK(tddp_net_poll(s->listen_fd, POLLIN, tddp_deadline_after_ms(10000), -1));
    CHECK(tddp_net_accept(s->listen_fd, &fd, &from));
    return fd;
}

/* Has `play(s)` played on a thread and returns a client of it. */
static inline tddp_store *scripted(script *s, void *(*play)(void *s), const step *steps,
                                   size_t count)
{
    *s = (script){.steps = steps, .count = count, .fd = -1};
    tddp_net_address local;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &s->listen_fd));
    CHECK_OK(tddp_net_local(s->listen_fd, &local));
    CHECK_INT(pthread_create(&s->thread, NULL, play, s), 0);
    return client_of(tddp_net_port(&local));
}

static inline void script_end(script *s, tddp_store *store)
{
    pthread_join(s->thread, NULL);
    CHECK_SILENT(s->fd); /* nothing more than the script had */
    tddp_net_close(s->fd);
    tddp_net_close(s->listen_fd);
    tddp_store_release(store);
}

#endif
