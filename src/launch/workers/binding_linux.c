/*
 * Sets a worker's affinity. In a worker's child.
 */
#include <sched.h>

#include "launch/workers/binding.h"

bool tddp_launch_binding_apply(const tddp_launch_binding *binding, int local_rank)
{
    if (local_rank >= binding->workers) {
        return true;
    }
    const unsigned long *set = binding->sets + (size_t)local_rank * binding->words;
    return sched_setaffinity(0, binding->words * sizeof *set, (const cpu_set_t *)set) == 0;
}
