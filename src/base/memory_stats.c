/*
 * The process's counts of allocated bytes. They are its own, as the heap is, and relaxed atomics:
 * no other data depend on them.
 *
 * Invariant: the peak is no less than any value that `current` had since the last reset, because
 * the thread that brings about a value raises the peak to it.
 */
#include <stdatomic.h>

#include <tddp/memory_stats.h>

static atomic_uint_least64_t current;
static atomic_uint_least64_t peak;
static atomic_uint_least64_t allocations;

tddp_memory_stats tddp_memory_stats_get(void)
{
    return (tddp_memory_stats){
        .current_bytes = atomic_load_explicit(&current, memory_order_relaxed),
        .peak_bytes = atomic_load_explicit(&peak, memory_order_relaxed),
        .allocations = atomic_load_explicit(&allocations, memory_order_relaxed),
    };
}

void tddp_memory_reset_peak(void)
{
    atomic_store_explicit(&peak, atomic_load_explicit(&current, memory_order_relaxed),
                          memory_order_relaxed);
}

void tddp_memory_allocated(size_t bytes)
{
    const uint64_t now = atomic_fetch_add_explicit(&current, bytes, memory_order_relaxed) + bytes;
    uint64_t most = atomic_load_explicit(&peak, memory_order_relaxed);
    while (now > most && !atomic_compare_exchange_weak_explicit(
                             &peak, &most, now, memory_order_relaxed, memory_order_relaxed)) {
    }
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
}

void tddp_memory_freed(size_t bytes)
{
    atomic_fetch_sub_explicit(&current, bytes, memory_order_relaxed);
}
