/*
 * A queue is a ring of items: `data` of its entry points to the youngest, whose next is the oldest.
 * One thread at a time. Invariant: the map has an entry exactly while its queue is not empty.
 */
#include <stdlib.h>
#include <string.h>

#include "store/queue.h"

typedef struct item {
    struct item *next;
    uint64_t number; /* each is one more than that of the item before */
    size_t size;
    char bytes[];
} item;

/* What a value costs beside its bytes: an item, and what the allocator adds. */
enum { ITEM_BYTES = sizeof(item) + 16 };

static item *youngest(const tddp_store_map *queues, tddp_slice key)
{
    const tddp_store_entry *entry = tddp_store_map_find(queues, key);
    return entry ? entry->data : NULL;
}

tddp_status tddp_store_queues_push(tddp_store_map *queues, tddp_slice key, tddp_slice value)
{
    tddp_store_entry *entry;
    item *fresh = tddp_alloc(sizeof *fresh + value.size);
    tddp_status status = fresh ? tddp_store_map_obtain(queues, key, &entry) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(fresh);
        return status;
    }
    item *last = entry->data;
    fresh->size = value.size;
    if (value.size) {
        memcpy(fresh->bytes, value.data, value.size);
    }
    fresh->number = last ? last->number + 1 : 0;
    fresh->next = last ? last->next : fresh;
    if (last) {
        last->next = fresh;
    }
    entry->data = fresh;
    queues->bytes += ITEM_BYTES + value.size;
    return TDDP_OK;
}

bool tddp_store_queues_first(const tddp_store_map *queues, tddp_slice key, tddp_slice *out)
{
    const item *last = youngest(queues, key);
    if (last) {
        *out = (tddp_slice){last->next->bytes, last->next->size};
    }
    return last;
}

static void drop_first(tddp_store_map *queues, tddp_store_entry *entry)
{
    item *last = entry->data;
    item *first = last->next;
    last->next = first->next;
    queues->bytes -= ITEM_BYTES + first->size;
    if (first == last) {
        tddp_store_map_remove(queues, entry);
    }
    free(first);
}

void tddp_store_queues_drop(tddp_store_map *queues, tddp_slice key)
{
    drop_first(queues, tddp_store_map_find(queues, key));
}

uint64_t tddp_store_queues_length(const tddp_store_map *queues, tddp_slice key)
{
    const item *last = youngest(queues, key);
    return last ? last->number - last->next->number + 1 : 0;
}

void tddp_store_queues_clear(tddp_store_map *queues)
{
    while (queues->count) {
        drop_first(queues, tddp_store_map_next(queues, NULL));
    }
    tddp_store_map_clear(queues);
}
