/*
 * Waits for all sources and calls those that are ready. Sources are called in the order of the
 * list, and polled in the opposite one: poll(2) looks at one descriptor after the other, so once it
 * has seen SIGCHLD it also sees what the worker wrote before.
 *
 * Invariant: within a turn no source changes its place in the list: removed ones leave a gap, new
 * ones are appended, beyond those that were polled.
 */
#include <errno.h>
#include <stdlib.h>

#include "launch/loop/loop.h"

tddp_status tddp_launch_loop_add(tddp_launch_loop *loop, tddp_launch_source *source)
{
    if (loop->count == loop->capacity) {
        size_t capacity = loop->capacity ? loop->capacity * 2 : 16;
        tddp_launch_source **sources = tddp_resize(loop->sources, capacity * sizeof *sources);
        if (!sources) {
            return TDDP_OUT_OF_MEMORY;
        }
        loop->sources = sources;
        struct pollfd *entries = tddp_resize(loop->entries, capacity * sizeof *entries);
        if (!entries) {
            return TDDP_OUT_OF_MEMORY;
        }
        loop->entries = entries;
        loop->capacity = capacity;
    }
    loop->sources[loop->count++] = source;
    return TDDP_OK;
}

void tddp_launch_loop_remove(tddp_launch_loop *loop, tddp_launch_source *source)
{
    for (size_t i = 0; i < loop->count; i++) {
        if (loop->sources[i] == source) {
            loop->sources[i] = NULL;
        }
    }
}

void tddp_launch_loop_free(tddp_launch_loop *loop)
{
    free(loop->sources);
    free(loop->entries);
    *loop = (tddp_launch_loop){0};
}

/* Closes the gaps and puts new sources in their places. */
static void arrange(tddp_launch_loop *loop)
{
    size_t kept = 0;
    for (size_t i = 0; i < loop->count; i++) {
        tddp_launch_source *source = loop->sources[i];
        size_t at = kept;
        if (!source) {
            continue;
        }
        for (; at > 0 && loop->sources[at - 1]->priority > source->priority; at--) {
            loop->sources[at] = loop->sources[at - 1];
        }
        loop->sources[at] = source;
        kept++;
    }
    loop->count = kept;
}

/* Fills in what is polled, the last source first; returns the first time. */
static int64_t collect(tddp_launch_loop *loop)
{
    int64_t first = INT64_MAX;
    for (size_t i = 0; i < loop->count; i++) {
        const tddp_launch_source *source = loop->sources[i];
        /* Without events poll would still report an end, again and again; it passes over -1. */
        loop->entries[loop->count - 1 - i] =
            (struct pollfd){.fd = source->events ? source->fd : -1, .events = source->events};
        if (source->time != 0 && source->time < first) {
            first = source->time;
        }
    }
    return first;
}

tddp_status tddp_launch_loop_turn(tddp_launch_loop *loop)
{
    arrange(loop);
    size_t polled = loop->count;
    int64_t first = collect(loop);
    int limit_ms = first == INT64_MAX ? -1 : tddp_deadline_poll_ms(first);
    if (poll(loop->entries, (nfds_t)polled, limit_ms) < 0) {
        return errno == EINTR ? TDDP_OK : tddp_fail_errno("poll");
    }
    int64_t now = tddp_now_ns();
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < polled && status == TDDP_OK; i++) {
        tddp_launch_source *source = loop->sources[i];
        if (!source) {
            continue;
        }
        bool due = source->time != 0 && source->time <= now;
        bool ready = source->events != 0 && loop->entries[polled - 1 - i].revents != 0;
        source->time = due ? 0 : source->time;
        status = due || ready ? source->callback(source->data) : TDDP_OK;
        if (status != TDDP_OK && loop->sources[i]) {
            source->events = 0;
            source->time = 0;
        }
    }
    return status;
}
