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
#include <unistd.h>

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

tddp_status tddp_reducer_broken(const tddp_reducer *reducer)
{
    return tddp_fail(reducer->failure,
                     "the gradients of an earlier step were not averaged (%s): end this process "
                     "group, and make it and the model anew from a checkpoint",
                     reducer->failure_text);
}

/* --- prepare --------------------------------------------------------------------------------- */

static tddp_status fail_unready(const tddp_reducer *reducer)
{
    enum { NAMED = 10 };
    tddp_bytes names = {0};
    size_t missing = 0;
    for (size_t i = 0; i < reducer->count; i++) {
        if (reducer->ready[i] || missing++ >= NAMED) {
            continue;
        }
        const char *name = reducer->params[i].name;
        if (tddp_bytes_append(&names, missing > 1 ? ", \"" : "\"", missing > 1 ? 3 : 1) ||
            tddp_bytes_append(&names, name, strlen(name)) || tddp_bytes_append(&names, "\"", 1)) {
            tddp_bytes_free(&names);
            return TDDP_OUT_OF_MEMORY;
        }
    }
    char more[48] = "";
    if (missing > NAMED) {
        (void)snprintf(more, sizeof more, " and %zu more", missing - NAMED);
    }
    (void)tddp_fail(TDDP_INVALID_ARGUMENT,
                    "rank %d: %zu of %zu parameters got no gradient in the backward before: "
                    "%.*s%s. The loss must depend on every parameter in each backward that is "
                    "synchronised: freeze those that it does not (requires_grad = false before "
                    "wrapping), use all outputs of forward, or run that part under no_sync",
                    reducer->rank, missing, reducer->count, (int)names.size, names.data, more);
    tddp_bytes_free(&names);
    return TDDP_INVALID_ARGUMENT;
}

static tddp_status open_round(tddp_reducer *reducer)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->phase == TDDP_REDUCER_OPEN && reducer->ready_count > 0) {
        return fail_unready(reducer);
    }
    memset(reducer->ready, 0, reducer->count * sizeof *reducer->ready);
    reducer->ready_count = 0;
    reducer->launched = 0;
    for (size_t b = 0; b < reducer->layout.bucket_count; b++) {
        reducer->layout.buckets[b].pending = reducer->layout.buckets[b].params;
    }
    reducer->phase = TDDP_REDUCER_OPEN;
    return TDDP_OK;
}

tddp_status tddp_reducer_prepare(tddp_reducer *reducer)
{
    pthread_mutex_lock(&reducer->lock);
    bool due = reducer->phase == TDDP_REDUCER_LAUNCHED;
    pthread_mutex_unlock(&reducer->lock);
    if (due) { /* backward was left between its last gradient and finish */
        tddp_status status = tddp_reducer_finish(reducer, NULL);
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

static tddp_status launch(tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    if (reducer->world_size > 1) {
        if (reducer->describe) {
            tddp_reducer_describe(reducer, reducer->launched);
        }
        return tddp_all_reduce(reducer->group, bucket->buffer, TDDP_REDUCE_AVG, 1.0, &bucket->work);
    }
    /* The average of one is in place already, but of a group that is gone one is to hear. */
    if (reducer->owner != getpid()) {
        return tddp_fail(TDDP_FORKED,
                         "the process group \"%s\" was made by process %d, this is its child %d: "
                         "make the group and the model anew here",
                         tddp_group_name(reducer->group), (int)reducer->owner, (int)getpid());
    }
    if (tddp_group_closed(reducer->group)) {
        return tddp_fail(TDDP_GROUP_CLOSED, "the process group \"%s\" is destroyed",
                         tddp_group_name(reducer->group));
    }
    return TDDP_OK;
}

static tddp_status launch_complete(tddp_reducer *reducer)
{
    const tddp_reducer_layout *layout = &reducer->layout;
    while (reducer->launched < layout->bucket_count &&
           layout->buckets[reducer->launched].pending == 0) {
        tddp_status status = launch(reducer, &layout->buckets[reducer->launched]);
        if (status != TDDP_OK) {
            return tddp_reducer_break(reducer, status);
        }
        reducer->launched++;
    }
    if (reducer->ready_count == reducer->count) {
        reducer->phase = TDDP_REDUCER_LAUNCHED;
    }
    return TDDP_OK;
}

static tddp_status accept(tddp_reducer *reducer, size_t index)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->phase == TDDP_REDUCER_IDLE) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "the gradient of \"%s\" became ready outside a round: prepare first",
                         reducer->params[index].name);
    }
    if (reducer->ready[index]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "rank %d: the gradient of \"%s\" became ready twice since forward: run "
                         "backward once over each part of the graph (a retained graph, or a "
                         "checkpoint inside a checkpoint, runs it again), or add the losses up "
                         "first, or all but the last backward under no_sync",
                         reducer->rank, reducer->params[index].name);
    }
    reducer->ready[index] = true;
    reducer->order[reducer->ready_count++] = (int64_t)index;
    if (reducer->layout.bucket_of[index] != TDDP_REDUCER_NO_BUCKET) {
        reducer->layout.buckets[reducer->layout.bucket_of[index]].pending--;
    }
    return launch_complete(reducer);
}

tddp_status tddp_reducer_mark_ready(tddp_reducer *reducer, size_t index, int *all_ready)
{
    if (index >= reducer->count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter number %zu: expected 0 to %zu", index,
                         reducer->count - 1);
    }
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = accept(reducer, index);
    int all = reducer->phase == TDDP_REDUCER_LAUNCHED;
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK) {
        *all_ready = all;
    }
    return status;
}

/* --- finish ---------------------------------------------------------------------------------- */

/* Waits for one bucket; `*done` is false if the wait ended before the operation did. The works are
 * only read and cleared here, by the one thread that finishes, once they are handed over. */
static tddp_status finish_bucket(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                                 const tddp_reducer_patience *patience, bool *done)
{
    tddp_work *work = bucket->work;
    *done = true;
    if (!work) {
        return TDDP_OK;
    }
    tddp_status status = tddp_reducer_await(work, patience, done);
    if (!*done) {
        return status;
    }
    pthread_mutex_lock(&reducer->lock);
    bucket->work = NULL;
    if (status != TDDP_OK) {
        (void)tddp_reducer_break(reducer, status);
    }
    pthread_mutex_unlock(&reducer->lock);
    tddp_work_release(work);
    return status;
}

tddp_status tddp_reducer_finish(tddp_reducer *reducer, const tddp_wait *wait)
{
    tddp_reducer_patience patience = tddp_reducer_patience_of(wait);
    pthread_mutex_lock(&reducer->lock);
    size_t launched = reducer->launched;
    bool told = reducer->failure != TDDP_OK && reducer->phase == TDDP_REDUCER_IDLE;
    pthread_mutex_unlock(&reducer->lock);
    if (told) {
        return tddp_reducer_broken(reducer);
    }
    /* All are waited for, also after a failure: their memory must be quiet when this returns. */
    for (size_t b = 0; b < launched; b++) {
        bool done = true;
        tddp_status status = finish_bucket(reducer, &reducer->layout.buckets[b], &patience, &done);
        if (!done) {
            return status;
        }
    }
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = reducer->failure;
    if (status != TDDP_OK) {
        reducer->phase = TDDP_REDUCER_IDLE;
        (void)tddp_fail(status, "%s", reducer->failure_text);
    } else if (reducer->phase == TDDP_REDUCER_LAUNCHED) {
        reducer->phase = TDDP_REDUCER_IDLE;
        reducer->finished++;
    }
    pthread_mutex_unlock(&reducer->lock);
    return status;
}
