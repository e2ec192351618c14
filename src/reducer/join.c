/*
 * The iteration of a joined rank, which has no data left while other ranks do: it launches all
 * buckets with zeros, in the same order, so that the other ranks' operations complete. It records
 * neither an order nor a graph. Called on the thread that would run forward.
 */
#include "reducer/reducer.h"

static tddp_status start(tddp_reducer *reducer)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_fail_again(reducer);
    }
    if (reducer->joined && reducer->phase != TDDP_REDUCER_IDLE) {
        return TDDP_OK; /* the previous call's wait ended early: continue */
    }
    if (reducer->phase != TDDP_REDUCER_PREPARED || reducer->current_times.first_ready_ns != 0) {
        return tddp_fail(
            TDDP_INVALID_ARGUMENT,
            "an iteration without data %s: expected after prepare, before any gradient "
            "is ready",
            reducer->phase == TDDP_REDUCER_IDLE ? "outside an iteration"
                                                : "when gradients are ready already");
    }
    reducer->joined = true;
    reducer->unused.marked_ready = true;
    tddp_status status = TDDP_OK;
    for (size_t b = 0; b < reducer->layout.buffer_count && status == TDDP_OK; b++) {
        status = tddp_flat_memory_zero(reducer->layout.memory, &reducer->buckets[b].buffer);
    }
    if (status != TDDP_OK) { /* permanent: the other ranks wait for this rank's buckets */
        return tddp_reducer_set_failure(reducer, status);
    }
    for (size_t i = 0; i < reducer->count; i++) {
        tddp_reducer_record_stream(reducer, i);
        tddp_reducer_count_ready(reducer, i, TDDP_REDUCER_UNUSED);
    }
    return TDDP_OK;
}

tddp_status tddp_reducer_shadow(tddp_reducer *reducer, const tddp_wait *wait)
{
    tddp_reducer_deadline deadline = tddp_reducer_deadline_of(wait);
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = start(reducer);
    pthread_mutex_unlock(&reducer->lock);
    return status == TDDP_OK ? tddp_reducer_finish_by(reducer, &deadline) : status;
}
