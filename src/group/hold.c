/*
 * Calls and operations that use a group's backends, and the group's end, which waits for them. Any
 * thread that has a reference to the group.
 *
 * Invariant: the backend's context is there while a call holds the group or an operation has no
 * outcome. Those who call count themselves, then look at the state; a shutdown changes the state,
 * then looks at the count: so one of the two sees the other, without a lock on the way of each
 * operation. A call that may wait for other ranks within the backend counts as an operation under
 * way instead (tddp_group_begin_in_flight()), which a shutdown aborts.
 */
#include "group/checks.h"

/* Between tries of a thread that has to do what the engine, or the watchdog, can't. */
enum { TRY_MS = 1 };

tddp_status tddp_group_check_open(tddp_group *group, const char *call)
{
    if (group->failure) {
        return tddp_group_fail_unstarted(group, call);
    }
    return group->state == TDDP_GROUP_OPEN ? TDDP_OK : tddp_group_fail_destroyed(group);
}

tddp_status tddp_group_fail_destroyed(const tddp_group *group)
{
    return tddp_fail(TDDP_GROUP_CLOSED, "group \"%s\" is destroyed", group->name);
}

tddp_status tddp_group_hold(tddp_group *group, const char *call)
{
    atomic_fetch_add(&group->holders, 1);
    if (atomic_load(&group->state) == TDDP_GROUP_OPEN) {
        return TDDP_OK;
    }
    tddp_group_let_go(group);
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, call);
    pthread_mutex_unlock(&group->mutex);
    return status;
}

void tddp_group_let_go(tddp_group *group)
{
    if (atomic_fetch_sub(&group->holders, 1) == 1 &&
        atomic_load(&group->state) != TDDP_GROUP_OPEN) {
        pthread_mutex_lock(&group->mutex);
        pthread_cond_broadcast(&group->idle);
        pthread_mutex_unlock(&group->mutex);
    }
}

tddp_status tddp_group_begin_in_flight(tddp_group *group, const char *call)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, call);
    group->in_flight += status == TDDP_OK;
    pthread_mutex_unlock(&group->mutex);
    return status;
}

void tddp_group_end_in_flight(tddp_group *group, bool completed)
{
    pthread_mutex_lock(&group->mutex);
    if (completed) {
        atomic_fetch_sub(&group->in_flight_completing, 1);
    }
    tddp_group_ended(group, false);
    pthread_mutex_unlock(&group->mutex);
}

/* --- waiting for the end --------------------------------------------------------------------- */

/* Whether an operation has no outcome yet. A caller that has waited for the last operation may shut
 * the group down while the thread that completed it still delivers the outcome. */
static bool has_incomplete(const tddp_group *group)
{
    return group->in_flight > atomic_load(&group->in_flight_completing);
}

static bool queue_busy(const tddp_group *group)
{
    return group->queue.head || group->running || group->device.launching;
}

static bool busy(const tddp_group *group)
{
    return group->in_flight > 0;
}

/* With the lock held, which is released meanwhile. */
static unsigned try_all(tddp_group *group)
{
    pthread_mutex_unlock(&group->mutex);
    const unsigned found = tddp_group_poll(group) | tddp_group_device_test(group);
    pthread_mutex_lock(&group->mutex);
    return found;
}

static bool await_while(tddp_group *group, bool (*is_busy)(const tddp_group *group),
                        int64_t deadline, const tddp_cancel *cancel)
{
    /* In a callback of another group. */
    const bool tries = tddp_engine_on_thread(group->engine) || tddp_watchdog_on_thread();
    while (is_busy(group) && tddp_now_ns() < deadline &&
           !(cancel && tddp_cancel_triggered(cancel))) {
        int64_t check = deadline;
        if (tries) {
            (void)try_all(group);
            check = tddp_deadline_after_ms(TRY_MS);
        } else if (cancel) {
            check = tddp_deadline_after_ms(TDDP_GROUP_TOKEN_CHECK_MS);
        }
        if (is_busy(group)) {
            (void)tddp_cond_wait_until(&group->idle, &group->mutex,
                                       check < deadline ? check : deadline);
        }
    }
    return !is_busy(group);
}

bool tddp_group_await_idle(tddp_group *group, int64_t deadline, const tddp_cancel *cancel)
{
    return await_while(group, busy, deadline, cancel);
}

bool tddp_group_await_queue(tddp_group *group, int64_t deadline, const tddp_cancel *cancel)
{
    return await_while(group, queue_busy, deadline, cancel);
}

tddp_status tddp_group_drain(tddp_group *group, const tddp_wait *wait)
{
    tddp_status status = tddp_group_check_usable(group, "drain");
    if (status) {
        return status;
    }
    int64_t deadline = tddp_wait_deadline(wait, atomic_load(&group->timeout_ms));
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    pthread_mutex_lock(&group->mutex);
    bool done = tddp_group_await_idle(group, deadline, cancel);
    pthread_mutex_unlock(&group->mutex);
    if (done) {
        return TDDP_OK;
    }
    if (cancel && tddp_cancel_triggered(cancel)) {
        return tddp_fail(TDDP_CANCELED, "interrupted while operations of group \"%s\" finish",
                         group->name);
    }
    return tddp_fail(TDDP_TIMEOUT, "operations of group \"%s\" are still under way", group->name);
}

void tddp_group_progress_stop(tddp_group *group, int64_t deadline)
{
    pthread_mutex_lock(&group->mutex);
    bool aborts = !tddp_group_await_idle(group, deadline, NULL) && has_incomplete(group);
    group->state = TDDP_GROUP_ENDING;
    pthread_mutex_unlock(&group->mutex);
    if (aborts) {
        tddp_group_backends_abort(group);
    }
    tddp_engine_remove(group);
    tddp_watchdog_remove(group);
    pthread_mutex_lock(&group->mutex);
    while (group->in_flight > 0 || group->failing) {
        const bool progressed = (!group->failing && tddp_group_complete_failed(group)) ||
                                (try_all(group) & TDDP_GROUP_PROGRESSED);
        if (!progressed && (group->in_flight > 0 || group->failing)) {
            (void)tddp_cond_wait_until(&group->idle, &group->mutex, tddp_deadline_after_ms(TRY_MS));
        }
    }
    while (group->poll_waiters > 0 || atomic_load(&group->holders) > 0) {
        pthread_cond_wait(&group->idle, &group->mutex);
    }
    pthread_mutex_unlock(&group->mutex);
}
