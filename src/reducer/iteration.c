/*
 * An iteration: prepare, mark_ready once for each parameter, finish.
 *
 *     ready:     7  6      4  5        3  2     1  0
 *     buckets:   |--- 0 ---|           |-- 1 ---|
 *     the group:           [== reduces 0 ==][== reduces 1 ==]
 *     finish:                                       waits ...|
 *
 * Any of autograd's threads calls mark_ready. Invariant: each bucket is launched once, after all
 * buckets before it, so the groups of all ranks queue the same sequence; hence the reducer's lock
 * is held while the group queues a bucket. mark_ready allocates nothing itself (the group allocates
 * the work). After a failed iteration the ranks are out of step, and every later call fails.
 */
#include <stdio.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_set_failure(tddp_reducer *reducer, tddp_status status)
{
    if (reducer->failure == TDDP_OK) {
        reducer->failure = status;
        (void)snprintf(reducer->failure_text, sizeof reducer->failure_text, "%s",
                       tddp_error_message());
    }
    return status;
}

/* --- prepare --------------------------------------------------------------------------------- */

static tddp_status start_iteration(tddp_reducer *reducer)
{
    tddp_reducer_poll_stream_works(reducer);
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_fail_again(reducer);
    }
    if (reducer->phase == TDDP_REDUCER_PREPARED &&
        (reducer->current_times.first_ready_ns != 0 || reducer->ready_count > 0)) {
        return tddp_reducer_fail_unfinished(reducer);
    }
    memset(reducer->ready, TDDP_REDUCER_UNREADY, reducer->count * sizeof *reducer->ready);
    reducer->ready_count = 0;
    reducer->launched = 0;
    reducer->next_to_wait = 0;
    reducer->joined = false;
    for (size_t b = 0; b < reducer->layout.buffer_count; b++) {
        tddp_reducer_bucket *bucket = &reducer->buckets[b];
        bucket->pending = reducer->layout.buffers[b].slice_count;
        bucket->stage = 0;
        bucket->more_stages = false;
        bucket->interrupted = false;
        bucket->skipped = false;
        tddp_reducer_reset_streams(reducer, bucket);
    }
    reducer->divisor = reducer->next_divisor;
    tddp_reducer_unused_prepare(reducer);
    tddp_reducer_calls_prepare(reducer);
    reducer->current_times = (tddp_reducer_times){.prepared_ns = tddp_now_ns()};
    reducer->phase = TDDP_REDUCER_PREPARED;
    return TDDP_OK;
}

tddp_status tddp_reducer_prepare(tddp_reducer *reducer)
{
    pthread_mutex_lock(&reducer->lock);
    bool due = reducer->phase == TDDP_REDUCER_LAUNCHED ||
               (reducer->phase == TDDP_REDUCER_PREPARED && reducer->ready_count == reducer->count);
    bool map_due = reducer->phase == TDDP_REDUCER_PREPARED && reducer->unused.map_work;
    pthread_mutex_unlock(&reducer->lock);
    if (due) { /* backward was interrupted between its last gradient and finish */
        tddp_status status = tddp_reducer_finish(reducer, NULL);
        if (status != TDDP_OK) {
            return status;
        }
    } else if (map_due) { /* forward was interrupted while it waited for the map */
        const tddp_reducer_deadline deadline = tddp_reducer_deadline_of(NULL);
        tddp_status status = tddp_reducer_exchange_used_map(reducer, &deadline);
        if (status != TDDP_OK) {
            return status;
        }
    }
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = start_iteration(reducer);
    pthread_mutex_unlock(&reducer->lock);
    return status;
}

/* --- mark_ready ------------------------------------------------------------------------------ */

void tddp_reducer_count_ready(tddp_reducer *reducer, size_t index, unsigned char state)
{
    size_t bucket = reducer->layout.buffer_of[index];
    reducer->ready[index] = state;
    reducer->order[reducer->ready_count++] = (int64_t)index;
    if (bucket != TDDP_FLAT_NO_BUFFER) {
        reducer->buckets[bucket].pending--;
    }
}

static tddp_status check_used_map(const tddp_reducer *reducer)
{
    if (!tddp_reducer_used_map_missing(reducer)) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: backward began before the ranks exchanged their unused parameters: "
                     "with skip_unused expected after set_unused has returned TDDP_OK",
                     reducer->rank);
}

static tddp_status check_open(const tddp_reducer *reducer, size_t index)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_fail_again(reducer);
    }
    if (reducer->phase == TDDP_REDUCER_IDLE) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "the gradient of \"%s\" became ready outside an iteration: call prepare "
                         "first",
                         reducer->params[index].name);
    }
    return check_used_map(reducer);
}

