/*
 * Rebuilds the buckets after the first iteration, in the order in which gradients became ready, so
 * that the first buckets are ready early and their reduction overlaps with the rest of backward.
 * The order may differ between ranks; all use rank 0's. Runs between two iterations, on the thread
 * that runs forward. The reducer keeps the received order until the new layout is in place: if a
 * call is interrupted or runs out of memory, the next one continues with the same order.
 */
#include <stdlib.h>

#include "reducer/reducer.h"

static tddp_status set_failure(tddp_reducer *reducer, tddp_status status)
{
    pthread_mutex_lock(&reducer->lock);
    (void)tddp_reducer_set_failure(reducer, status);
    pthread_mutex_unlock(&reducer->lock);
    return status;
}

static tddp_status start_broadcast(tddp_reducer *reducer)
{
    tddp_flat_numbers *numbers;
    tddp_status status = tddp_flat_numbers_make(reducer->group, reducer->params, reducer->count,
                                                TDDP_INT64, reducer->count, &numbers);
    if (status) {
        return status;
    }
    int64_t *order = numbers->buffer.data;
    for (size_t k = 0; k < reducer->count; k++) {
        /* A joined rank has recorded no order: assume that backward visits the last one first. */
        order[k] =
            reducer->last_order_valid ? reducer->last_order[k] : (int64_t)(reducer->count - 1 - k);
    }
    if (reducer->world_size > 1) {
        status = tddp_broadcast(reducer->group, numbers->buffer, 0, &reducer->rebuild_work);
        if (status != TDDP_OK) {
            tddp_flat_numbers_free(numbers);
            return status;
        }
    }
    reducer->rebuild_order = numbers;
    return TDDP_OK;
}

static tddp_status wait_broadcast(tddp_reducer *reducer, const tddp_wait *wait)
{
    if (!reducer->rebuild_work) {
        return TDDP_OK;
    }
    tddp_reducer_deadline deadline = tddp_reducer_deadline_of(wait);
    bool done = true;
    tddp_status status = tddp_reducer_wait_work(reducer->rebuild_work, &deadline, &done);
    if (!done) {
        return status;
    }
    tddp_work_release(reducer->rebuild_work);
    reducer->rebuild_work = NULL;
    return status == TDDP_OK ? TDDP_OK : set_failure(reducer, status);
}

static const int64_t *order_of(const tddp_reducer *reducer)
{
    return reducer->rebuild_order->buffer.data;
}

/* Data from another rank must not cause an access out of bounds. */
static tddp_status check_order(tddp_reducer *reducer)
{
    bool *seen = tddp_alloc_array(reducer->count, sizeof *seen);
    if (!seen) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = TDDP_OK;
    for (size_t k = 0; k < reducer->count && status == TDDP_OK; k++) {
        size_t i = (size_t)order_of(reducer)[k];
        if (i >= reducer->count || seen[i]) {
            status = set_failure(
                reducer, tddp_fail(TDDP_INTERNAL, "rank 0 sent an invalid order of %zu parameters",
                                   reducer->count));
        } else {
            seen[i] = true;
        }
    }
    free(seen);
    return status;
}

static tddp_status make_layout(tddp_reducer *reducer, tddp_flat_layout *out,
                               tddp_reducer_bucket **buckets)
{
    size_t count = 0;
    size_t *bucket_of = tddp_alloc_array(reducer->count, sizeof *bucket_of);
    if (!bucket_of) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status =
        tddp_flat_plan_in_order(reducer->params, order_of(reducer), reducer->count, reducer->limits,
                                reducer->limit_count, bucket_of, &count);
    if (status != TDDP_OK) {
        free(bucket_of);
        return status;
    }
    status = tddp_flat_layout_make(reducer->group, &reducer->device, reducer->params,
                                   order_of(reducer), reducer->count, bucket_of, count, out);
    for (size_t i = 0; status == TDDP_OK && i < reducer->count; i++) {
        if (out->addresses[i]) {
            status = tddp_flat_memory_copy(out->memory, &reducer->params[i], out->addresses[i],
                                           reducer->layout.addresses[i]);
        }
    }
    if (status == TDDP_OK) {
        status = tddp_reducer_make_buckets(out, buckets);
    }
    if (status != TDDP_OK) {
        tddp_flat_layout_free(out);
    }
    return status;
}

static void replace_layout(tddp_reducer *reducer, const tddp_flat_layout *fresh,
                           tddp_reducer_bucket *buckets)
{
    pthread_mutex_lock(&reducer->lock);
    tddp_flat_layout old = reducer->layout;
    tddp_reducer_bucket *old_buckets = reducer->buckets;
    reducer->layout = *fresh;
    reducer->buckets = buckets;
    reducer->launched = 0; /* it counted buckets of the old layout */
    reducer->layout_number++;
    reducer->rebuilt = true;
    for (size_t b = 0; b < old.buffer_count; b++) {
        if (old_buckets[b].stream_work) {
            tddp_reducer_detach_bucket_work(reducer, old.memory, old_buckets[b].stream_work);
        }
    }
    pthread_mutex_unlock(&reducer->lock);
    free(old_buckets);
    tddp_flat_layout_free(&old);
    tddp_flat_numbers_free(reducer->rebuild_order);
    reducer->rebuild_order = NULL;
}

tddp_status tddp_reducer_rebuild(tddp_reducer *reducer, const tddp_wait *wait, int *rebuilt)
{
    pthread_mutex_lock(&reducer->lock);
    tddp_reducer_poll_stream_works(reducer);
    bool broken = reducer->failure != TDDP_OK;
    bool due = reducer->finished > 0 && reducer->phase == TDDP_REDUCER_IDLE && !reducer->rebuilt &&
               !reducer->find_unused;
    pthread_mutex_unlock(&reducer->lock);
    if (broken) {
        return tddp_reducer_fail_again(reducer);
    }
    if (!due) {
        *rebuilt = 0;
        return TDDP_OK;
    }
    tddp_flat_layout fresh = {0};
    tddp_reducer_bucket *buckets = NULL;
    tddp_status status = reducer->rebuild_order ? TDDP_OK : start_broadcast(reducer);
    if (status == TDDP_OK) {
        status = wait_broadcast(reducer, wait);
    }
    if (status == TDDP_OK) {
        status = check_order(reducer);
    }
    if (status == TDDP_OK) {
        status = make_layout(reducer, &fresh, &buckets);
    }
    if (status != TDDP_OK) {
        return status;
    }
    replace_layout(reducer, &fresh, buckets);
    *rebuilt = 1;
    return TDDP_OK;
}
