/*
 * Ends groups whose last reference goes on a thread that must not block: in a garbage collector,
 * in a destructor, in a work's callback. A thread of the process's own shuts them down and frees
 * them, one after the other; it lasts as long as there are any. The process's exit waits for it.
 *
 * Invariant: a group in the list has no reference left, and belongs to the thread.
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
    bool ready; /* `idle` is made */
} reaper = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void *reap(void *nothing)
{
    (void)nothing;
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
    return NULL;
}

/* Connections that are still closing must not meet a process that is half gone. */
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

/* The thread and its groups are the parent's, where another may wait for them. */
static void after_fork_in_child(void)
{
    reaper.head = NULL;
    reaper.running = false;
    reaper.ready = tddp_cond_init(&reaper.idle) == TDDP_OK;
    pthread_mutex_unlock(&reaper.mutex);
}

/* With the lock held. */
static bool get_ready(void)
{
    static bool known; /* to fork and exit */
    known = known || (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0 &&
                      atexit(await_end) == 0);
    reaper.ready = reaper.ready || tddp_cond_init(&reaper.idle) == TDDP_OK;
    return known && reaper.ready;
}

static tddp_status start(void)
{
    pthread_t thread;
    tddp_status status = tddp_thread_start(&thread, "tddp-reaper", reap, NULL);
    if (status == TDDP_OK) {
        (void)pthread_detach(thread); /* of a thread just made, which nobody joins */
    }
    return status;
}

bool tddp_group_reap(tddp_group *group)
{
    pthread_mutex_lock(&reaper.mutex);
    bool taken = get_ready();
    if (taken && !reaper.running) {
        taken = reaper.running = start() == TDDP_OK;
    }
    if (taken) {
        group->next_reaped = reaper.head;
        reaper.head = group;
    }
    pthread_mutex_unlock(&reaper.mutex);
    return taken;
}
