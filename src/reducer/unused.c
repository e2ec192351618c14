/*
 * Unused parameters. Each rank passes the parameters that its graph doesn't reach; they are marked
 * ready with the iteration's first mark_ready, and their slices are reduced as they are. The map of
 * used parameters counts the ranks that use each parameter, as a sum over the ranks. It is reduced
 * after the last bucket, in parallel with the buckets; or, if buckets that no rank uses are skipped
 * (skip_unused), before the first one. With static_graph it is reduced in the first iteration only.
 *
 * The map belongs to its operation from the submission until the work is cleared.
 */
#include <stdlib.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_unused_init(tddp_reducer *reducer)
{
    tddp_reducer_unused *state = &reducer->unused;
    if (!reducer->find_unused && !reducer->static_graph) {
        return TDDP_OK;
    }
    state->indices = tddp_alloc_array(reducer->count, sizeof *state->indices);
    state->used_outside = tddp_alloc_array(reducer->count, sizeof *state->used_outside);
    if (!state->indices || !state->used_outside) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = tddp_flat_numbers_make(reducer->group, reducer->params, reducer->count,
                                                TDDP_INT32, reducer->count, &state->map);
    state->used_map = status ? NULL : state->map->buffer.data;
    return status;
}

/* --- the map of used parameters -------------------------------------------------------------- */

/* Whether each iteration reduces its map before its buckets. */
static bool map_before_buckets(const tddp_reducer *reducer)
{
    return reducer->find_unused && reducer->skip_unused;
}

static bool used_map_ready(const tddp_reducer *reducer)
{
    return reducer->unused.map_submitted && !reducer->unused.map_work;
}

bool tddp_reducer_used_map_missing(const tddp_reducer *reducer)
{
    return map_before_buckets(reducer) && !used_map_ready(reducer);
}

/* Under the lock. With a deadline this thread executes the sum, and the lock is released
 * meanwhile. */
static tddp_status submit_used_map(tddp_reducer *reducer, const tddp_reducer_deadline *deadline)
{
    tddp_reducer_unused *state = &reducer->unused;
    for (size_t i = 0; i < reducer->count; i++) {
        state->used_map[i] = !reducer->joined;
    }
    for (size_t k = 0; k < state->count && !reducer->joined; k++) {
        state->used_map[state->indices[k]] = state->used_outside[state->indices[k]];
    }
    state->map_submitted = true;
    if (reducer->world_size == 1) {
        return TDDP_OK;
    }
    tddp_op_args args = {.size = sizeof args,
                         .kind = TDDP_OP_ALL_REDUCE,
                         .output = state->map->buffer,
                         .reduce = TDDP_REDUCE_SUM};
    tddp_work *work = NULL;
    if (deadline) {
        pthread_mutex_unlock(&reducer->lock);
    }
    tddp_reducer_set_inline(deadline, &args);
    tddp_status status = tddp_submit(reducer->group, &args, &work);
    if (deadline) {
        pthread_mutex_lock(&reducer->lock);
    }
    state->map_work = work;
    return status == TDDP_OK ? TDDP_OK : tddp_reducer_set_failure(reducer, status);
}

tddp_status tddp_reducer_submit_used_map(tddp_reducer *reducer,
                                         const tddp_reducer_deadline *deadline)
{
    bool due = (reducer->find_unused || reducer->static_graph) && !reducer->unused.map_submitted;
    return due ? submit_used_map(reducer, deadline) : TDDP_OK;
}

/* Under the lock, when the map is ready. */
static void skip_buckets(tddp_reducer *reducer)
{
    for (size_t b = 0; b < reducer->layout.buffer_count; b++) {
        const tddp_flat_buffer *flat = &reducer->layout.buffers[b];
        bool used = false;
        for (size_t k = 0; k < flat->slice_count && !used; k++) {
            used = reducer->unused.used_map[flat->slices[k].param] != 0;
        }
        reducer->buckets[b].skipped = !used;
    }
}

