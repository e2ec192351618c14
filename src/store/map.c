/*
 * The hash table: chains in a power of two of buckets, doubled when there are as many entries as
 * buckets. One thread at a time. An allocation that fails leaves the table as it was.
 */
#include <stdlib.h>
#include <string.h>

#include "store/map.h"

enum { FIRST_BUCKETS = 16 };

/* Keyed, since others choose the keys. */
static uint64_t hash_of(tddp_slice key)
{
    return tddp_hash(key.data, key.size);
}

static tddp_store_entry **bucket_of(const tddp_store_map *map, uint64_t hash)
{
    return &map->buckets[hash & (map->bucket_count - 1)];
}

static tddp_store_entry *find(const tddp_store_map *map, tddp_slice key, uint64_t hash)
{
    if (map->bucket_count == 0) {
        return NULL;
    }
    tddp_store_entry *entry = *bucket_of(map, hash);
    while (entry && !(entry->hash == hash && entry->key_size == key.size &&
                      memcmp(entry->key, key.data, key.size) == 0)) {
        entry = entry->next;
    }
    return entry;
}

tddp_store_entry *tddp_store_map_find(const tddp_store_map *map, tddp_slice key)
{
    return find(map, key, hash_of(key));
}

static tddp_status grow(tddp_store_map *map)
{
    tddp_store_map bigger = {.bucket_count =
                                 map->bucket_count ? map->bucket_count * 2 : FIRST_BUCKETS,
                             .count = map->count,
                             .bytes = map->bytes};
    bigger.buckets = tddp_alloc_array(bigger.bucket_count, sizeof(tddp_store_entry *));
    if (!bigger.buckets) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < map->bucket_count; i++) {
        for (tddp_store_entry *entry = map->buckets[i], *next; entry; entry = next) {
            next = entry->next;
            tddp_store_entry **bucket = bucket_of(&bigger, entry->hash);
            entry->next = *bucket;
            *bucket = entry;
        }
    }
    free(map->buckets);
    *map = bigger;
    return TDDP_OK;
}

tddp_status tddp_store_map_obtain(tddp_store_map *map, tddp_slice key, tddp_store_entry **out)
{
    uint64_t hash = hash_of(key);
    tddp_store_entry *entry = find(map, key, hash);
    if (entry) {
        *out = entry;
        return TDDP_OK;
    }
    if (map->count >= map->bucket_count) {
        tddp_status status = grow(map);
        if (status) {
            return status;
        }
    }
    entry = tddp_alloc(sizeof *entry + key.size);
    if (!entry) {
        return TDDP_OUT_OF_MEMORY;
    }
    entry->hash = hash;
    entry->key_size = key.size;
    memcpy(entry->key, key.data, key.size);
    tddp_store_entry **bucket = bucket_of(map, hash);
    entry->next = *bucket;
    *bucket = entry;
    map->count++;
    map->bytes += TDDP_STORE_ENTRY_BYTES + key.size;
    *out = entry;
    return TDDP_OK;
}

static void entry_free(tddp_store_entry *entry)
{
    tddp_bytes_free(&entry->value);
    free(entry);
}

void tddp_store_map_remove(tddp_store_map *map, tddp_store_entry *entry)
{
    tddp_store_entry **link = bucket_of(map, entry->hash);
    while (*link != entry) {
        link = &(*link)->next;
    }
    *link = entry->next;
    map->count--;
    map->bytes -= TDDP_STORE_ENTRY_BYTES + entry->key_size + entry->value.capacity;
    entry_free(entry);
}

void tddp_store_map_clear(tddp_store_map *map)
{
    for (size_t i = 0; i < map->bucket_count; i++) {
        for (tddp_store_entry *entry = map->buckets[i], *next; entry; entry = next) {
            next = entry->next;
            entry_free(entry);
        }
    }
    free(map->buckets);
    *map = (tddp_store_map){0};
}

tddp_store_entry *tddp_store_map_next(const tddp_store_map *map, const tddp_store_entry *before)
{
    if (before && before->next) {
        return before->next;
    }
    size_t i = before ? (before->hash & (map->bucket_count - 1)) + 1 : 0;
    while (i < map->bucket_count && !map->buckets[i]) {
        i++;
    }
    return i < map->bucket_count ? map->buckets[i] : NULL;
}
