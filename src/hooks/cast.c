/*
 * Casts arrays between floating-point dtypes, through float32, block by block. Pure functions, any
 * thread. src/backend/arith converts float16 and bfloat16.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "hooks/hooks.h"

enum { BLOCK = 1024 };

char *tddp_hooks_at(const tddp_buffer *buffer, size_t start)
{
    return (char *)buffer->data + start * tddp_dtype_size(buffer->dtype);
}

const float *tddp_hooks_floats(const tddp_buffer *buffer, size_t start, size_t count,
                               float *scratch)
{
    const void *from = tddp_hooks_at(buffer, start);
    if (buffer->dtype == TDDP_FLOAT32) {
        return from;
    }
    if (buffer->dtype != TDDP_FLOAT64) {
        tddp_arith_widen(buffer->dtype, scratch, from, count);
        return scratch;
    }
    const double *doubles = from;
    for (size_t i = 0; i < count; i++) {
        scratch[i] = (float)doubles[i];
    }
    return scratch;
}

void tddp_hooks_store_floats(const float *from, const tddp_buffer *buffer, size_t start,
                             size_t count)
{
    void *into = tddp_hooks_at(buffer, start);
    if (buffer->dtype == TDDP_FLOAT32) {
        memcpy(into, from, count * sizeof *from);
        return;
    }
    if (buffer->dtype != TDDP_FLOAT64) {
        tddp_arith_narrow(buffer->dtype, into, from, count);
        return;
    }
    double *doubles = into;
    for (size_t i = 0; i < count; i++) {
        doubles[i] = (double)from[i];
    }
}

void tddp_hooks_cast(tddp_buffer from, tddp_buffer to, double exact_divisor)
{
    const float divisor = (float)exact_divisor;
    float scratch[BLOCK];
    for (size_t start = 0; start < from.count; start += BLOCK) {
        const size_t count = tddp_hooks_min(BLOCK, from.count - start);
        const float *floats = tddp_hooks_floats(&from, start, count, scratch);
        if (divisor != 1.0f) {
            for (size_t i = 0; i < count; i++) {
                scratch[i] = floats[i] / divisor;
            }
            floats = scratch;
        }
        tddp_hooks_store_floats(floats, &to, start, count);
    }
}
