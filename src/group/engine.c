/*
 * One thread for all groups of a rank that share their backend's events: it tries, in turn, what
 * callers have left unfinished, as far as it goes without waiting, and sleeps until the next event.
 * So neither groups nor operations under way take a thread each. It starts with the first operation
 * that is left to it, and ends with the last group.
 *
 * A group is made with the engine of its parent. If its backend has other events, because it could
 * not share the parent's memory, it has an engine of its own. A group of one rank waits for no
 * other rank, at most for its device: its events do not matter.
 *
 * Invariants: the thread uses a group only while `polled` says so, and remove() waits for that.
 * Failures, which may take a while to complete, are left to a thread of the group's own. Locks are
 * taken in the order group (or its p2p), engine.
 */
#include <stdlib.h>

#include <tddp/cuda.h>

#include "group/group.h"

#define SPIN_NS 2000

int64_t tddp_engine_look_ns = 20 * TDDP_NS_PER_MS;

struct tddp_engine {
    atomic_int references;
    pid_t pid; /* of the process that made it: a forked child only frees memory */
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

tddp_status tddp_engine_create(tddp_engine **out)
{
    tddp_engine *engine = tddp_alloc(sizeof *engine);
    if (!engine) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = tddp_cond_init(&engine->wake);
    if (status == TDDP_OK) {
        status = tddp_cond_init(&engine->released);
        if (status) {
            pthread_cond_destroy(&engine->wake);
        }
    }
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

unsigned tddp_engine_poll(tddp_group *group)
{
    return tddp_group_poll_queue(group) | tddp_group_p2p_poll_all(group);
}

void tddp_engine_await(tddp_eventcount *events, uint32_t seen)
{
    tddp_eventcount_wait(events, seen, SPIN_NS, tddp_engine_look_ns);
}

/* Tries what is left of every group. With the lock held, which is released meanwhile. */
static unsigned poll_groups(tddp_engine *engine)
{
    unsigned found = 0;
    for (tddp_group *group = engine->groups; group; group = group->next_polled) {
        engine->polled = group;
        pthread_mutex_unlock(&engine->mutex);
        found |= tddp_engine_poll(group);
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

static void *engine_body(void *data)
{
    tddp_engine *engine = data;
    current_engine = engine;
    tddp_cuda_keep_device();
    pthread_mutex_lock(&engine->mutex);
    while (!engine->ending) {
        const uint32_t seen = engine->events ? tddp_eventcount_read(engine->events) : 0;
        engine->woken = false;
        const unsigned found = poll_groups(engine);
        if (found & TDDP_GROUP_PROGRESSED) {
            continue;
        }
        /* A callback may have removed the last group that has some. */
        tddp_eventcount *events = engine->events;
        if (events && (found & TDDP_GROUP_WAITING)) {
            pthread_mutex_unlock(&engine->mutex);
            tddp_engine_await(events, seen);
            pthread_mutex_lock(&engine->mutex);
            continue;
        }
        const bool waits = found & TDDP_GROUP_WAITING; /* one rank, for its device */
        const int64_t until = waits ? tddp_now_ns() + tddp_engine_look_ns : INT64_MAX;
        engine->idle = true;
        sleep_until_woken(engine, until);
        engine->idle = false;
    }
    pthread_mutex_unlock(&engine->mutex);
    return NULL;
}

tddp_status tddp_engine_start(tddp_engine *engine)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&engine->mutex);
    if (!engine->has_thread && engine->groups) {
        status = tddp_thread_start(&engine->thread, "tddp-progress", engine_body, engine);
        engine->has_thread = status == TDDP_OK;
    }
    pthread_mutex_unlock(&engine->mutex);
    return status;
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

void tddp_engine_wake(tddp_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    wake(engine);
    pthread_mutex_unlock(&engine->mutex);
}

/* --- groups ---------------------------------------------------------------------------------- */

/* False: its groups have other events. */
static bool add(tddp_engine *engine, tddp_group *group, tddp_eventcount *events)
{
    pthread_mutex_lock(&engine->mutex);
    while (engine->ending) {
        pthread_cond_wait(&engine->released, &engine->mutex);
    }
    const bool alone = group->world_size == 1;
    const bool same = alone || !engine->events || engine->events == events;
    if (same) {
        engine->events = alone ? engine->events : events;
        group->polled = true; /* before the engine's thread finds it */
        group->next_polled = engine->groups;
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
static void unlink_group(tddp_engine *engine, const tddp_group *group)
{
    tddp_group **at = &engine->groups;
    while (*at != group) {
        at = &(*at)->next_polled;
    }
    *at = group->next_polled;
}

/* Whether a group is left whose events these are. With the lock held. */
static bool keeps_events(const tddp_engine *engine)
{
    const tddp_group *group = engine->groups;
    while (group && group->world_size == 1) {
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

void tddp_engine_remove(tddp_group *group)
{
    tddp_engine *engine = group->engine;
    if (!group->polled) {
        return; /* it was not added */
    }
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
