/*
 * What a group has unfinished on the host: its queue of collectives, of which the first one is
 * tried, and its messages, which are all tried. A thread that waits for one of them tries it, until
 * its token is triggered; the engine's tries all, as far as that goes at once (engine.c); and in
 * the end the one that shuts the group down. A waiting thread saves two thread switches, which take
 * longer than small operations do.
 *
 * Invariants: one thread at a time tries a work (`trier`), and one collective at a time is begun
 * and has no outcome (`running`): the first of the queue, or one that its caller executes
 * (submit.c). Whoever leaves one unfinished wakes the engine. Failures, which may take a while to
 * complete, are completed by a thread lent for that. The lock is never held while a callback runs
 * or the backend is called. The group stays as long as a work is in flight, or the lock is held.
 * Locks are taken in the order work, group, engine.
 */
#include <tddp/cuda.h>

#include "group/recorder/recorder.h"

/* The group whose thread this is, or whose callbacks it runs; NULL on all other threads. */
static _Thread_local const tddp_group *current_group;

bool tddp_group_on_progress_thread(const tddp_group *group)
{
    return current_group == group;
}

const tddp_group *tddp_group_set_current(const tddp_group *group)
{
    const tddp_group *before = current_group;
    current_group = group;
    return before;
}

void tddp_group_enter_thread(const tddp_group *group)
{
    current_group = group;
    tddp_cuda_keep_device();
}

/* --- lists of works -------------------------------------------------------------------------- */

void tddp_work_list_append(tddp_work_list *list, tddp_work *work)
{
    work->next = NULL;
    *(list->tail ? &list->tail->next : &list->head) = work;
    list->tail = work;
}

void tddp_work_list_prepend(tddp_work_list *list, tddp_work *work)
{
    work->next = list->head;
    list->head = work;
    list->tail = list->tail ? list->tail : work;
}

void tddp_work_list_remove(tddp_work_list *list, const tddp_work *work)
{
    tddp_work *before = NULL;
    tddp_work **at = &list->head;
    while (*at != work) {
        before = *at;
        at = &before->next;
    }
    *at = work->next;
    list->tail = list->tail == work ? before : list->tail;
}

/* --- outcomes -------------------------------------------------------------------------------- */

/* Whether it is one of the queue, or a message. */
static bool is_queued(const tddp_work *work)
{
    return !tddp_op_is_p2p(work->op.kind) && !work->on_device;
}

void tddp_group_keep_failure(tddp_work *work, tddp_status status)
{
    work->pending_status = status;
    work->pending_text = tddp_copy_string(tddp_error_message());
}

tddp_status tddp_group_kept_failure(const tddp_work *work)
{
    return tddp_fail(work->pending_status, "%s",
                     work->pending_text ? work->pending_text
                                        : tddp_status_text(work->pending_status));
}

static bool is_runnable(const tddp_group *group)
{
    return !group->failure && group->state < TDDP_GROUP_ENDING;
}

/* Of an operation that was not started. With the lock held, which is released meanwhile. */
static void refuse(tddp_group *group, tddp_work *work)
{
    tddp_status status = group->failure
                             ? tddp_group_fail_unstarted(group, tddp_op_name(work->op.kind))
                             : tddp_group_fail_destroyed(group);
    pthread_mutex_unlock(&group->mutex);
    tddp_recorder_finished(group, work, status, tddp_error_message());
    atomic_fetch_add(&group->in_flight_completing, 1);
    tddp_group_work_finish(work, status, tddp_error_message());
    pthread_mutex_lock(&group->mutex);
}

/* Delivers the outcome of a work that is in no list, and drops the list's reference. With the lock
 * held, which is released meanwhile. */
static void complete(tddp_group *group, tddp_work *work)
{
    const bool queued = is_queued(work);
    const tddp_group *before = tddp_group_set_current(group);
    if (queued && !work->started) {
        refuse(group, work);
    } else {
        pthread_mutex_unlock(&group->mutex);
        tddp_group_complete_in_flight(
            group, work, work->pending_status ? tddp_group_kept_failure(work) : TDDP_OK);
        pthread_mutex_lock(&group->mutex);
    }
    (void)tddp_group_set_current(before);
    tddp_work_release(work);
    atomic_fetch_sub(&group->in_flight_completing, 1);
    tddp_group_ended(group, queued);
}

