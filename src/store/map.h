/*
 * A hash table from byte strings to bytes and a pointer. Entries never move, so they may be pointed
 * at until they are removed. Not for several threads at once.
 */
#ifndef TDDP_STORE_MAP_H
#define TDDP_STORE_MAP_H

#include <string.h>

#include "base/base.h"
#include <tddp/store.h>

typedef struct tddp_store_entry {
    struct tddp_store_entry *next; /* in its bucket */
    uint64_t hash;
    tddp_bytes value; /* freed with the entry */
    void *data;       /* the user's own */
    size_t key_size;
    char key[];
} tddp_store_entry;

static inline bool tddp_slices_equal(tddp_slice a, tddp_slice b)
{
    return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

/* All zero is an empty one. */
typedef struct tddp_store_map {
    tddp_store_entry **buckets;
    size_t bucket_count; /* a power of two, or 0 */
    size_t count;
    uint64_t bytes; /* of keys, values and TDDP_STORE_ENTRY_BYTES for each entry */
} tddp_store_map;

/* What an entry costs beside its key and value: its fields, its place in the table, the allocator's
 * own. */
enum { TDDP_STORE_ENTRY_BYTES = 88 };

tddp_store_entry *tddp_store_map_find(const tddp_store_map *map, tddp_slice key);

/* Finds or makes an entry with no value. */
TDDP_NODISCARD tddp_status tddp_store_map_obtain(tddp_store_map *map, tddp_slice key,
                                                 tddp_store_entry **out);

/* Call after changing an entry's value, with its capacity before. */
static inline void tddp_store_map_count(tddp_store_map *map, const tddp_store_entry *entry,
                                        size_t capacity_before)
{
    map->bytes += entry->value.capacity - capacity_before;
}

void tddp_store_map_remove(tddp_store_map *map, tddp_store_entry *entry);
void tddp_store_map_clear(tddp_store_map *map);

/* Walks the entries in no order: NULL first, then the entry before; NULL at the end. */
tddp_store_entry *tddp_store_map_next(const tddp_store_map *map, const tddp_store_entry *before);

static inline tddp_slice tddp_store_entry_key(const tddp_store_entry *entry)
{
    return (tddp_slice){entry->key, entry->key_size};
}

static inline tddp_slice tddp_store_entry_value(const tddp_store_entry *entry)
{
    return (tddp_slice){entry->value.data, entry->value.size};
}

#endif
