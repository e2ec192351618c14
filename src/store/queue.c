/*
 * A queue is a list of blobs with pointers to both ends and a length, so that pushing and popping
 * take constant time. One thread at a time. Invariant: the map has an entry exactly
 * while its queue is not empty.
 */
#include <stdlib.h>

#include "store/queue.h"
#include "store/store_impl.h"

typedef struct item {
    struct item *next;
    tddp_blob value;
} item;

/* What a value costs beside its bytes: an item, and what the allocator adds to both. */
enum { ITEM_BYTES = 64 };

typedef struct queue {
    item *first;
    item *last;
    uint64_t length;
} queue;

static queue *find(const tddp_store_map *queues, tddp_slice key)
{
    const tddp_store_entry *entry = tddp_store_map_find(queues, key);
    return entry ? entry->data : NULL;
}

static tddp_status obtain(tddp_store_map *queues, tddp_slice key, queue **out)
{
    tddp_store_entry *entry;
    queue *found = find(queues, key);
    if (found) {
        *out = found;
        return TDDP_OK;
    }
    queue *made = tddp_alloc(sizeof *made);
    tddp_status status = made ? tddp_store_map_obtain(queues, key, &entry) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(made);
        return status;
    }
    entry->data = made;
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_store_queues_push(tddp_store_map *queues, tddp_slice key, tddp_slice value)
{
    queue *to = NULL;
    item *fresh = tddp_alloc(sizeof *fresh);
    tddp_status status = fresh ? tddp_blob_copy(value, &fresh->value) : TDDP_OUT_OF_MEMORY;
    status = status ? status : obtain(queues, key, &to);
    if (status) {
        if (fresh) {
            tddp_blob_free(&fresh->value);
        }
        free(fresh);
        return status;
    }
    if (to->last) {
        to->last->next = fresh;
    } else {
        to->first = fresh;
    }
    to->last = fresh;
    to->length++;
    queues->bytes += ITEM_BYTES + value.size;
    return TDDP_OK;
}

static void remove_entry(tddp_store_map *queues, tddp_store_entry *entry)
{
    free(entry->data);
    tddp_store_map_remove(queues, entry);
}

bool tddp_store_queues_first(const tddp_store_map *queues, tddp_slice key, tddp_slice *out)
{
    const queue *found = find(queues, key);
    if (found) {
        *out = (tddp_slice){found->first->value.data, found->first->value.size};
    }
    return found;
}

bool tddp_store_queues_pop(tddp_store_map *queues, tddp_slice key, tddp_blob *out)
{
    tddp_store_entry *entry = tddp_store_map_find(queues, key);
    if (!entry) {
        return false;
    }
    queue *from = entry->data;
    item *oldest = from->first;
    from->first = oldest->next;
    from->length--;
    queues->bytes -= ITEM_BYTES + oldest->value.size;
    *out = oldest->value;
    free(oldest);
    if (!from->first) {
        remove_entry(queues, entry);
    }
    return true;
}

uint64_t tddp_store_queues_length(const tddp_store_map *queues, tddp_slice key)
{
    const queue *found = find(queues, key);
    return found ? found->length : 0;
}

void tddp_store_queues_clear(tddp_store_map *queues)
{
    tddp_store_entry *entry = tddp_store_map_next(queues, NULL);
    while (entry) {
        tddp_store_entry *following = tddp_store_map_next(queues, entry);
        queue *old = entry->data;
        while (old->first) {
            item *next = old->first->next;
            tddp_blob_free(&old->first->value);
            free(old->first);
            old->first = next;
        }
        remove_entry(queues, entry);
        entry = following;
    }
    tddp_store_map_clear(queues);
}
