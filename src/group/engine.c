/*
 * One thread for all groups of a rank that share their backend's events: it tries, in turn, what
 * callers have left unfinished, as far as it goes without waiting, and sleeps until the next event.
 * So neither groups nor operations under way take a thread each. It starts with the first operation
 * that is left to it, and ends with the last group.
 *
 * A group is made with the engine of its parent. If its backend has other events, because it could
 * not share the parent's memory, it has an engine of its own. A group of one rank waits for no
 * other rank, at most for its device: events on its memory do not matter.
 *
 * The watchdog is the process's engine for devices: it tests what its groups have launched
 * (device.c), and sleeps a little longer each time that nothing has changed, since a device wakes
 * nobody.
 *
 * Invariants: the thread uses a group only while `polled` says so, and remove() waits for that.
 * Failures, which may take a while to complete, are left to a thread of the group's own. Locks are
 * taken in the order group (or its p2p), engine.
 */
#include <sched.h>
#include <stdlib.h>

#include <tddp/cuda.h>

#include "group/group.h"

#define SPIN_NS 2000

/* Of the watchdog. */
enum {
    MAX_YIELDS = 200,     /* before it sleeps between tests */
    SLEEP_NS = 5 * 1000,  /* the first time; once more each time, */
    MAX_TESTS = 200 + 40, /* up to this many */
};

int64_t tddp_engine_look_ns = 20 * TDDP_NS_PER_MS;

struct tddp_engine {
    atomic_int references;
    pid_t pid; /* of the process that made it: a forked child only frees memory */
    bool watchdog;
    pthread_mutex_t mutex;
    pthread_cond_t wake;     /* for the thread: something was left to it, or `ending` is set */
    pthread_cond_t released; /* `polled` or `ending` has changed */
    tddp_eventcount *events; /* of all groups of several ranks; NULL: there are none */
    tddp_eventcount own;     /* of those whose backends count none on shared memory */
    tddp_engine *first;      /* whose `own` this one's groups may have; NULL: none */
    tddp_group *groups;
    const tddp_group *polled; /* what the thread uses at the moment */
    size_t removers;          /* threads that wait for that */
    bool idle;                /* the thread sleeps until it is woken */
    bool woken;
    bool ending;
    bool has_thread;
    pthread_t thread;
};

/* The engine whose thread this is. */
static _Thread_local const tddp_engine *current_engine;

static tddp_status init_conditions(tddp_engine *engine)
{
    tddp_status status = tddp_cond_init(&engine->wake);
    if (status == TDDP_OK) {
        status = tddp_cond_init(&engine->released);
        if (status) {
            pthread_cond_destroy(&engine->wake);
        }
    }
    return status;
}

tddp_status tddp_engine_create(tddp_engine **out)
{
    tddp_engine *engine = tddp_alloc(sizeof *engine);
    if (!engine) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = init_conditions(engine);
    if (status) {
        free(engine);
        return status;
    }
    pthread_mutex_init(&engine->mutex, NULL);
    atomic_init(&engine->references, 1);
    engine->pid = tddp_process_id();
    *out = engine;
    return TDDP_OK;
}

tddp_engine *tddp_engine_retain(tddp_engine *engine)
{
    if (engine) {
        atomic_fetch_add(&engine->references, 1);
    }
    return engine;
}

void tddp_engine_release(tddp_engine *engine)
{
    if (!engine || atomic_fetch_sub(&engine->references, 1) != 1) {
        return;
    }
    if (engine->pid == tddp_process_id()) {
        pthread_cond_destroy(&engine->released);
        pthread_cond_destroy(&engine->wake);
        pthread_mutex_destroy(&engine->mutex);
    }
    tddp_engine_release(engine->first);
    free(engine);
}

tddp_eventcount *tddp_engine_events(tddp_engine *engine)
{
    return &engine->own;
}

bool tddp_engine_on_thread(const tddp_engine *engine)
{
    return engine && current_engine == engine;
}

/* --- the thread ------------------------------------------------------------------------------ */

/* Where a group has the next one of this engine. */
static tddp_group **next_of(const tddp_engine *engine, tddp_group *group)
{
    return engine->watchdog ? &group->device.next_watched : &group->next_polled;
}

