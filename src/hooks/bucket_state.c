/*
 * A hook's state per bucket, by the bucket's index. A reducer calls a hook from one thread at a
 * time. Invariant: a state belongs to the current layout, and to the bucket's current size, dtype
 * and number of ranks; others are freed when such a bucket is first seen.
 */
#include <stdlib.h>

#include "hooks/hooks.h"

struct tddp_hooks_state {
    void *memory; /* NULL: none yet */
    size_t count;
    tddp_dtype dtype;
    int ranks;
};

void tddp_hooks_free_states(tddp_hooks_states *states, void (*release)(void *memory))
{
    for (size_t i = 0; i < states->count; i++) {
        if (states->entries[i].memory) {
            release(states->entries[i].memory);
        }
    }
    free(states->entries);
    *states = (tddp_hooks_states){0};
}

static tddp_status check_index(const tddp_bucket *bucket, size_t count)
{
    return bucket->index < count
               ? TDDP_OK
               : tddp_fail(TDDP_INVALID_ARGUMENT, "bucket number %zu: expected less than %zu",
                           bucket->index, count);
}

tddp_status tddp_hooks_require_state(tddp_hooks_states *states, tddp_group *group,
                                     const tddp_bucket *bucket, tddp_hooks_make_state make,
                                     void (*release)(void *memory), void *state, void **out)
{
    tddp_status status = check_index(bucket, bucket->count);
    if (status != TDDP_OK) {
        return status;
    }
    if (states->layout != bucket->layout || states->count != bucket->count) {
        tddp_hooks_free_states(states, release);
        states->entries = tddp_alloc_array(bucket->count, sizeof *states->entries);
        if (!states->entries) {
            return TDDP_OUT_OF_MEMORY;
        }
        states->count = bucket->count;
        states->layout = bucket->layout;
    }
    struct tddp_hooks_state *entry = &states->entries[bucket->index];
    int ranks = tddp_group_world_size(group);
    if (entry->memory && (entry->count != bucket->buffer.count ||
                          entry->dtype != bucket->buffer.dtype || entry->ranks != ranks)) {
        release(entry->memory);
        entry->memory = NULL;
    }
    if (!entry->memory) {
        status = make(state, group, bucket, &entry->memory);
        if (status != TDDP_OK) {
            return status;
        }
        entry->count = bucket->buffer.count;
        entry->dtype = bucket->buffer.dtype;
        entry->ranks = ranks;
    }
    *out = entry->memory;
    return TDDP_OK;
}

tddp_status tddp_hooks_find_state(const tddp_hooks_states *states, const tddp_bucket *bucket,
                                  void **out)
{
    tddp_status status = check_index(bucket, states->count);
    if (status == TDDP_OK && !states->entries[bucket->index].memory) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "bucket number %zu: expected stage 0 first",
                           bucket->index);
    }
    if (status == TDDP_OK) {
        *out = states->entries[bucket->index].memory;
    }
    return status;
}
