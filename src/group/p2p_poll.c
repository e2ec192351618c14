/*
 * Sends and receives of polled groups (engine.c): their callers finish them as far as they go at
 * once or wait, and the engine's thread all others, in turn.
 *
 * Invariants: one thread at a time calls finish() for a request (`polling`). A failure is completed
 * by a thread lent to the queue, since that may take a while. With `mutex` of the group's p2p held,
 * except around calls of the backend and completions.
 */
#include <stdlib.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

/* How much memory is moved within a call that does not wait. */
enum { MOST_BYTES_AT_ONCE = 64 << 10 };

bool tddp_group_p2p_polls(const tddp_group *group, const tddp_op *op)
{
    const tddp_inner *own = tddp_group_backend_for(group, op);
    return group->polled &&
           (own == tddp_group_backend_on(group, TDDP_CPU) || group->backends[TDDP_CUDA].copies);
}

/* --- requests -------------------------------------------------------------------------------- */

/* Calls finish() until the token is triggered; false: it is not finished. A failure is kept. */
static bool poll_request(tddp_group *group, tddp_work *work, tddp_cancel *cancel, int awaited)
{
    work->op.cancel = cancel;
    work->op.awaited = awaited;
    tddp_status status = tddp_group_p2p_finish(group, work);
    work->op.cancel = NULL;
    if (status == TDDP_CANCELED && cancel) {
        return false;
    }
    if (status) {
        tddp_group_keep_failure(work, status);
    }
    return true;
}

static void complete(tddp_group *group, tddp_work *work)
{
    tddp_status status = work->pending_status ? tddp_group_kept_failure(work) : TDDP_OK;
    const tddp_group *before = tddp_group_set_current(group);
    tddp_group_complete_in_flight(group, work, status);
    (void)tddp_group_set_current(before);
    tddp_work_release(work);
    tddp_group_end_in_flight(group, true);
}

/* On a thread of its own. */
static void complete_lent(void *group, void *work)
{
    complete(group, work);
}

/* Leaves a failure to a thread lent to the queue, if there can be one; or to one of its own while
 * that may be in an operation. */
static void leave_failure(tddp_group *group, tddp_work *work)
{
    pthread_mutex_lock(&group->mutex);
    const bool busy = group->running && group->executor == TDDP_GROUP_EXECUTOR_RUNS;
    if (busy && !tddp_blocking_reserve()) {
        pthread_mutex_unlock(&group->mutex);
        work->call = (tddp_blocking_call){complete_lent, group, work, NULL};
        tddp_blocking_start(&work->call);
        return;
    }
    /* A shutdown completes those that no thread has. */
    const bool leaves = group->state >= TDDP_GROUP_ENDING || !tddp_group_reserve_executor(group);
    if (leaves) {
        work->next = NULL;
        tddp_work **end = &group->failed;
        while (*end) {
            end = &(*end)->next;
        }
        *end = work;
        tddp_group_wake_progress(group);
        pthread_cond_broadcast(&group->idle);
    }
    pthread_mutex_unlock(&group->mutex);
    if (!leaves) {
        complete(group, work);
    }
}

void tddp_group_complete_polled(tddp_group *group, tddp_work *work)
{
    if (work->pending_status) {
        leave_failure(group, work);
    } else {
        complete(group, work);
    }
}

bool tddp_group_p2p_complete_failed(tddp_group *group)
{
    tddp_work *work = group->failed;
    if (!work) {
        return false;
    }
    group->failed = work->next;
    pthread_mutex_unlock(&group->mutex);
    complete(group, work);
    pthread_mutex_lock(&group->mutex);
    return true;
}

/* Whether it has been left to the engine. With the lock held. */
static bool is_left(const tddp_group_p2p *p2p, const tddp_work *work)
{
    const tddp_work *each = p2p->polled;
    while (each && each != work) {
        each = each->next;
    }
    return each != NULL;
}

/* With the lock held. */
static void unlink_work(tddp_group_p2p *p2p, const tddp_work *work)
{
    tddp_work **at = &p2p->polled;
    tddp_work *before = NULL;
    while (*at != work) {
        before = *at;
        at = &before->next;
    }
    *at = work->next;
    if (p2p->polled_last == work) {
        p2p->polled_last = before;
    }
}

/* --- the engine's thread --------------------------------------------------------------------- */

/* Polls each request once; returns those that are finished. With the lock held. */
static tddp_work *poll_all(tddp_group *group)
{
    tddp_group_p2p *p2p = &group->p2p;
    tddp_work *finished = NULL;
    tddp_work **end = &finished;
    tddp_work *next;
    for (tddp_work *work = p2p->polled; work; work = next) {
        bool done = false;
        if (!work->polling) {
            tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
            work->polling = true;
            pthread_mutex_unlock(&p2p->mutex);
            done = poll_request(group, work, &at_once, 0);
            pthread_mutex_lock(&p2p->mutex);
            work->polling = false;
        }
        next = work->next;
        if (done) {
            unlink_work(p2p, work);
            work->next = NULL;
            *end = work;
            end = &work->next;
        }
    }
    return finished;
}

