/*
 * Parameters that a round leaves out. Each rank knows which its graph does not reach; they count as
 * ready, with what their slices hold, from the round's first report on. A map of how many ranks use
 * each is added up over the ranks: after the last bucket, beside the reduction of the buckets; or,
 * if buckets that nobody uses are to be left out (skip_unused), before the first one. With
 * static_graph that is done in the first round alone.
 *
 * The map belongs to its operation from the call of all_reduce until the work is cleared.
 */
#include <stdlib.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_usage_make(tddp_reducer *reducer)
{
    tddp_reducer_usage *usage = &reducer->usage;
    if (!reducer->find_unused && !reducer->static_graph) {
        return TDDP_OK;
    }
    usage->unused = tddp_alloc_array(reducer->count, sizeof *usage->unused);
    usage->noted = tddp_alloc_array(reducer->count, sizeof *usage->noted);
    usage->map = tddp_alloc_array(reducer->count, sizeof *usage->map);
    return usage->unused && usage->noted && usage->map ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* --- the map --------------------------------------------------------------------------------- */

/* Whether each round's map is there before its buckets. */
static bool map_first(const tddp_reducer *reducer)
{
    return reducer->find_unused && reducer->skip_unused;
}

static bool map_stands(const tddp_reducer *reducer)
{
    return reducer->usage.sent && !reducer->usage.work;
}

bool tddp_reducer_usage_lacking(const tddp_reducer *reducer)
{
    return map_first(reducer) && !map_stands(reducer);
}

/* With the lock; where this thread waits for the map next it executes the sum, without the lock. */
static tddp_status send_map(tddp_reducer *reducer, const tddp_reducer_patience *waiting)
{
    tddp_reducer_usage *usage = &reducer->usage;
    for (size_t i = 0; i < reducer->count; i++) {
        usage->map[i] = !reducer->shadowing;
    }
    for (size_t k = 0; k < usage->unused_count && !reducer->shadowing; k++) {
        usage->map[usage->unused[k]] = usage->noted[usage->unused[k]];
    }
    usage->sent = true;
    if (reducer->world_size == 1) {
        return TDDP_OK;
    }
    tddp_op_args args = {.size = sizeof args,
                         .kind = TDDP_OP_ALL_REDUCE,
                         .output = {usage->map, reducer->count, TDDP_INT32, TDDP_CPU, 0, NULL},
                         .reduce = TDDP_REDUCE_SUM};
    tddp_work *work = NULL;
    if (waiting) {
        pthread_mutex_unlock(&reducer->lock);
    }
    tddp_reducer_inline(waiting, &args);
    tddp_status status = tddp_submit(reducer->group, &args, &work);
    if (waiting) {
        pthread_mutex_lock(&reducer->lock);
    }
    usage->work = work;
    return status == TDDP_OK ? TDDP_OK : tddp_reducer_break(reducer, status);
}

tddp_status tddp_reducer_usage_follow(tddp_reducer *reducer, const tddp_reducer_patience *finishing)
{
    bool due = (reducer->find_unused || reducer->static_graph) && !reducer->usage.sent;
    return due ? send_map(reducer, finishing) : TDDP_OK;
}

/* Under the lock, with a map that stands. */
static void skip_buckets(tddp_reducer *reducer)
{
    for (size_t b = 0; b < reducer->layout.buffer_count; b++) {
        const tddp_flat_buffer *flat = &reducer->layout.buffers[b];
        bool used = false;
        for (size_t k = 0; k < flat->slice_count && !used; k++) {
            used = reducer->usage.map[flat->slices[k].param] != 0;
        }
        reducer->buckets[b].skipped = !used;
    }
}

tddp_status tddp_reducer_usage_exchange(tddp_reducer *reducer,
                                        const tddp_reducer_patience *patience)
{
    bool done = true;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&reducer->lock);
    if (!reducer->usage.sent) {
        status = send_map(reducer, patience);
    }
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK) {
        status = tddp_reducer_await_slot(reducer, &reducer->usage.work, patience, &done);
    }
    if (status == TDDP_OK) {
        pthread_mutex_lock(&reducer->lock);
        skip_buckets(reducer);
        pthread_mutex_unlock(&reducer->lock);
    }
    return status;
}

