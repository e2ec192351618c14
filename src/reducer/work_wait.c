/*
 * Waits for works. A wait may end before its operation does (timeout, cancellation); the memory
 * that the operation uses must then outlive the caller, so it is freed when the work completes.
 * Any thread; stateless.
 */
#include <stdlib.h>

#include "reducer/reducer.h"

tddp_reducer_deadline tddp_reducer_deadline_of(const tddp_wait *wait)
{
    tddp_reducer_deadline deadline = {false, 0, tddp_wait_cancel(wait)};
    if (wait && wait->timeout_ms >= 0) {
        deadline.bounded = true;
        deadline.deadline_ns = tddp_deadline_after_ms(wait->timeout_ms);
    }
    return deadline;
}

tddp_wait tddp_reducer_remaining(const tddp_reducer_deadline *deadline)
{
    tddp_wait wait = {-1, deadline->cancel};
    if (deadline->bounded) {
        wait.timeout_ms = tddp_deadline_poll_ms(deadline->deadline_ns);
    }
    return wait;
}

void tddp_reducer_set_inline(const tddp_reducer_deadline *deadline, tddp_op_args *args)
{
    if (deadline && deadline->bounded) {
        int64_t left = (deadline->deadline_ns - tddp_now_ns()) / 1000;
        args->inline_us = left > 0 ? left : 0;
        args->cancel = deadline->cancel;
    } else if (deadline) {
        args->inline_us = -1;
        args->cancel = deadline->cancel;
    }
}

tddp_status tddp_reducer_wait_work(tddp_work *work, const tddp_reducer_deadline *deadline,
                                   bool *done)
{
    const tddp_wait wait = tddp_reducer_remaining(deadline);
    tddp_status status = tddp_work_wait(work, &wait);
    *done = status == TDDP_OK || tddp_work_completed(work);
    /* The work may have completed after the wait failed: then its own status counts. */
    return *done ? tddp_work_status(work) : status;
}

void tddp_reducer_detach_work(tddp_work *work, void (*release)(void *data), void *data)
{
    if (tddp_work_on_done(work, release, data) != TDDP_OK) {
        /* A leak is better than a write to freed memory. */
        tddp_log(TDDP_LOG_WARN, "reducer", "the memory of a pending operation is leaked");
    }
    tddp_work_release(work);
}