/* Tries what is left of every group. With the lock held, which is released meanwhile. */
static unsigned poll_groups(tddp_engine *engine)
{
    unsigned found = 0;
    for (tddp_group *group = engine->groups; group; group = *next_of(engine, group)) {
        engine->polled = group;
        pthread_mutex_unlock(&engine->mutex);
        found |= engine->watchdog ? tddp_group_device_test(group) : tddp_group_poll(group);
        pthread_mutex_lock(&engine->mutex);
        engine->polled = NULL;
        if (engine->removers > 0) {
            pthread_cond_broadcast(&engine->released);
        }
    }
    return found;
}

/* With the lock held. */
static void sleep_until_woken(tddp_engine *engine, int64_t until)
{
    while (!engine->woken && !engine->ending) {
        if (until == INT64_MAX) {
            pthread_cond_wait(&engine->wake, &engine->mutex);
        } else if (!tddp_cond_wait_until(&engine->wake, &engine->mutex, until)) {
            return;
        }
    }
}

/* What waits gives no event: of one rank, for its device, or on devices, tested so many times. With
 * the lock held, which is released meanwhile. */
static void await_device(tddp_engine *engine, int tests)
{
    int64_t ns = tddp_engine_look_ns;
    if (engine->watchdog) {
        ns = (int64_t)SLEEP_NS * (tests - MAX_YIELDS);
    }
    if (ns > 0) {
        sleep_until_woken(engine, tddp_now_ns() + ns);
    } else {
        pthread_mutex_unlock(&engine->mutex);
        (void)sched_yield();
        pthread_mutex_lock(&engine->mutex);
    }
}

static void *engine_body(void *data)
{
    tddp_engine *engine = data;
    int tests = 0; /* in a row that changed nothing */
    current_engine = engine;
    tddp_cuda_keep_device();
    pthread_mutex_lock(&engine->mutex);
    while (!engine->ending) {
        const uint32_t seen = engine->events ? tddp_eventcount_read(engine->events) : 0;
        tests = engine->woken ? 0 : tests + (tests < MAX_TESTS);
        engine->woken = false;
        const unsigned found = poll_groups(engine);
        if (found & TDDP_GROUP_PROGRESSED) {
            tests = 0;
            continue;
        }
        /* A callback may have removed the last group that has some. */
        tddp_eventcount *events = engine->events;
        if (events && (found & TDDP_GROUP_WAITING)) {
            pthread_mutex_unlock(&engine->mutex);
            tddp_eventcount_wait(events, seen, SPIN_NS, tddp_engine_look_ns);
            pthread_mutex_lock(&engine->mutex);
            continue;
        }
        engine->idle = true;
        if (found & TDDP_GROUP_WAITING) {
            await_device(engine, tests);
        } else {
            sleep_until_woken(engine, INT64_MAX);
        }
        engine->idle = false;
    }
    pthread_mutex_unlock(&engine->mutex);
    return NULL;
}

/* With the lock held. */
static void wake(tddp_engine *engine)
{
    engine->woken = true;
    if (engine->idle) {
        pthread_cond_signal(&engine->wake);
    } else if (engine->has_thread && engine->events) {
        tddp_eventcount_notify(engine->events);
    }
}

tddp_status tddp_engine_start(tddp_engine *engine)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&engine->mutex);
    if (!engine->has_thread && engine->groups) {
        status =
            tddp_thread_start(&engine->thread, engine->watchdog ? "tddp-watchdog" : "tddp-progress",
                              engine_body, engine);
        engine->has_thread = status == TDDP_OK;
    }
    wake(engine);
    pthread_mutex_unlock(&engine->mutex);
    return status;
}

/* --- groups ---------------------------------------------------------------------------------- */

/* Whether the group's events are those of memory that no other rank has. */
static bool waits_for_none(const tddp_engine *engine, const tddp_group *group,
                           const tddp_eventcount *events)
{
    return group->world_size == 1 && events != &engine->own;
}

/* False: its groups have other events. */
static bool add(tddp_engine *engine, tddp_group *group, tddp_eventcount *events)
{
    pthread_mutex_lock(&engine->mutex);
    while (engine->ending) {
        pthread_cond_wait(&engine->released, &engine->mutex);
    }
    const bool alone = engine->watchdog || waits_for_none(engine, group, events);
    const bool same = alone || !engine->events || engine->events == events;
    if (same) {
        engine->events = alone ? engine->events : events;
        /* Before the engine's thread finds it. */
        *(engine->watchdog ? &group->device.watched : &group->polled) = true;
        *next_of(engine, group) = engine->groups;
        engine->groups = group;
    }
    pthread_mutex_unlock(&engine->mutex);
    return same;
}

