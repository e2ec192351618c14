/*
 * Waits for all sources and calls those that are ready. Sources are called in the order of the
 * list, and polled in the opposite one: poll(2) looks at one descriptor after the other, so once it
 * has seen SIGCHLD it also sees what the worker wrote before.
 */
#include <errno.h>
#include <stdlib.h>

#include "launch/loop/loop.h"

tddp_status tddp_launch_loop_add(tddp_launch_loop *loop, tddp_launch_source *source)
{
    struct pollfd *entries = tddp_grow(loop->entries, loop->count, sizeof *entries);
    if (!entries) {
        return TDDP_OUT_OF_MEMORY;
    }
    loop->entries = entries;
    bool first = loop->count++ == 0;
    tddp_launch_source *before = first ? NULL : TAILQ_LAST(&loop->sources, tddp_launch_sources);
    while (before && before->priority > source->priority) {
        before = TAILQ_PREV(before, tddp_launch_sources, link);
    }
    if (before) {
        TAILQ_INSERT_AFTER(&loop->sources, before, source, link);
    } else {
        TAILQ_INSERT_HEAD(&loop->sources, source, link);
    }
    source->added = true;
    source->ready = false;
    return TDDP_OK;
}

void tddp_launch_loop_remove(tddp_launch_loop *loop, tddp_launch_source *source)
{
    if (source->added) {
        loop->next = loop->next == source ? TAILQ_NEXT(source, link) : loop->next;
        loop->current = loop->current == source ? NULL : loop->current;
        TAILQ_REMOVE(&loop->sources, source, link);
        loop->count--;
        source->added = false;
    }
}

void tddp_launch_loop_free(tddp_launch_loop *loop)
{
    while (loop->count > 0) {
        tddp_launch_loop_remove(loop, TAILQ_FIRST(&loop->sources));
    }
    free(loop->entries);
    *loop = (tddp_launch_loop){0};
}

/* Waits for a descriptor, or the first time. */
static tddp_status await(tddp_launch_loop *loop)
{
    int64_t first = INT64_MAX;
    tddp_launch_source *source;
    struct pollfd *entry = loop->entries + loop->count;
    TAILQ_FOREACH (source, &loop->sources, link) {
        /* Without events poll would still report an end, again and again; it passes over -1. */
        *--entry = (struct pollfd){source->events ? source->fd : -1, source->events, 0};
        first = source->time != 0 && source->time < first ? source->time : first;
    }
    int limit_ms = first == INT64_MAX ? -1 : tddp_deadline_poll_ms(first);
    if (poll(loop->entries, (nfds_t)loop->count, limit_ms) < 0 && errno != EINTR) {
        return tddp_fail_errno("poll");
    }
    entry = loop->entries + loop->count;
    TAILQ_FOREACH (source, &loop->sources, link) {
        source->ready = (--entry)->revents != 0;
    }
    return TDDP_OK;
}

tddp_status tddp_launch_loop_turn(tddp_launch_loop *loop)
{
    tddp_status status = await(loop);
    int64_t now = tddp_now_ns();
    loop->next = TAILQ_FIRST(&loop->sources);
    while (loop->next && status == TDDP_OK) {
        tddp_launch_source *source = loop->current = loop->next;
        bool due = source->time != 0 && source->time <= now;
        loop->next = TAILQ_NEXT(source, link);
        source->time = due ? 0 : source->time;
        if (due || (source->ready && source->events != 0)) {
            status = source->callback(source->data);
        }
        if (status != TDDP_OK && loop->current) {
            source->events = 0;
            source->time = 0;
        }
    }
    return status;
}
