/* The counts of allocated bytes: exact, also where threads count at once. */
#include <pthread.h>

#include <tddp/memory_stats.h>

#include "check.h"

static void check_stats(uint64_t current, uint64_t peak, uint64_t allocations)
{
    const tddp_memory_stats stats = tddp_memory_stats_get();
    CHECK_INT(stats.current_bytes, current);
    CHECK_INT(stats.peak_bytes, peak);
    CHECK_INT(stats.allocations, allocations);
}

TEST(the_peak_stays_until_it_is_reset)
{
    check_stats(0, 0, 0);
    tddp_memory_allocated(100);
    tddp_memory_allocated(20);
    check_stats(120, 120, 2);
    tddp_memory_freed(100);
    tddp_memory_allocated(50);
    check_stats(70, 120, 3);
    tddp_memory_reset_peak();
    check_stats(70, 70, 3);
    tddp_memory_freed(50);
    tddp_memory_freed(20);
    check_stats(0, 70, 3);
}

enum { THREADS = 4, ROUNDS = 20000 };

static void *count(void *unused)
{
    (void)unused;
    for (int i = 0; i < ROUNDS; i++) {
        tddp_memory_allocated(3);
        tddp_memory_allocated(5);
        tddp_memory_freed(3);
    }
    return NULL;
}

TEST(threads_count_together)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, count, NULL), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    const tddp_memory_stats stats = tddp_memory_stats_get();
    CHECK_INT(stats.current_bytes, 5 * THREADS * ROUNDS);
    CHECK_INT(stats.allocations, 2 * THREADS * ROUNDS);
    CHECK(stats.peak_bytes >= stats.current_bytes &&
          stats.peak_bytes <= stats.current_bytes + 3 * THREADS);
}