void tddp_group_ended(tddp_group *group, bool queued)
{
    group->in_flight--;
    group->running = group->running && !queued;
    pthread_cond_broadcast(&group->idle);
}

bool tddp_group_complete_failed(tddp_group *group)
{
    tddp_work *work = group->failed.head;
    if (work) {
        tddp_work_list_remove(&group->failed, work);
        complete(group, work);
    }
    return work != NULL;
}

/* On a lent thread. */
static void complete_all_failed(void *data, void *nothing)
{
    tddp_group *group = data;
    (void)nothing;
    tddp_cuda_keep_device();
    pthread_mutex_lock(&group->mutex);
    while (tddp_group_complete_failed(group)) {
        tddp_group_wake_engine(group); /* the queue goes on */
    }
    group->failing = false;
    pthread_cond_broadcast(&group->idle);
    pthread_mutex_unlock(&group->mutex);
}

void tddp_group_complete_ended(tddp_group *group, tddp_work *work)
{
    if (!work->pending_status && !(is_queued(work) && !work->started)) {
        complete(group, work);
        return;
    }
    tddp_work_list_append(&group->failed, work);
    if (group->failing || group->state >= TDDP_GROUP_ENDING) {
        pthread_cond_broadcast(&group->idle); /* that thread does it, or a shutdown's */
    } else if (tddp_blocking_reserve()) {
        (void)tddp_group_complete_failed(group);
    } else {
        group->failing = true;
        group->fail = (tddp_blocking_call){.run = complete_all_failed, .context = group};
        tddp_blocking_start(&group->fail);
    }
}

void tddp_group_complete_polled(tddp_group *group, tddp_work *work)
{
    pthread_mutex_lock(&group->mutex);
    tddp_group_complete_ended(group, work);
    pthread_mutex_unlock(&group->mutex);
}

/* --- trying ---------------------------------------------------------------------------------- */

static tddp_status finish_message(tddp_group *group, tddp_work *work)
{
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    int source = TDDP_ANY_SOURCE;
    tddp_status status = own->backend->finish(own->context, work->request, &source);
    if (status == TDDP_OK && work->op.kind == TDDP_OP_RECV) {
        work->source = source;
    }
    return status;
}

bool tddp_group_execute(tddp_group *group, tddp_work *work, tddp_cancel *cancel, int awaited)
{
    work->op.cancel = cancel;
    work->op.awaited = awaited;
    tddp_status status =
        tddp_op_is_p2p(work->op.kind) ? finish_message(group, work) : tddp_group_run(group, work);
    work->op.cancel = NULL;
    if (status == TDDP_CANCELED && cancel && tddp_cancel_triggered(cancel)) {
        return false;
    }
    if (status) {
        tddp_group_keep_failure(work, status);
    }
    return true;
}

static void start(tddp_group *group, tddp_work *work)
{
    const int64_t now = tddp_now_ns();
    atomic_store(&work->expiry, tddp_deadline_from(now, work->op.timeout_ms));
    tddp_recorder_started(group, work, now);
    tddp_group_span_started(work);
    work->started = true;
}

/* Tries a work of a list that no thread tries, unless it must not be started; whether it has ended.
 * With the lock held, which is released meanwhile. */
static bool try_work(tddp_group *group, tddp_work *work, tddp_cancel *cancel, int awaited)
{
    const bool queued = is_queued(work);
    group->running = group->running || queued;
    if (work->pending_status || (queued && !work->started && !is_runnable(group))) {
        return true;
    }
    work->trier = awaited ? TDDP_TRIER_CALLER : TDDP_TRIER_ENGINE;
    pthread_mutex_unlock(&group->mutex);
    if (queued && !work->started) {
        start(group, work);
    }
    const bool ended = tddp_group_execute(group, work, cancel, awaited);
    pthread_mutex_lock(&group->mutex);
    work->trier = TDDP_TRIER_NONE;
    group->running = group->running && !(queued && !ended);
    if (group->poll_waiters > 0) {
        pthread_cond_broadcast(&group->idle);
    }
    return ended;
}

static void remove_from(tddp_work_list *list, tddp_work *work)
{
    tddp_work_list_remove(list, work);
    work->listed = false;
}

