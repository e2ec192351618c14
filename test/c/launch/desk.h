/*
 * A console of which nothing is written: what would be is in its queues, for tests to look at.
 */
#ifndef TDDP_TEST_DESK_H
#define TDDP_TEST_DESK_H

#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "launch/output/route.h"

typedef struct desk {
    tddp_launch_console console;
    tddp_launch_route routes[2];
} desk;

static inline void open_desk(desk *made)
{
    *made = (desk){0};
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        made->console.sinks[i] = (tddp_launch_sink){.fd = INT_MAX, .at_line = true};
        made->console.streams[i] = &made->console.sinks[i];
        made->routes[i] = (tddp_launch_route){.console = &made->console,
                                              .shown = &made->console.sinks[TDDP_LAUNCH_OUT],
                                              .file.fd = -1,
                                              .source.fd = -1};
    }
}

static inline void take(tddp_launch_route *route, const char *data)
{
    CHECK_OK(tddp_launch_route_take(route, data, strlen(data), false));
}

static inline void check_console(desk *made, int stream, const char *expected)
{
    tddp_bytes *queue = &made->console.sinks[stream].queue;
    CHECK_OK(tddp_bytes_append(queue, "", 1));
    CHECK_TEXT(queue->data, expected);
    tddp_bytes_free(queue);
}

static inline void close_desk(desk *made)
{
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_route_free(&made->routes[i]);
        tddp_bytes_free(&made->console.sinks[i].queue);
    }
}

static inline void check_file(const char *path, const char *expected)
{
    char text[4096] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    ssize_t got = read(fd, text, sizeof text - 1);
    CHECK(got >= 0);
    text[got] = '\0';
    CHECK_TEXT(text, expected);
    close(fd);
}

#endif
