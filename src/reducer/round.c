/*
 * One backward's life: prepare, each parameter ready once, finish.
 *
 *     ready:     7  6      4  5        3  2     1  0
 *     buckets:   |--- 0 ---|           |-- 1 ---|
 *     the group:           [== reduces 0 ==][== reduces 1 ==]
 *     finish:                                       waits ...|
 *
 * mark_ready comes from any thread of autograd. What it must keep true: a bucket is handed over
 * once, after all before it, so every rank's group sees the same sequence; hence the reducer's lock
 * is held while the group queues it. It allocates nothing of its own (the group makes the work).
 * Once a round has failed the ranks are out of step for good, and every later call says so.
 */
#include <stdio.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_break(tddp_reducer *reducer, tddp_status status)
{
    if (reducer->failure == TDDP_OK) {
        reducer->failure = status;
        (void)snprintf(reducer->failure_text, sizeof reducer->failure_text, "%s",
                       tddp_error_message());
    }
    return status;
}

/* --- prepare --------------------------------------------------------------------------------- */

static tddp_status open_round(tddp_reducer *reducer)
{
    tddp_reducer_look_back(reducer);
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->phase == TDDP_REDUCER_OPEN &&
        (reducer->now.first_ready_ns != 0 || reducer->ready_count > 0)) {
        return tddp_reducer_fail_unready(reducer);
    }
    memset(reducer->ready, TDDP_REDUCER_UNREADY, reducer->count * sizeof *reducer->ready);
    reducer->ready_count = 0;
    reducer->launched = 0;
    reducer->settling = 0;
    reducer->shadowing = false;
    for (size_t b = 0; b < reducer->layout.buffer_count; b++) {
        tddp_reducer_bucket *bucket = &reducer->buckets[b];
        bucket->pending = reducer->layout.buffers[b].slice_count;
        bucket->stage = 0;
        bucket->again = false;
        bucket->interrupted = false;
        bucket->skipped = false;
        tddp_reducer_open_streams(reducer, bucket);
    }
    reducer->divisor = reducer->next_divisor;
    tddp_reducer_usage_open(reducer);
    tddp_reducer_calls_open(reducer);
    reducer->now = (tddp_reducer_times){.prepared_ns = tddp_now_ns()};
    reducer->phase = TDDP_REDUCER_OPEN;
    return TDDP_OK;
}

tddp_status tddp_reducer_prepare(tddp_reducer *reducer)
{
    pthread_mutex_lock(&reducer->lock);
    bool due = reducer->phase == TDDP_REDUCER_LAUNCHED ||
               (reducer->phase == TDDP_REDUCER_OPEN && reducer->ready_count == reducer->count);
    bool map_due = reducer->phase == TDDP_REDUCER_OPEN && reducer->usage.work;
    pthread_mutex_unlock(&reducer->lock);
    if (due) { /* backward was left between its last gradient and finish */
        tddp_status status = tddp_reducer_finish(reducer, NULL);
        if (status != TDDP_OK) {
            return status;
        }
    } else if (map_due) { /* forward was left while it waited for the map */
        const tddp_reducer_patience patience = tddp_reducer_patience_of(NULL);
        tddp_status status = tddp_reducer_usage_exchange(reducer, &patience);
        if (status != TDDP_OK) {
            return status;
        }
    }
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = open_round(reducer);
    pthread_mutex_unlock(&reducer->lock);
    return status;
}

/* --- mark_ready ------------------------------------------------------------------------------ */

void tddp_reducer_count_ready(tddp_reducer *reducer, size_t index, unsigned char how)
{
    size_t bucket = reducer->layout.buffer_of[index];
    reducer->ready[index] = how;
    reducer->order[reducer->ready_count++] = (int64_t)index;
    if (bucket != TDDP_FLAT_NO_BUFFER) {
        reducer->buckets[bucket].pending--;
    }
}

static tddp_status check_usage(const tddp_reducer *reducer)
{
    if (!tddp_reducer_usage_lacking(reducer)) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: a backward before the ranks know which parameters are unused: "
                     "skip_unused expects the end of set_unused before it",
                     reducer->rank);
}

static tddp_status check_open(const tddp_reducer *reducer, size_t index)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->phase == TDDP_REDUCER_IDLE) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "the gradient of \"%s\" became ready outside a round: prepare first",
                         reducer->params[index].name);
    }
    return check_usage(reducer);
}

