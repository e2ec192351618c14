/*
 * The monotonic clock and deadlines on it. A timeout becomes a deadline at the
 * start of a wait; everything inside uses the deadline.
 */
#include <limits.h>
#include <time.h>

#include "base/base.h"

int64_t tddp_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * TDDP_NS_PER_S + now.tv_nsec;
}

int64_t tddp_deadline_from(int64_t now_ns, int64_t timeout_ms)
{
    if (timeout_ms < 0) {
        timeout_ms = 0;
    }
    if (timeout_ms > (INT64_MAX - now_ns) / TDDP_NS_PER_MS) {
        return INT64_MAX;
    }
    return now_ns + timeout_ms * TDDP_NS_PER_MS;
}

int64_t tddp_deadline_after_ms(int64_t timeout_ms)
{
    return tddp_deadline_from(tddp_now_ns(), timeout_ms);
}

int tddp_deadline_poll_ms(int64_t deadline_ns)
{
    int64_t left = deadline_ns - tddp_now_ns();
    if (left <= 0) {
        return 0;
    }
    int64_t ms = left / TDDP_NS_PER_MS + (left % TDDP_NS_PER_MS != 0);
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

int64_t tddp_wait_deadline(const tddp_wait *wait, int64_t default_ms)
{
    return tddp_deadline_after_ms(wait && wait->timeout_ms >= 0 ? wait->timeout_ms : default_ms);
}