tddp_status tddp_reducer_exchange_used_map(tddp_reducer *reducer,
                                           const tddp_reducer_deadline *deadline)
{
    bool done = true;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&reducer->lock);
    if (!reducer->unused.map_submitted) {
        status = submit_used_map(reducer, deadline);
    }
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK) {
        status = tddp_reducer_wait_and_clear(reducer, &reducer->unused.map_work, deadline, &done);
    }
    if (status == TDDP_OK) {
        pthread_mutex_lock(&reducer->lock);
        skip_buckets(reducer);
        pthread_mutex_unlock(&reducer->lock);
    }
    return status;
}

/* --- the parameters -------------------------------------------------------------------------- */

void tddp_reducer_unused_prepare(tddp_reducer *reducer)
{
    tddp_reducer_unused *state = &reducer->unused;
    state->marked_ready = false;
    if (reducer->find_unused) {
        state->count = 0;
        state->map_submitted = false;
    }
    if (reducer->static_graph && reducer->skip_unused && used_map_ready(reducer)) {
        skip_buckets(reducer);
    }
}

void tddp_reducer_mark_unused_ready(tddp_reducer *reducer)
{
    tddp_reducer_unused *state = &reducer->unused;
    if (state->marked_ready) {
        return;
    }
    state->marked_ready = true;
    for (size_t k = 0; k < state->count; k++) {
        if (!reducer->ready[state->indices[k]]) {
            tddp_reducer_record_stream(reducer, state->indices[k]);
            tddp_reducer_count_ready(reducer, state->indices[k], TDDP_REDUCER_UNUSED);
        }
    }
}

static tddp_status store_unused(tddp_reducer *reducer, const size_t *unused, size_t count)
{
    tddp_reducer_unused *state = &reducer->unused;
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_fail_again(reducer);
    }
    if (reducer->phase != TDDP_REDUCER_PREPARED || reducer->current_times.first_ready_ns != 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "unused parameters are passed %s: expected after prepare and before the "
                         "first gradient",
                         reducer->phase == TDDP_REDUCER_PREPARED
                             ? "when gradients are ready already"
                             : "outside an iteration");
    }
    if (state->map_submitted) { /* the previous call's wait for the map ended early: continue */
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
        tddp_reducer_record_stream(reducer, unused[k]);
    }
    if (count) {
        memcpy(state->indices, unused, count * sizeof *unused);
    }
    state->count = count;
    return TDDP_OK;
}

static void record_streams(tddp_reducer *reducer, const size_t *written, size_t count)
{
    pthread_mutex_lock(&reducer->lock);
    for (size_t k = 0; k < count && reducer->phase == TDDP_REDUCER_PREPARED; k++) {
        if (written[k] < reducer->count) {
            tddp_reducer_record_stream(reducer, written[k]);
        }
    }
    pthread_mutex_unlock(&reducer->lock);
}

tddp_status tddp_reducer_set_unused(tddp_reducer *reducer, const size_t *unused, size_t count,
                                    const tddp_wait *wait)
{
    if (reducer->static_graph) {
        record_streams(reducer, unused, count);
        return TDDP_OK;
    }
    if (!reducer->find_unused) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "unused parameters are passed to a reducer without find_unused: expected "
                         "a reducer created with it");
    }
    tddp_reducer_deadline deadline = tddp_reducer_deadline_of(wait);
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = store_unused(reducer, unused, count);
    pthread_mutex_unlock(&reducer->lock);
    if (status == TDDP_OK && map_before_buckets(reducer)) {
        status = tddp_reducer_exchange_used_map(reducer, &deadline);
    }
    return status;
}

void tddp_reducer_note_used(tddp_reducer *reducer, size_t index)
{
    if (reducer->unused.used_outside && index < reducer->count) {
        pthread_mutex_lock(&reducer->lock);
        reducer->unused.used_outside[index] = true;
        pthread_mutex_unlock(&reducer->lock);
    }
}

int tddp_reducer_used(const tddp_reducer *reducer, size_t index)
{
    if (index >= reducer->count || !reducer->unused.used_map || !used_map_ready(reducer)) {
        return 1;
    }
    return reducer->unused.used_map[index] > 0;
}