static tddp_status accept(tddp_reducer *reducer, size_t index)
{
    tddp_status status = check_open(reducer, index);
    if (status != TDDP_OK) {
        return status;
    }
    bool ready = true;
    tddp_reducer_wrote(reducer, index);
    if (reducer->now.first_ready_ns == 0) {
        reducer->now.first_ready_ns = tddp_now_ns();
    }
    if (reducer->static_graph) {
        status = tddp_reducer_count_call(reducer, index, &ready);
        if (status != TDDP_OK) {
            return status;
        }
        if (tddp_reducer_counting(reducer)) {
            reducer->now.last_ready_ns = tddp_now_ns();
            return TDDP_OK;
        }
    }
    tddp_reducer_take_unused(reducer);
    if (!ready) {
        return TDDP_OK;
    }
    if (reducer->ready[index]) {
        return tddp_reducer_fail_twice(reducer, index);
    }
    tddp_reducer_count_ready(reducer, index, TDDP_REDUCER_READY);
    if (reducer->ready_count == reducer->count) {
        reducer->now.last_ready_ns = tddp_now_ns();
    }
    return tddp_reducer_on_caller(reducer) ? TDDP_OK : tddp_reducer_launch_complete(reducer, NULL);
}

tddp_status tddp_reducer_mark_ready(tddp_reducer *reducer, size_t index, int *all_ready)
{
    if (index >= reducer->count) {
        return tddp_reducer_fail_index(reducer, index);
    }
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = accept(reducer, index);
    int all = reducer->ready_count == reducer->count;
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK) {
        *all_ready = all;
    }
    return status;
}

/* --- finish ---------------------------------------------------------------------------------- */

/* The work is only read and cleared here, by the one thread that finishes, once it was started. */
tddp_status tddp_reducer_await_slot(tddp_reducer *reducer, tddp_work **slot,
                                    const tddp_reducer_patience *patience, bool *done)
{
    tddp_work *work = *slot;
    *done = true;
    if (!work) {
        return TDDP_OK;
    }
    tddp_status status = tddp_reducer_await(work, patience, done);
    if (!*done) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    *slot = NULL;
    if (status != TDDP_OK) {
        (void)tddp_reducer_break(reducer, status);
    }
    pthread_mutex_unlock(&reducer->lock);
    tddp_work_release(work);
    return status;
}

/* Backward is over: what it did not report counts as ready if the round allows that, and what is
 * complete is handed over. */
static tddp_status close_round(tddp_reducer *reducer, const tddp_reducer_patience *patience)
{
    if (reducer->phase != TDDP_REDUCER_OPEN || reducer->failure != TDDP_OK) {
        return TDDP_OK; /* a failure is told once all is quiet */
    }
    tddp_status status = check_usage(reducer);
    if (status != TDDP_OK) {
        return status;
    }
    if (tddp_reducer_counting(reducer) && !reducer->shadowing) {
        tddp_reducer_close_counting(reducer);
    } else {
        tddp_reducer_take_unused(reducer);
    }
    return reducer->ready_count > 0 ? tddp_reducer_launch_complete(reducer, patience) : TDDP_OK;
}

static void keep_order(tddp_reducer *reducer)
{
    int64_t *order = reducer->last_order;
    reducer->last_order = reducer->order;
    reducer->order = order;
    reducer->order_seen = true;
}

static tddp_status conclude(tddp_reducer *reducer)
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
    if (!reducer->shadowing) {
        keep_order(reducer);
        if (reducer->usage.noted) {
            memset(reducer->usage.noted, 0, reducer->count * sizeof *reducer->usage.noted);
        }
    }
    reducer->times = reducer->now;
    reducer->times.finished_ns = tddp_now_ns();
    reducer->times.rounds = reducer->finished;
    return TDDP_OK;
}

tddp_status tddp_reducer_finish_within(tddp_reducer *reducer, const tddp_reducer_patience *patience)
{
    pthread_mutex_lock(&reducer->lock);
    bool told = reducer->failure != TDDP_OK && reducer->phase == TDDP_REDUCER_IDLE;
    bool lacking = reducer->shadowing && tddp_reducer_usage_lacking(reducer);
    pthread_mutex_unlock(&reducer->lock);
    if (told) {
        return tddp_reducer_broken(reducer);
    }
    bool done = true;
    tddp_status status = TDDP_OK;
    if (lacking && (status = tddp_reducer_usage_exchange(reducer, patience)) != TDDP_OK) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    status = close_round(reducer, patience);
    bool refused = status != TDDP_OK && reducer->failure == TDDP_OK;
    size_t launched = reducer->launched;
    bool all = reducer->phase == TDDP_REDUCER_LAUNCHED;
    pthread_mutex_unlock(&reducer->lock);
    if (refused) {
        return status;
    }
    /* All are waited for, also after a failure: their memory must be quiet when this returns. */
    status = tddp_reducer_settle(reducer, launched, all, patience, &done);
    if (!done) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    status = conclude(reducer);
    pthread_mutex_unlock(&reducer->lock);
    return status;
}

tddp_status tddp_reducer_finish(tddp_reducer *reducer, const tddp_wait *wait)
{
    const tddp_reducer_patience patience = tddp_reducer_patience_of(wait);
    return tddp_reducer_finish_within(reducer, &patience);
}
