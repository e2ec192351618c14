/*
 * Eventcounts: what a thread sleeps on until something may have changed, in memory that processes
 * may share. A thread that changes something calls tddp_eventcount_notify() after it; one that
 * needs the change reads the count, looks, and waits only while the count is the one that it read.
 * So a change between the look and the wait is never missed, and a change that nobody sleeps for
 * costs no system call. Any thread.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

enum { SPINS_PER_CLOCK_READ = 64 };

/* The kernel may have put the awaited thread on this core. */
#define YIELD_AFTER_NS 5000

tddp_status tddp_eventcount_create(tddp_eventcount **out)
{
    *out = tddp_alloc(sizeof **out);
    return *out ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

void tddp_eventcount_free(tddp_eventcount *events)
{
    free(events);
}

uint32_t tddp_eventcount_read(const tddp_eventcount *events)
{
    return atomic_load(&events->count);
}

void tddp_eventcount_notify(tddp_eventcount *events)
{
    atomic_fetch_add(&events->count, 1);
    if (atomic_load(&events->waiters) > 0) {
        (void)syscall(SYS_futex, &events->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static bool spin(const tddp_eventcount *events, uint32_t seen, int64_t spin_ns)
{
    const int64_t start = tddp_now_ns();
    for (int64_t now = start; now < start + spin_ns; now = tddp_now_ns()) {
        if (now > start + YIELD_AFTER_NS) {
            (void)sched_yield();
        }
        for (int i = 0; i < SPINS_PER_CLOCK_READ; i++) {
            if (atomic_load(&events->count) != seen) {
                return true;
            }
            tddp_cpu_pause();
        }
    }
    return false;
}

void tddp_eventcount_wait(tddp_eventcount *events, uint32_t seen, int64_t spin_ns, int64_t sleep_ns)
{
    if (sleep_ns <= 0 || (spin_ns > 0 && spin(events, seen, spin_ns))) {
        return;
    }
    struct timespec time = {.tv_sec = (time_t)(sleep_ns / TDDP_NS_PER_S),
                            .tv_nsec = (long)(sleep_ns % TDDP_NS_PER_S)};
    atomic_fetch_add(&events->waiters, 1);
    if (atomic_load(&events->count) == seen) {
        (void)syscall(SYS_futex, &events->count, FUTEX_WAIT, seen, &time, NULL, 0);
    }
    atomic_fetch_sub(&events->waiters, 1);
}