/* --- the parameters -------------------------------------------------------------------------- */

void tddp_reducer_usage_open(tddp_reducer *reducer)
{
    tddp_reducer_usage *usage = &reducer->usage;
    usage->taken = false;
    if (reducer->find_unused) {
        usage->unused_count = 0;
        usage->sent = false;
    }
    if (reducer->static_graph && reducer->skip_unused && map_stands(reducer)) {
        skip_buckets(reducer);
    }
}

void tddp_reducer_take_unused(tddp_reducer *reducer)
{
    tddp_reducer_usage *usage = &reducer->usage;
    if (usage->taken) {
        return;
    }
    usage->taken = true;
    for (size_t k = 0; k < usage->unused_count; k++) {
        if (!reducer->ready[usage->unused[k]]) {
            tddp_reducer_wrote(reducer, usage->unused[k]);
            tddp_reducer_count_ready(reducer, usage->unused[k], TDDP_REDUCER_UNUSED);
        }
    }
}

static tddp_status list(tddp_reducer *reducer, const size_t *unused, size_t count)
{
    tddp_reducer_usage *usage = &reducer->usage;
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->phase != TDDP_REDUCER_OPEN || reducer->now.first_ready_ns != 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "unused parameters are told of %s: expected after prepare and before the "
                         "first gradient",
                         reducer->phase == TDDP_REDUCER_OPEN ? "when gradients are ready already"
                                                             : "outside a round");
    }
    if (usage->sent) { /* a wait for the map that ended early is taken up again */
        return TDDP_OK;
    }
    if (count > reducer->count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%zu unused parameters: expected at most %zu",
                         count, reducer->count);
    }
    for (size_t k = 0; k < count; k++) {
        if (unused[k] >= reducer->count) {
            return tddp_reducer_fail_index(reducer, unused[k]);
        }
    }
    for (size_t k = 0; k < count; k++) {
        tddp_reducer_wrote(reducer, unused[k]);
    }
    if (count) {
        memcpy(usage->unused, unused, count * sizeof *unused);
    }
    usage->unused_count = count;
    return TDDP_OK;
}

static void note_streams(tddp_reducer *reducer, const size_t *written, size_t count)
{
    pthread_mutex_lock(&reducer->lock);
    for (size_t k = 0; k < count && reducer->phase == TDDP_REDUCER_OPEN; k++) {
        if (written[k] < reducer->count) {
            tddp_reducer_wrote(reducer, written[k]);
        }
    }
    pthread_mutex_unlock(&reducer->lock);
}

tddp_status tddp_reducer_set_unused(tddp_reducer *reducer, const size_t *unused, size_t count,
                                    const tddp_wait *wait)
{
    if (reducer->static_graph) {
        note_streams(reducer, unused, count);
        return TDDP_OK;
    }
    if (!reducer->find_unused) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "unused parameters are told of to a reducer that was made without "
                         "find_unused: expected with it");
    }
    tddp_reducer_patience patience = tddp_reducer_patience_of(wait);
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = list(reducer, unused, count);
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK && map_first(reducer)) {
        status = tddp_reducer_usage_exchange(reducer, &patience);
    }
    return status;
}

void tddp_reducer_note_used(tddp_reducer *reducer, size_t index)
{
    if (reducer->usage.noted && index < reducer->count) {
        pthread_mutex_lock(&reducer->lock);
        reducer->usage.noted[index] = true;
        pthread_mutex_unlock(&reducer->lock);
    }
}

int tddp_reducer_used(const tddp_reducer *reducer, size_t index)
{
    if (index >= reducer->count || !reducer->usage.map || !map_stands(reducer)) {
        return 1;
    }
    return reducer->usage.map[index] > 0;
}
