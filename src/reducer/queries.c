/*
 * Getters. Called on the thread that runs forward. Only this thread replaces the layout (rebuild.c)
 * and what is stored of the last finished iteration, so nothing here takes the lock.
 */
#include "reducer/reducer.h"

void *tddp_reducer_gradient(tddp_reducer *reducer, size_t index)
{
    return index < reducer->count ? reducer->layout.addresses[index] : NULL;
}

tddp_flat_memory *tddp_reducer_memory(const tddp_reducer *reducer)
{
    return reducer->layout.memory;
}

size_t tddp_reducer_bucket_count(const tddp_reducer *reducer)
{
    return reducer->layout.buffer_count;
}

size_t tddp_reducer_bucket_bytes(const tddp_reducer *reducer, size_t i)
{
    return i < reducer->layout.buffer_count ? reducer->layout.buffers[i].bytes : 0;
}

size_t tddp_reducer_bucket_of(const tddp_reducer *reducer, size_t index)
{
    return index < reducer->count ? reducer->layout.buffer_of[index] : TDDP_FLAT_NO_BUFFER;
}

size_t tddp_reducer_bucket_params(const tddp_reducer *reducer, size_t bucket, size_t *out,
                                  size_t room)
{
    if (bucket >= reducer->layout.buffer_count) {
        return 0;
    }
    const tddp_flat_buffer *of = &reducer->layout.buffers[bucket];
    for (size_t i = 0; i < of->slice_count && i < room; i++) {
        out[i] = of->slices[i].param;
    }
    return of->slice_count;
}

int tddp_reducer_rebuilt(const tddp_reducer *reducer)
{
    return reducer->rebuilt;
}

tddp_status tddp_reducer_failure(const tddp_reducer *reducer)
{
    return reducer->failure;
}

uint64_t tddp_reducer_rounds(const tddp_reducer *reducer)
{
    return reducer->finished;
}

size_t tddp_reducer_order(const tddp_reducer *reducer, size_t *out, size_t room)
{
    if (!reducer->last_order_valid) {
        return 0;
    }
    for (size_t k = 0; k < reducer->count && k < room; k++) {
        out[k] = (size_t)reducer->last_order[k];
    }
    return reducer->count;
}

void tddp_reducer_times_of(const tddp_reducer *reducer, tddp_reducer_times *out)
{
    *out = reducer->last_times;
}
