/*
 * Counts cores by what Linux shows: the affinity mask, and the control groups' limits. Only reads;
 * one thread.
 */
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/resources.h"

enum { MOST_CORES = 65536 };

int *tddp_launch_allowed_cpus(int *count)
{
    /* The kernel refuses a set smaller than its own, so larger ones are tried. */
    for (size_t bits = 1024; bits <= MOST_CORES; bits *= 4) {
        cpu_set_t *set = CPU_ALLOC(bits);
        size_t bytes = CPU_ALLOC_SIZE(bits);
        int *list = tddp_alloc_array(bits, sizeof *list);
        int found = 0;
        if (set && list && sched_getaffinity(0, bytes, set) == 0) {
            for (size_t cpu = 0; cpu < bits; cpu++) {
                if (CPU_ISSET_S(cpu, bytes, set)) {
                    list[found++] = (int)cpu;
                }
            }
        }
        CPU_FREE(set);
        if (found > 0) {
            *count = found;
            return list;
        }
        free(list);
    }
    (void)tddp_fail_errno("sched_getaffinity");
    return NULL;
}

int tddp_launch_cores(void)
{
    int cores = 1;
    free(tddp_launch_allowed_cpus(&cores)); /* where the system does not tell, one it is */
    int limit = tddp_core_limit();
    return limit < cores ? limit : cores;
}
