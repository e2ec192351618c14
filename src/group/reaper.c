/*
 * Shuts down groups whose last reference is dropped on a thread that must not block: in a garbage
 * collector, a destructor, a work's callback. Each is shut down and freed on a thread lent to that
 * (backend/blocking.h); the process's exit waits for them.
 *
 * Invariant: a group that is reaped has no references, and is used by that thread alone.
 */
#include <stdlib.h>

#include "group/group.h"

#define EXIT_NS (10 * TDDP_NS_PER_S)

/* How many are under way, in the lower half; above it, in which process: a forked child reaps none
 * of its parent's. */
static _Atomic uint64_t under_way;
static tddp_eventcount ended;

static uint64_t count_in(uint64_t value)
{
    return (pid_t)(value >> 32) == tddp_process_id() ? (uint32_t)value : 0;
}

static void add(int64_t change)
{
    const uint64_t self = (uint64_t)tddp_process_id() << 32;
    uint64_t before = atomic_load(&under_way);
    while (!atomic_compare_exchange_weak(&under_way, &before,
                                         self | (uint64_t)((int64_t)count_in(before) + change))) {
    }
}

static void reap(void *group, void *nothing)
{
    (void)nothing;
    tddp_group_end(group);
    add(-1);
    tddp_eventcount_notify(&ended);
}

/* Connections must not close while the process already runs its exit handlers. */
static void await_all(void)
{
    const int64_t deadline = tddp_now_ns() + EXIT_NS;
    uint32_t seen = tddp_eventcount_read(&ended);
    while (count_in(atomic_load(&under_way)) > 0 && tddp_now_ns() < deadline) {
        tddp_eventcount_wait(&ended, seen, 0, deadline - tddp_now_ns());
        seen = tddp_eventcount_read(&ended);
    }
}

static bool registered;

static void register_exit(void)
{
    registered = atexit(await_all) == 0;
}

bool tddp_group_reap(tddp_group *group)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, register_exit);
    if (!registered || tddp_blocking_reserve()) {
        return false;
    }
    add(1);
    group->reap = (tddp_blocking_call){.run = reap, .context = group};
    tddp_blocking_start(&group->reap);
    return true;
}