/* Whether a request is left that no caller polls. With the lock held. */
static bool has_some(const tddp_group_p2p *p2p)
{
    const tddp_work *work = p2p->polled;
    while (work && work->polling) {
        work = work->next;
    }
    return work != NULL;
}

unsigned tddp_group_p2p_poll_all(tddp_group *group)
{
    tddp_group_p2p *p2p = &group->p2p;
    pthread_mutex_lock(&p2p->mutex);
    tddp_work *finished = poll_all(group);
    unsigned found = has_some(p2p) ? TDDP_GROUP_WAITING : 0;
    pthread_mutex_unlock(&p2p->mutex);
    while (finished) {
        tddp_work *next = finished->next;
        tddp_group_complete_polled(group, finished);
        finished = next;
        found |= TDDP_GROUP_PROGRESSED;
    }
    return found;
}

void tddp_group_p2p_poll_drain(tddp_group *group)
{
    tddp_eventcount *events = group->polled ? tddp_group_events(group) : NULL;
    tddp_group_p2p *p2p = &group->p2p;
    bool empty = !events;
    while (!empty) {
        const uint32_t seen = tddp_eventcount_read(events);
        const unsigned found = tddp_group_p2p_poll_all(group);
        pthread_mutex_lock(&p2p->mutex);
        empty = !p2p->polled;
        pthread_mutex_unlock(&p2p->mutex);
        if (!empty && !(found & TDDP_GROUP_PROGRESSED)) {
            tddp_engine_await(events, seen);
        }
    }
}

/* Appends it to what is left to the engine; false: the group is ending, and the engine may have
 * looked at its messages for the last time. */
static bool leave(tddp_group *group, tddp_work *work)
{
    tddp_group_p2p *p2p = &group->p2p;
    pthread_mutex_lock(&p2p->mutex);
    if (atomic_load(&group->state) >= TDDP_GROUP_ENDING) {
        pthread_mutex_unlock(&p2p->mutex);
        return false;
    }
    work->next = NULL;
    if (p2p->polled_last) {
        p2p->polled_last->next = work;
    } else {
        p2p->polled = work;
    }
    p2p->polled_last = work;
    if (tddp_engine_start(group->engine)) {
        tddp_log(TDDP_LOG_WARN, "group",
                 "messages of \"%s\" go on only while they are waited for: %s", group->name,
                 tddp_error_message());
    }
    tddp_engine_wake(group->engine);
    pthread_mutex_unlock(&p2p->mutex);
    return true;
}

/* --- callers --------------------------------------------------------------------------------- */

/* Whether the caller has finished it within the call. */
static bool poll_within_call(tddp_group *group, tddp_work *work, const tddp_op_args *args)
{
    if (args->inline_us < 0) {
        return poll_request(group, work, args->cancel, 1);
    }
    const int64_t us =
        args->inline_us < TDDP_GROUP_INLINE_US ? args->inline_us : TDDP_GROUP_INLINE_US;
    tddp_cancel until = {.fd = tddp_cancel_fd(args->cancel),
                         .also = args->cancel,
                         .deadline = us > 0 ? tddp_now_ns() + us * 1000 : 1};
    return tddp_group_op_bytes(&work->op) <=
               (size_t)(us > 0 ? TDDP_GROUP_INLINE_BYTES : MOST_BYTES_AT_ONCE) &&
           poll_request(group, work, &until, us > 0);
}

void tddp_group_p2p_poll(tddp_group *group, tddp_work *work, const tddp_op_args *args)
{
    if (!poll_within_call(group, work, args)) {
        if (leave(group, work)) {
            return;
        }
        (void)poll_request(group, work, NULL, 1); /* the shutdown has aborted it */
    }
    tddp_group_complete_polled(group, work);
}

/* Marks a request that no thread polls; NULL: there is no such thing to do for this work. */
static tddp_group *take(tddp_work *work)
{
    pthread_mutex_lock(&work->mutex);
    tddp_group *group = atomic_load(&work->done) ? NULL : work->group;
    if (group) {
        pthread_mutex_lock(&group->p2p.mutex);
    }
    pthread_mutex_unlock(&work->mutex);
    if (group) {
        bool is_free = !work->polling && is_left(&group->p2p, work);
        work->polling = work->polling || is_free;
        pthread_mutex_unlock(&group->p2p.mutex);
        group = is_free ? group : NULL;
    }
    return group;
}

void tddp_group_p2p_make_progress(tddp_work *work, tddp_cancel *cancel)
{
    tddp_group *group = take(work);
    if (!group) {
        return;
    }
    tddp_group_p2p *p2p = &group->p2p;
    bool finished = poll_request(group, work, cancel, 1);
    pthread_mutex_lock(&p2p->mutex);
    work->polling = false;
    if (finished) {
        unlink_work(p2p, work);
    }
    tddp_engine_wake(group->engine);
    pthread_mutex_unlock(&p2p->mutex);
    if (finished) {
        tddp_group_complete_polled(group, work);
    }
}
