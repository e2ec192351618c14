/*
 * The event loop: descriptors and times, each with a callback, and one poll(2) for all of them. One
 * thread.
 *
 * A source is its owner's memory: to wait for something else, or for another time, set its fields,
 * at any moment. All functions may be called within callbacks too.
 */
#ifndef TDDP_LAUNCH_LOOP_H
#define TDDP_LAUNCH_LOOP_H

#include <poll.h>
#include <sys/queue.h>

#include "base/base.h"

/* The order in which those are called that are ready at once. */
typedef enum tddp_launch_priority {
    TDDP_LAUNCH_PRIORITY_STREAM, /* what a worker wrote, before its end is handled */
    TDDP_LAUNCH_PRIORITY_SIGNAL,
    TDDP_LAUNCH_PRIORITY_EVENT,
    TDDP_LAUNCH_PRIORITY_DEADLINE, /* what came in time counts */
    TDDP_LAUNCH_PRIORITY_REQUEST,  /* a request for the state gets the latest */
} tddp_launch_priority;

/* The descriptor is ready, or the time has come. */
typedef tddp_status tddp_launch_callback(void *data);

typedef struct tddp_launch_source {
    int fd;       /* -1: none */
    short events; /* that are waited for, such as POLLIN; 0: the descriptor is left alone */
    tddp_launch_priority priority;
    int64_t time; /* when it is called in any case, once; 0 or INT64_MAX: never */
    tddp_launch_callback *callback;
    void *data;
    /* The loop's own. */
    bool added;
    bool ready; /* the descriptor, in this turn */
    TAILQ_ENTRY(tddp_launch_source) link;
} tddp_launch_source;

/* All zero is an empty one. */
typedef struct tddp_launch_loop {
    TAILQ_HEAD(tddp_launch_sources, tddp_launch_source) sources; /* by priority and age */
    struct pollfd *entries;                                      /* room for as many */
    size_t count;
    tddp_launch_source *current; /* is being called; NULL: none, or it was removed */
    tddp_launch_source *next;    /* is called after it; NULL: none */
} tddp_launch_loop;

/* Adds a source, whose descriptor is polled from the next turn on. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_loop_add(tddp_launch_loop *loop, tddp_launch_source *source);

/* Removes a source; one that was not added is fine. Its memory is free at once, its descriptor too.
 */
void tddp_launch_loop_remove(tddp_launch_loop *loop, tddp_launch_source *source);

/*
 * One turn: waits until something is ready or due, and calls the callbacks. One that fails ends the
 * turn with its status: its source waits for nothing any more, the others are called in the next
 * turn. Errors also: TDDP_SYSTEM.
 */
TDDP_NODISCARD tddp_status tddp_launch_loop_turn(tddp_launch_loop *loop);

/* Forgets all sources. */
void tddp_launch_loop_free(tddp_launch_loop *loop);

#endif
