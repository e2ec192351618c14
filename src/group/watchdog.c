/*
 * One thread for all groups of the process on devices: it tests what they have launched, in turn,
 * and sleeps a little longer each time that nothing has changed, since a device wakes nobody. It
 * starts with the first launch and ends with the last group.
 *
 * Invariants: the thread uses a group only while `tested` says so, and remove() waits for that.
 * Nothing that may take a while runs on it but callbacks of works: failures are completed, and
 * backends aborted, on lent threads. Locks are taken in the order group, watchdog. All state is the
 * process's; a forked child starts without any.
 */
#include <sched.h>

#include <tddp/cuda.h>

#include "group/group.h"

enum {
    MAX_YIELDS = 200,          /* before the thread sleeps between tests */
    MIN_SLEEP_NS = 5 * 1000,   /* the first sleep */
    MAX_SLEEP_NS = 200 * 1000, /* the longest sleep */
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t wake;     /* for the thread: something was launched, or `ending` is set */
    pthread_cond_t released; /* `tested` or `ending` has changed */
    bool ready;              /* these are initialized */
    tddp_group *groups;
    const tddp_group *tested; /* what the thread uses at the moment */
    size_t removers;          /* threads that wait for that */
    bool woken;
    bool sleeps;
    bool ending;
    bool has_thread;
    pthread_t thread;
} watchdog = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local bool on_thread;

bool tddp_watchdog_on_thread(void)
{
    return on_thread;
}

/* --- the thread ------------------------------------------------------------------------------ */

/* With the lock held, which is released meanwhile. */
static unsigned test_groups(void)
{
    unsigned found = 0;
    for (tddp_group *group = watchdog.groups; group; group = group->device.next_watched) {
        watchdog.tested = group;
        pthread_mutex_unlock(&watchdog.mutex);
        found |= tddp_group_device_test(group);
        pthread_mutex_lock(&watchdog.mutex);
        watchdog.tested = NULL;
        if (watchdog.removers > 0) {
            pthread_cond_broadcast(&watchdog.released);
        }
    }
    return found;
}

/* Waits between tests, a little longer each time. With the lock held, which is released meanwhile.
 */
static void back_off(int *tests)
{
    if (++*tests <= MAX_YIELDS) {
        pthread_mutex_unlock(&watchdog.mutex);
        (void)sched_yield();
        pthread_mutex_lock(&watchdog.mutex);
        return;
    }
    const int64_t ns = (int64_t)MIN_SLEEP_NS * (*tests - MAX_YIELDS);
    const int64_t until = tddp_now_ns() + (ns < MAX_SLEEP_NS ? ns : MAX_SLEEP_NS);
    watchdog.sleeps = true;
    while (!watchdog.woken && !watchdog.ending &&
           tddp_cond_wait_until(&watchdog.wake, &watchdog.mutex, until)) {
    }
    watchdog.sleeps = false;
}

static void *body(void *nothing)
{
    (void)nothing;
    on_thread = true;
    tddp_cuda_keep_device();
    pthread_mutex_lock(&watchdog.mutex);
    for (int tests = 0; !watchdog.ending;) {
        tests = watchdog.woken ? 0 : tests;
        watchdog.woken = false;
        const unsigned found = test_groups();
        tests = found & TDDP_GROUP_PROGRESSED ? 0 : tests;
        if (found & TDDP_GROUP_WAITING) {
            back_off(&tests);
            continue;
        }
        watchdog.sleeps = true;
        while (!watchdog.woken && !watchdog.ending) {
            pthread_cond_wait(&watchdog.wake, &watchdog.mutex);
        }
        watchdog.sleeps = false;
    }
    pthread_mutex_unlock(&watchdog.mutex);
    return NULL;
}

/* --- forks ----------------------------------------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&watchdog.mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&watchdog.mutex);
}

/* The thread and its groups are the parent's. */
static void after_fork_in_child(void)
{
    watchdog.groups = NULL;
    watchdog.tested = NULL;
    watchdog.removers = 0;
    watchdog.woken = watchdog.sleeps = watchdog.ending = watchdog.has_thread = false;
    watchdog.ready = false;
    on_thread = false;
    pthread_mutex_unlock(&watchdog.mutex);
}

static bool registered; /* for fork() */

static void register_fork(void)
{
    registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

/* With the lock held. */
static tddp_status prepare(void)
{
    if (watchdog.ready) {
        return TDDP_OK;
    }
    tddp_status status = registered ? tddp_cond_init(&watchdog.wake) : TDDP_OUT_OF_MEMORY;
    status = status ? status : tddp_cond_init(&watchdog.released);
    watchdog.ready = status == TDDP_OK;
    return status;
}

/* --- groups ---------------------------------------------------------------------------------- */

tddp_status tddp_watchdog_add(tddp_group *group)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!group->launches) {
        return TDDP_OK;
    }
    (void)pthread_once(&once, register_fork);
    pthread_mutex_lock(&watchdog.mutex);
    tddp_status status = prepare();
    while (status == TDDP_OK && watchdog.ending) {
        pthread_cond_wait(&watchdog.released, &watchdog.mutex);
    }
    if (status == TDDP_OK) {
        group->device.watched = true;
        group->device.next_watched = watchdog.groups;
        watchdog.groups = group;
    }
    pthread_mutex_unlock(&watchdog.mutex);
    return status;
}

tddp_status tddp_watchdog_start(void)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&watchdog.mutex);
    if (!watchdog.has_thread) {
        status = tddp_thread_start(&watchdog.thread, "tddp-watchdog", body, NULL);
        watchdog.has_thread = status == TDDP_OK;
    }
    pthread_mutex_unlock(&watchdog.mutex);
    return status;
}

void tddp_watchdog_wake(void)
{
    pthread_mutex_lock(&watchdog.mutex);
    watchdog.woken = true;
    if (watchdog.sleeps) {
        pthread_cond_signal(&watchdog.wake);
    }
    pthread_mutex_unlock(&watchdog.mutex);
}

static void end_thread(void)
{
    pthread_join(watchdog.thread, NULL);
    pthread_mutex_lock(&watchdog.mutex);
    watchdog.ending = false;
    watchdog.has_thread = false;
    pthread_cond_broadcast(&watchdog.released);
    pthread_mutex_unlock(&watchdog.mutex);
}

void tddp_watchdog_remove(tddp_group *group)
{
    if (!group->device.watched) {
        return;
    }
    pthread_mutex_lock(&watchdog.mutex);
    watchdog.removers++;
    while (watchdog.tested == group) {
        pthread_cond_wait(&watchdog.released, &watchdog.mutex);
    }
    watchdog.removers--;
    tddp_group **at = &watchdog.groups;
    while (*at != group) {
        at = &(*at)->device.next_watched;
    }
    *at = group->device.next_watched;
    group->device.watched = false;
    /* Not on that thread, in a callback of another group, which is in the list. */
    const bool ends = watchdog.has_thread && !watchdog.ending && !watchdog.groups && !on_thread;
    watchdog.ending = watchdog.ending || ends;
    pthread_cond_signal(&watchdog.wake);
    pthread_mutex_unlock(&watchdog.mutex);
    if (ends) {
        end_thread();
    }
}
