/*
 * The round of a rank that has no more data while others have: it hands over zeros where they hand
 * over gradients, in the same order, so that their rounds come to an end. What it sees is no order
 * of readiness and no graph, so nothing is learnt from it. On the thread that would run forward.
 */
#include "reducer/reducer.h"

static tddp_status begin(tddp_reducer *reducer)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->shadowing && reducer->phase != TDDP_REDUCER_IDLE) {
        return TDDP_OK; /* its wait ended early: it goes on */
    }
    if (reducer->phase != TDDP_REDUCER_OPEN || reducer->now.first_ready_ns != 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "a round without data %s: expected after prepare, and no gradient ready",
                         reducer->phase == TDDP_REDUCER_IDLE ? "outside a round"
                                                             : "when gradients are ready already");
    }
    reducer->shadowing = true;
    reducer->usage.taken = true;
    tddp_status status = TDDP_OK;
    for (size_t b = 0; b < reducer->layout.buffer_count && status == TDDP_OK; b++) {
        status = tddp_flat_memory_zero(reducer->layout.memory, &reducer->buckets[b].buffer);
    }
    if (status != TDDP_OK) { /* the others' round needs this rank's part */
        return tddp_reducer_break(reducer, status);
    }
    for (size_t i = 0; i < reducer->count; i++) {
        tddp_reducer_wrote(reducer, i);
        tddp_reducer_count_ready(reducer, i, TDDP_REDUCER_UNUSED);
    }
    return TDDP_OK;
}

tddp_status tddp_reducer_shadow(tddp_reducer *reducer, const tddp_wait *wait)
{
    tddp_reducer_patience patience = tddp_reducer_patience_of(wait);
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = begin(reducer);
    pthread_mutex_unlock(&reducer->lock);
    return status == TDDP_OK ? tddp_reducer_finish_within(reducer, &patience) : status;
}
