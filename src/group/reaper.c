/*
 * Shuts down groups whose last reference is dropped on a thread that must not block: in a garbage
 * collector, a destructor, a work's callback. One thread at a time is lent to that
 * (backend/blocking.h), which shuts them down and frees them, one after the other. The process's
 * exit waits for it.
 *
 * Invariant: a group in the list has no references, and is used by that thread alone.
 */
#include <pthread.h>
#include <stdlib.h>

#include "group/group.h"

enum { EXIT_MS = 10000 };

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t idle;
    tddp_group *head;
    bool running;
    tddp_blocking_call call;
    bool ready; /* `idle` is initialized */
} reaper = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void reap(void *context, void *data)
{
    (void)context;
    (void)data;
    pthread_mutex_lock(&reaper.mutex);
    while (reaper.head) {
        tddp_group *group = reaper.head;
        reaper.head = group->next_reaped;
        pthread_mutex_unlock(&reaper.mutex);
        tddp_group_end(group);
        pthread_mutex_lock(&reaper.mutex);
    }
    reaper.running = false;
    pthread_cond_broadcast(&reaper.idle);
    pthread_mutex_unlock(&reaper.mutex);
}

/* Connections must not close while the process already runs its exit handlers. */
static void await_end(void)
{
    int64_t deadline = tddp_deadline_after_ms(EXIT_MS);
    pthread_mutex_lock(&reaper.mutex);
    while (reaper.running && tddp_cond_wait_until(&reaper.idle, &reaper.mutex, deadline)) {
    }
    pthread_mutex_unlock(&reaper.mutex);
}

static void before_fork(void)
{
    pthread_mutex_lock(&reaper.mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&reaper.mutex);
}

/* The thread and its groups are the parent's. */
static void after_fork_in_child(void)
{
    reaper.head = NULL;
    reaper.running = false;
    reaper.ready = tddp_cond_init(&reaper.idle) == TDDP_OK;
    pthread_mutex_unlock(&reaper.mutex);
}

/* With the lock held. */
static bool prepare(void)
{
    static bool registered; /* the handlers of fork and exit */
    registered = registered ||
                 (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0 &&
                  atexit(await_end) == 0);
    reaper.ready = reaper.ready || tddp_cond_init(&reaper.idle) == TDDP_OK;
    return registered && reaper.ready;
}

/* The lock is not held around calls for threads, which have one that a fork takes as well. */
bool tddp_group_reap(tddp_group *group)
{
    const bool reserved = tddp_blocking_reserve() == TDDP_OK;
    pthread_mutex_lock(&reaper.mutex);
    const bool accepted = prepare() && (reaper.running || reserved);
    const bool starts = accepted && !reaper.running;
    if (accepted) {
        group->next_reaped = reaper.head;
        reaper.head = group;
        reaper.running = true;
    }
    pthread_mutex_unlock(&reaper.mutex);
    if (starts) {
        reaper.call = (tddp_blocking_call){.run = reap};
        tddp_blocking_start(&reaper.call);
    } else if (reserved) {
        tddp_blocking_release();
    }
    return accepted;
}
