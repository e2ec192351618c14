/*
 * Requests to the health check from arbitrary bytes, which come one by one: they are understood or
 * refused at some length.
 */
#include <stdint.h>
#include <stdlib.h>

#include "launch/health/health.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bool head;
    size_t most = size < TDDP_LAUNCH_HEALTH_REQUEST_BYTES ? size : TDDP_LAUNCH_HEALTH_REQUEST_BYTES;
    for (size_t part = 0; part <= most; part++) {
        char *copy = malloc(part + 1);
        for (size_t i = 0; copy && i < part; i++) {
            copy[i] = (char)data[i];
        }
        int status = copy ? tddp_launch_health_parse(copy, part, &head) : 0;
        free(copy);
        if (status != 0) {
            return 0;
        }
        if (part == TDDP_LAUNCH_HEALTH_REQUEST_BYTES) {
            abort(); /* it has no end */
        }
    }
    return 0;
}