tddp_status tddp_engine_add(tddp_group *group)
{
    tddp_eventcount *events = tddp_group_events(group);
    if (!add(group->engine, group, events)) {
        tddp_engine *own;
        tddp_status status = tddp_engine_create(&own);
        if (status) {
            return status;
        }
        own->first = group->engine;
        group->engine = own;
        (void)add(own, group, events);
    }
    return TDDP_OK;
}

/* With the lock held. */
static void unlink_group(tddp_engine *engine, tddp_group *group)
{
    tddp_group **at = &engine->groups;
    while (*at != group) {
        at = next_of(engine, *at);
    }
    *at = *next_of(engine, group);
}

/* Whether a group is left whose events these are. With the lock held. */
static bool keeps_events(const tddp_engine *engine)
{
    const tddp_group *group = engine->groups;
    while (group && waits_for_none(engine, group, engine->events)) {
        group = group->next_polled;
    }
    return group != NULL;
}

static void end_thread(tddp_engine *engine)
{
    pthread_join(engine->thread, NULL);
    pthread_mutex_lock(&engine->mutex);
    engine->events = NULL;
    engine->ending = false;
    engine->has_thread = false;
    const bool goes_on = engine->groups;
    pthread_cond_broadcast(&engine->released);
    pthread_mutex_unlock(&engine->mutex);
    if (goes_on && tddp_engine_start(engine)) {
        tddp_log(TDDP_LOG_WARN, "group", "operations go on only while they are waited for: %s",
                 tddp_error_message());
    }
}

static void remove_group(tddp_engine *engine, tddp_group *group)
{
    pthread_mutex_lock(&engine->mutex);
    engine->removers++;
    while (engine->polled == group) {
        pthread_cond_wait(&engine->released, &engine->mutex);
    }
    engine->removers--;
    unlink_group(engine, group);
    const bool events_end = engine->events && !keeps_events(engine);
    /* With the last group, or because what the thread sleeps on is about to go; once, and not on
     * that thread, which does not sleep then. */
    const bool ends = engine->has_thread && !engine->ending && !tddp_engine_on_thread(engine) &&
                      (!engine->groups || events_end);
    if (ends) {
        engine->ending = true;
        wake(engine);
    } else if (events_end && !engine->ending) {
        engine->events = NULL;
    }
    pthread_mutex_unlock(&engine->mutex);
    if (ends) {
        end_thread(engine);
    }
}

void tddp_engine_remove(tddp_group *group)
{
    if (group->polled) { /* else it was not added */
        remove_group(group->engine, group);
    }
}

/* --- the watchdog ---------------------------------------------------------------------------- */

static tddp_engine watchdog = {.watchdog = true, .mutex = PTHREAD_MUTEX_INITIALIZER};
static bool registered; /* for fork() */

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
    watchdog = (tddp_engine){.watchdog = true, .mutex = PTHREAD_MUTEX_INITIALIZER};
    current_engine = NULL;
}

static void register_fork(void)
{
    registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

tddp_status tddp_watchdog_add(tddp_group *group)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!group->launches) {
        return TDDP_OK;
    }
    (void)pthread_once(&once, register_fork);
    pthread_mutex_lock(&watchdog.mutex);
    tddp_status status = registered ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && !watchdog.pid) {
        status = init_conditions(&watchdog);
        watchdog.pid = status ? 0 : tddp_process_id();
    }
    pthread_mutex_unlock(&watchdog.mutex);
    if (status == TDDP_OK) {
        (void)add(&watchdog, group, NULL);
    }
    return status;
}

void tddp_watchdog_remove(tddp_group *group)
{
    if (group->device.watched) {
        remove_group(&watchdog, group);
    }
}

tddp_status tddp_watchdog_start(void)
{
    return tddp_engine_start(&watchdog);
}

void tddp_watchdog_wake(void)
{
    pthread_mutex_lock(&watchdog.mutex);
    wake(&watchdog);
    pthread_mutex_unlock(&watchdog.mutex);
}

bool tddp_watchdog_on_thread(void)
{
    return tddp_engine_on_thread(&watchdog);
}
