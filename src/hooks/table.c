/*
 * Memory that a hook keeps for each bucket, by the bucket's index. A reducer calls a hook from one
 * thread at a time. Invariant: what is found belongs to this layout, this size and dtype of the
 * bucket and this many ranks; all else was freed when the first bucket of the new kind came.
 */
#include <stdlib.h>

#include "hooks/hooks.h"

struct tddp_hooks_entry {
    void *memory; /* NULL: not entered yet */
    size_t count;
    tddp_dtype dtype;
    int ranks;
};

void tddp_hooks_clear(tddp_hooks_table *table, void (*release)(void *memory))
{
    for (size_t i = 0; i < table->count; i++) {
        if (table->entries[i].memory) {
            release(table->entries[i].memory);
        }
    }
    free(table->entries);
    *table = (tddp_hooks_table){0};
}

static tddp_status check_index(const tddp_bucket *bucket, size_t count)
{
    return bucket->index < count
               ? TDDP_OK
               : tddp_fail(TDDP_INVALID_ARGUMENT, "bucket number %zu: expected less than %zu",
                           bucket->index, count);
}

tddp_status tddp_hooks_enter(tddp_hooks_table *table, tddp_group *group, const tddp_bucket *bucket,
                             tddp_hooks_maker make, void (*release)(void *memory), void *state,
                             void **out)
{
    tddp_status status = check_index(bucket, bucket->count);
    if (status != TDDP_OK) {
        return status;
    }
    if (table->layout != bucket->layout || table->count != bucket->count) {
        tddp_hooks_clear(table, release);
        table->entries = tddp_alloc_array(bucket->count, sizeof *table->entries);
        if (!table->entries) {
            return TDDP_OUT_OF_MEMORY;
        }
        table->count = bucket->count;
        table->layout = bucket->layout;
    }
    struct tddp_hooks_entry *entry = &table->entries[bucket->index];
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

tddp_status tddp_hooks_entered(const tddp_hooks_table *table, const tddp_bucket *bucket, void **out)
{
    tddp_status status = check_index(bucket, table->count);
    if (status == TDDP_OK && !table->entries[bucket->index].memory) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "bucket number %zu: stage 0 comes first",
                           bucket->index);
    }
    if (status == TDDP_OK) {
        *out = table->entries[bucket->index].memory;
    }
    return status;
}
