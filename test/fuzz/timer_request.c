/*
 * Requests for timers from arbitrary bytes: what is understood has a process, a scope and a signal.
 */
#include <stdint.h>
#include <stdlib.h>

#include "launch/timers/timers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    tddp_launch_timer timer;
    if (tddp_launch_timer_parse((const char *)data, size, &timer) &&
        (timer.pid <= 0 || timer.signal <= 0 || timer.scope[0] == '\0')) {
        abort();
    }
    return 0;
}