/* The same, and completes it; whether it is unfinished. */
static bool progress(tddp_group *group, tddp_work_list *list, tddp_work *work, tddp_cancel *cancel,
                     int awaited)
{
    if (!try_work(group, work, cancel, awaited)) {
        return true;
    }
    remove_from(list, work);
    tddp_group_complete_ended(group, work);
    return false;
}

/* --- callers --------------------------------------------------------------------------------- */

void tddp_group_wake_engine(tddp_group *group)
{
    if ((group->queue.head || group->messages.head) && group->state < TDDP_GROUP_ENDING &&
        tddp_engine_start(group->engine)) {
        tddp_log(TDDP_LOG_WARN, "group",
                 "operations of \"%s\" go on only while they are waited for: %s", group->name,
                 tddp_error_message());
    }
}

void tddp_group_add_message(tddp_group *group, tddp_work *work, tddp_cancel *cancel, bool tries,
                            int awaited)
{
    pthread_mutex_lock(&group->mutex);
    tddp_work_list_append(&group->messages, work);
    work->listed = true;
    if (!(tries || work->pending_status) ||
        progress(group, &group->messages, work, cancel, awaited)) {
        tddp_group_wake_engine(group);
    }
    pthread_mutex_unlock(&group->mutex);
}

/* Locks the group of a work that is not done; NULL: it is done, or has none. */
static tddp_group *lock_group(tddp_work *work)
{
    pthread_mutex_lock(&work->mutex);
    tddp_group *group = atomic_load(&work->done) ? NULL : work->group;
    if (group) {
        pthread_mutex_lock(&group->mutex);
    }
    pthread_mutex_unlock(&work->mutex);
    return group;
}

/* Waits until the engine has tried the work, or for a moment. With the lock held. */
static void await_engine(tddp_group *group)
{
    group->poll_waiters++;
    (void)tddp_cond_wait_until(&group->idle, &group->mutex,
                               tddp_deadline_after_ms(TDDP_GROUP_TOKEN_CHECK_MS));
    if (--group->poll_waiters == 0) {
        pthread_cond_broadcast(&group->idle);
    }
}

void tddp_group_make_progress(tddp_work *work, tddp_cancel *cancel)
{
    tddp_group *group = lock_group(work);
    if (!group) {
        return;
    }
    const bool queued = is_queued(work);
    tddp_work_list *list = queued ? &group->queue : &group->messages;
    while (!atomic_load(&work->done) && !(cancel && tddp_cancel_triggered(cancel))) {
        tddp_work *next = queued ? list->head : work->listed ? work : NULL;
        if (next && next->trier == TDDP_TRIER_ENGINE) {
            await_engine(group);
        } else if (!next || next->trier != TDDP_TRIER_NONE || (queued && group->running)) {
            break;
        } else {
            (void)progress(group, list, next, cancel, 1);
        }
    }
    tddp_group_wake_engine(group);
    pthread_mutex_unlock(&group->mutex);
}

/* --- the engine ------------------------------------------------------------------------------ */

/* Tries each message once; completes those that have ended. With the lock held. */
static unsigned poll_messages(tddp_group *group)
{
    tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    tddp_work_list ended = {0};
    tddp_work *next;
    unsigned found = 0;
    for (tddp_work *work = group->messages.head; work; work = next) {
        const bool tries = work->trier == TDDP_TRIER_NONE;
        const bool ends = tries && try_work(group, work, &at_once, 0);
        next = work->next;
        if (ends) {
            remove_from(&group->messages, work);
            tddp_work_list_append(&ended, work);
        } else if (tries) {
            found |= TDDP_GROUP_WAITING;
        }
    }
    while (ended.head) {
        tddp_work *work = ended.head;
        tddp_work_list_remove(&ended, work);
        tddp_group_complete_ended(group, work);
        found |= TDDP_GROUP_PROGRESSED;
    }
    return found;
}

unsigned tddp_group_poll(tddp_group *group)
{
    tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    unsigned found = 0;
    pthread_mutex_lock(&group->mutex);
    if (group->queue.head && !group->running) {
        found = progress(group, &group->queue, group->queue.head, &at_once, 0)
                    ? TDDP_GROUP_WAITING
                    : TDDP_GROUP_PROGRESSED;
    }
    found |= poll_messages(group);
    pthread_mutex_unlock(&group->mutex);
    return found;
}
