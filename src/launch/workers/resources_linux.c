/*
 * Counts cores by what Linux shows: the affinity mask, and the control groups' limits. Only reads;
 * one thread.
 */
#include <sched.h>

#include "base/base.h"
#include "launch/workers/resources.h"

enum { MOST_CORES = 65536 };

int tddp_launch_cores(void)
{
    int cores = 0;
    /* The kernel refuses a set smaller than its own, so larger ones are tried. */
    for (size_t bits = 1024; cores == 0 && bits <= MOST_CORES; bits *= 4) {
        cpu_set_t *set = CPU_ALLOC(bits);
        size_t bytes = CPU_ALLOC_SIZE(bits);
        if (set && sched_getaffinity(0, bytes, set) == 0) {
            cores = CPU_COUNT_S(bytes, set);
        }
        CPU_FREE(set);
    }
    int limit = tddp_core_limit();
    cores = cores > 0 ? cores : 1; /* where the system does not tell, one it is */
    return limit < cores ? limit : cores;
}
