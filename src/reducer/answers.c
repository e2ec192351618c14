/*
 * What may be asked of a reducer, on the thread that runs forward: a layout is only ever replaced
 * whole, by that thread (rebuild.c), and so is what is kept of the round before, so nothing here
 * takes the lock.
 */
#include "reducer/reducer.h"

void *tddp_reducer_gradient(tddp_reducer *reducer, size_t index)
{
    return index < reducer->count ? reducer->layout.gradients[index] : NULL;
}

tddp_reducer_memory *tddp_reducer_memory_retain(tddp_reducer *reducer)
{
    tddp_reducer_memory_share(reducer->layout.memory);
    return reducer->layout.memory;
}

size_t tddp_reducer_bucket_count(const tddp_reducer *reducer)
{
    return reducer->layout.bucket_count;
}

size_t tddp_reducer_bucket_bytes(const tddp_reducer *reducer, size_t i)
{
    return i < reducer->layout.bucket_count ? reducer->layout.buckets[i].bytes : 0;
}

size_t tddp_reducer_bucket_of(const tddp_reducer *reducer, size_t index)
{
    return index < reducer->count ? reducer->layout.bucket_of[index] : TDDP_REDUCER_NO_BUCKET;
}

size_t tddp_reducer_bucket_params(const tddp_reducer *reducer, size_t bucket, size_t *out,
                                  size_t room)
{
    if (bucket >= reducer->layout.bucket_count) {
        return 0;
    }
    const tddp_reducer_bucket *of = &reducer->layout.buckets[bucket];
    for (size_t i = 0; i < of->params && i < room; i++) {
        out[i] = of->gradients[i].param;
    }
    return of->params;
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
    if (!reducer->order_seen) {
        return 0;
    }
    for (size_t k = 0; k < reducer->count && k < room; k++) {
        out[k] = (size_t)reducer->last_order[k];
    }
    return reducer->count;
}

void tddp_reducer_times_of(const tddp_reducer *reducer, tddp_reducer_times *out)
{
    *out = reducer->times;
}
