/*
 * Waiting for works, and the memory of works that nobody waits for any longer: a wait may end
 * before its operation does (interrupted, out of time), and what the operation reads and writes
 * must then outlive the caller. Any thread; no state of its own.
 */
#include <stdlib.h>

#include "reducer/reducer.h"

tddp_reducer_patience tddp_reducer_patience_of(const tddp_wait *wait)
{
    tddp_reducer_patience patience = {false, 0, tddp_wait_cancel(wait)};
    if (wait && wait->timeout_ms >= 0) {
        patience.bounded = true;
        patience.deadline_ns = tddp_deadline_after_ms(wait->timeout_ms);
    }
    return patience;
}

tddp_wait tddp_reducer_rest_of(const tddp_reducer_patience *patience)
{
    tddp_wait wait = {-1, patience->cancel};
    if (patience->bounded) {
        wait.timeout_ms = tddp_deadline_poll_ms(patience->deadline_ns);
    }
    return wait;
}

void tddp_reducer_inline(const tddp_reducer_patience *patience, tddp_op_args *args)
{
    if (patience && patience->bounded) {
        int64_t left = (patience->deadline_ns - tddp_now_ns()) / 1000;
        args->inline_us = left > 0 ? left : 0;
        args->cancel = patience->cancel;
    } else if (patience) {
        args->inline_us = -1;
        args->cancel = patience->cancel;
    }
}

tddp_status tddp_reducer_await(tddp_work *work, const tddp_reducer_patience *patience, bool *done)
{
    const tddp_wait wait = tddp_reducer_rest_of(patience);
    tddp_status status = tddp_work_wait(work, &wait);
    *done = status == TDDP_OK || tddp_work_completed(work);
    /* It may have ended between the two looks: then its own outcome counts. */
    return *done ? tddp_work_status(work) : status;
}

void tddp_reducer_abandon(tddp_work *work, void (*release)(void *data), void *data)
{
    if (tddp_work_on_done(work, release, data) != TDDP_OK) {
        /* Memory that is lost is better than memory that is written after it was freed. */
        tddp_log(TDDP_LOG_WARN, "reducer", "memory of an operation under way is not given back");
    }
    tddp_work_release(work);
}

tddp_status tddp_reducer_gather(tddp_group *group, tddp_buffer input, tddp_buffer output,
                                const tddp_reducer_patience *patience, void *memory, bool *kept)
{
    *kept = true;
    tddp_work *work = NULL;
    tddp_status status = tddp_all_gather(group, input, output, &work);
    if (status != TDDP_OK) {
        return status;
    }
    status = tddp_reducer_await(work, patience, kept);
    if (*kept) {
        tddp_work_release(work);
    } else {
        tddp_reducer_abandon(work, free, memory);
    }
    return status;
}