static tddp_status mark_ready_locked(tddp_reducer *reducer, size_t index)
{
    tddp_status status = check_open(reducer, index);
    if (status != TDDP_OK) {
        return status;
    }
    bool ready = true;
    tddp_reducer_record_stream(reducer, index);
    if (reducer->current_times.first_ready_ns == 0) {
        reducer->current_times.first_ready_ns = tddp_now_ns();
    }
    if (reducer->static_graph) {
        status = tddp_reducer_count_call(reducer, index, &ready);
        if (status != TDDP_OK) {
            return status;
        }
        if (tddp_reducer_recording(reducer)) {
            reducer->current_times.last_ready_ns = tddp_now_ns();
            return TDDP_OK;
        }
    }
    tddp_reducer_mark_unused_ready(reducer);
    if (!ready) {
        return TDDP_OK;
    }
    if (reducer->ready[index]) {
        return tddp_reducer_fail_marked_twice(reducer, index);
    }
    tddp_reducer_count_ready(reducer, index, TDDP_REDUCER_READY);
    if (reducer->ready_count == reducer->count) {
        reducer->current_times.last_ready_ns = tddp_now_ns();
    }
    return tddp_reducer_hook_on_caller(reducer) ? TDDP_OK
                                                : tddp_reducer_launch_ready(reducer, NULL);
}

tddp_status tddp_reducer_mark_ready(tddp_reducer *reducer, size_t index, int *all_ready)
{
    if (index >= reducer->count) {
        return tddp_reducer_fail_index(reducer, index);
    }
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = mark_ready_locked(reducer, index);
    int all = reducer->ready_count == reducer->count;
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK) {
        *all_ready = all;
    }
    return status;
}

/* --- finish ---------------------------------------------------------------------------------- */

/* Only the finishing thread reads and clears the slot, so it reads without the lock. */
tddp_status tddp_reducer_wait_and_clear(tddp_reducer *reducer, tddp_work **slot,
                                        const tddp_reducer_deadline *deadline, bool *done)
{
    tddp_work *work = *slot;
    *done = true;
    if (!work) {
        return TDDP_OK;
    }
    tddp_status status = tddp_reducer_wait_work(work, deadline, done);
    if (!*done) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    *slot = NULL;
    if (status != TDDP_OK) {
        (void)tddp_reducer_set_failure(reducer, status);
    }
    pthread_mutex_unlock(&reducer->lock);
    tddp_work_release(work);
    return status;
}

/* Backward is over: marks unused parameters ready, with static_graph in the first iteration all
 * parameters, and launches the ready buckets. */
static tddp_status end_backward(tddp_reducer *reducer, const tddp_reducer_deadline *deadline)
{
    if (reducer->phase != TDDP_REDUCER_PREPARED || reducer->failure != TDDP_OK) {
        return TDDP_OK; /* a failure is returned after all works have completed */
    }
    tddp_status status = check_used_map(reducer);
    if (status != TDDP_OK) {
        return status;
    }
    if (tddp_reducer_recording(reducer) && !reducer->joined) {
        tddp_reducer_end_recording(reducer);
    } else {
        tddp_reducer_mark_unused_ready(reducer);
    }
    return reducer->ready_count > 0 ? tddp_reducer_launch_ready(reducer, deadline) : TDDP_OK;
}

static void save_order(tddp_reducer *reducer)
{
    int64_t *order = reducer->last_order;
    reducer->last_order = reducer->order;
    reducer->order = order;
    reducer->last_order_valid = true;
}

static tddp_status end_iteration(tddp_reducer *reducer)
{
    if (reducer->failure != TDDP_OK) {
        reducer->phase = TDDP_REDUCER_IDLE;
        return tddp_fail(reducer->failure, "%s", reducer->failure_text);
    }
    if (reducer->phase != TDDP_REDUCER_LAUNCHED) {
        return TDDP_OK;
    }
    reducer->phase = TDDP_REDUCER_IDLE;
    reducer->finished++;
    if (!reducer->joined) {
        save_order(reducer);
        if (reducer->unused.used_outside) {
            memset(reducer->unused.used_outside, 0,
                   reducer->count * sizeof *reducer->unused.used_outside);
        }
    }
    reducer->last_times = reducer->current_times;
    reducer->last_times.finished_ns = tddp_now_ns();
    reducer->last_times.iterations = reducer->finished;
    return TDDP_OK;
}

tddp_status tddp_reducer_finish_by(tddp_reducer *reducer, const tddp_reducer_deadline *deadline)
{
    pthread_mutex_lock(&reducer->lock);
    bool already_failed = reducer->failure != TDDP_OK && reducer->phase == TDDP_REDUCER_IDLE;
    bool map_missing = reducer->joined && tddp_reducer_used_map_missing(reducer);
    pthread_mutex_unlock(&reducer->lock);
    if (already_failed) {
        return tddp_reducer_fail_again(reducer);
    }
    bool done = true;
    tddp_status status = TDDP_OK;
    if (map_missing && (status = tddp_reducer_exchange_used_map(reducer, deadline)) != TDDP_OK) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    status = end_backward(reducer, deadline);
    bool refused = status != TDDP_OK && reducer->failure == TDDP_OK;
    size_t launched = reducer->launched;
    bool all = reducer->phase == TDDP_REDUCER_LAUNCHED;
    pthread_mutex_unlock(&reducer->lock);
    if (refused) {
        return status;
    }
    /* Waits for all works, also after a failure: none may use the memory after this returns. */
    status = tddp_reducer_wait_buckets(reducer, launched, all, deadline, &done);
    if (!done) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    status = end_iteration(reducer);
    pthread_mutex_unlock(&reducer->lock);
    return status;
}

tddp_status tddp_reducer_finish(tddp_reducer *reducer, const tddp_wait *wait)
{
    const tddp_reducer_deadline deadline = tddp_reducer_deadline_of(wait);
    return tddp_reducer_finish_by(reducer, &deadline);
}
