/*
 * A store inside this process, for threads and tests. One mutex, held for moments only, guards the
 * maps and the list of waiting calls; each waiting call has a notifier of its own, so that it can
 * wait for that, its deadline and its cancel token at once. A waiter is in the list exactly while
 * its call waits; each change of a value checks the condition of every waiter.
 */
#include <stdlib.h>

#include "net/net.h"
#include "store/queue.h"
#include "store/store_impl.h"
#include "store/values.h"
#include <poll.h>

typedef struct waiter waiter;

typedef struct hash_store {
    tddp_store base;
    pthread_mutex_t mutex;
    tddp_store_map values;
    tddp_store_map queues;
    waiter *waiters;
} hash_store;

/* What a call waits for. */
typedef struct wanted {
    bool (*there)(const hash_store *hash, const struct wanted *wanted);
    const tddp_slice *keys;
    size_t count;
    int world_size; /* of a barrier */
} wanted;

struct waiter {
    waiter *next;
    const wanted *wanted;
    bool found;         /* the condition held, at least for a moment */
    tddp_cancel *event; /* a cancel token, used as an event that can be polled: "found" */
};

static const char store_name[] = "hash store";

static hash_store *lock(tddp_store *store)
{
    hash_store *hash = (hash_store *)store;
    (void)pthread_mutex_lock(&hash->mutex);
    return hash;
}

static tddp_status unlock(hash_store *hash, tddp_status status)
{
    (void)pthread_mutex_unlock(&hash->mutex);
    return status;
}

/* After every change. A waiter that is woken may find the value gone again. */
static void wake_waiters(hash_store *hash)
{
    for (waiter *each = hash->waiters; each; each = each->next) {
        if (!each->found && each->wanted->there(hash, each->wanted)) {
            each->found = true;
            tddp_cancel_trigger(each->event);
        }
    }
}

static tddp_status unlock_changed(hash_store *hash, tddp_status status)
{
    if (status == TDDP_OK) {
        wake_waiters(hash);
    }
    return unlock(hash, status);
}

static bool keys_there(const hash_store *hash, const wanted *w)
{
    for (size_t i = 0; i < w->count; i++) {
        if (!tddp_store_map_find(&hash->values, w->keys[i]) &&
            !tddp_store_map_find(&hash->queues, w->keys[i])) {
            return false;
        }
    }
    return true;
}

/* Called with the mutex held, which is released while it waits for the condition. Sets no error
 * text. */
static tddp_status wait_locked(hash_store *hash, const wanted *w, const tddp_store_call *call)
{
    if (w->there(hash, w)) {
        return TDDP_OK;
    }
    waiter self = {.next = hash->waiters, .wanted = w};
    tddp_status status = tddp_cancel_create(&self.event);
    if (status) {
        return status;
    }
    hash->waiters = &self;
    (void)pthread_mutex_unlock(&hash->mutex);
    status = tddp_net_poll(tddp_cancel_fd(self.event), POLLIN, call->deadline_ns,
                           tddp_store_call_cancel_fd(call));
    (void)pthread_mutex_lock(&hash->mutex);
    waiter **link = &hash->waiters;
    while (*link != &self) {
        link = &(*link)->next;
    }
    *link = self.next;
    tddp_cancel_free(self.event);
    return self.found ? TDDP_OK : status;
}

static tddp_status wait_for_keys(hash_store *hash, const tddp_slice *keys, size_t count,
                                 const tddp_store_call *call)
{
    wanted w = {.there = keys_there, .keys = keys, .count = count};
    tddp_status status = wait_locked(hash, &w, call);
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        return tddp_store_fail_wait(status, keys, count, call, store_name);
    }
    return status;
}

static tddp_status copy_values(hash_store *hash, const tddp_slice *keys, size_t count,
                               tddp_blob *out)
{
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        /* A queue of that name has no value: it reads as empty, as from a server. */
        const tddp_store_entry *entry = tddp_store_map_find(&hash->values, keys[i]);
        tddp_slice value = entry ? tddp_store_entry_value(entry) : (tddp_slice){0};
        status = tddp_blob_copy(value, &out[i]);
    }
    return status;
}

static tddp_status hash_set(tddp_store *store, tddp_slice key, tddp_slice value,
                            const tddp_store_call *call)
{
    (void)call;
    hash_store *hash = lock(store);
    return unlock_changed(hash, tddp_store_values_set(&hash->values, key, value));
}

static tddp_status hash_multi_get(tddp_store *store, const tddp_slice *keys, size_t count,
                                  const tddp_store_call *call, tddp_blob *out)
{
    hash_store *hash = lock(store);
    tddp_status status;
    do {
        status = wait_for_keys(hash, keys, count, call);
    } while (status == TDDP_OK && !keys_there(hash, &(wanted){.keys = keys, .count = count}));
    return unlock(hash, status ? status : copy_values(hash, keys, count, out));
}

static tddp_status hash_get(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                            tddp_blob *out)
{
    return hash_multi_get(store, &key, 1, call, out);
}

static tddp_status hash_add(tddp_store *store, tddp_slice key, int64_t delta,
                            const tddp_store_call *call, int64_t *out)
{
    (void)call;
    hash_store *hash = lock(store);
    return unlock_changed(hash, tddp_store_values_add(&hash->values, key, delta, out));
}

static tddp_status hash_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                    tddp_slice desired, const tddp_store_call *call, tddp_blob *out)
{
    (void)call;
    hash_store *hash = lock(store);
    bool stored;
    tddp_blob copy = {0};
    tddp_slice answer = tddp_store_values_compare(&hash->values, key, expected, desired, &stored);
    tddp_status status = tddp_blob_copy(answer, &copy);
    if (status == TDDP_OK && stored) {
        status = tddp_store_values_set(&hash->values, key, desired);
    }
    if (status == TDDP_OK) {
        *out = copy;
    } else {
        tddp_blob_free(&copy);
    }
    return unlock_changed(hash, status);
}

static tddp_status hash_delete_key(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                   int *deleted)
{
    (void)call;
    hash_store *hash = lock(store);
    *deleted = tddp_store_values_delete(&hash->values, key);
    return unlock(hash, TDDP_OK);
}

static tddp_status hash_num_keys(tddp_store *store, const tddp_store_call *call, int64_t *out)
{
    (void)call;
    hash_store *hash = lock(store);
    *out = (int64_t)hash->values.count;
    return unlock(hash, TDDP_OK);
}

static tddp_status hash_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_store_call *call)
{
    hash_store *hash = lock(store);
    return unlock(hash, wait_for_keys(hash, keys, count, call));
}

static tddp_status hash_check(tddp_store *store, const tddp_slice *keys, size_t count,
                              const tddp_store_call *call, int *all_exist)
{
    (void)call;
    hash_store *hash = lock(store);
    *all_exist = keys_there(hash, &(wanted){.keys = keys, .count = count});
    return unlock(hash, TDDP_OK);
}

static tddp_status hash_append(tddp_store *store, tddp_slice key, tddp_slice value,
                               const tddp_store_call *call)
{
    (void)call;
    hash_store *hash = lock(store);
    return unlock_changed(hash, tddp_store_values_append(&hash->values, key, value));
}

static tddp_status hash_multi_set(tddp_store *store, const tddp_slice *keys,
                                  const tddp_slice *values, size_t count,
                                  const tddp_store_call *call)
{
    (void)call;
    hash_store *hash = lock(store);
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = tddp_store_values_set(&hash->values, keys[i], values[i]);
    }
    return unlock_changed(hash, status);
}

static tddp_status hash_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                   const tddp_store_call *call)
{
    (void)call;
    hash_store *hash = lock(store);
    return unlock_changed(hash, tddp_store_queues_push(&hash->queues, key, value));
}

static bool queue_there(const hash_store *hash, const wanted *w)
{
    return tddp_store_map_find(&hash->queues, w->keys[0]) != NULL;
}

static tddp_status hash_queue_pop(tddp_store *store, tddp_slice key, bool block,
                                  const tddp_store_call *call, tddp_blob *out)
{
    hash_store *hash = lock(store);
    wanted w = {.there = queue_there, .keys = &key};
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && !tddp_store_queues_pop(&hash->queues, key, out)) {
        /* Another waiter may have taken it first. */
        status = block ? wait_locked(hash, &w, call) : TDDP_NOT_FOUND;
    }
    (void)unlock(hash, TDDP_OK);
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        return tddp_store_fail_wait(status, &key, 1, call, store_name);
    }
    return status;
}

static tddp_status hash_queue_len(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                  int64_t *out)
{
    (void)call;
    hash_store *hash = lock(store);
    *out = (int64_t)tddp_store_queues_length(&hash->queues, key);
    return unlock(hash, TDDP_OK);
}

static tddp_status hash_list_keys(tddp_store *store, const tddp_store_call *call,
                                  tddp_blob_list *out)
{
    (void)call;
    hash_store *hash = lock(store);
    tddp_status status = tddp_blob_list_make(hash->values.count, out);
    const tddp_store_entry *entry = NULL;
    for (size_t i = 0; i < out->count && status == TDDP_OK; i++) {
        entry = tddp_store_map_next(&hash->values, entry);
        status = tddp_blob_copy(tddp_store_entry_key(entry), &out->blobs[i]);
    }
    return unlock(hash, status);
}

static int64_t arrived_at(const hash_store *hash, tddp_slice key)
{
    int64_t arrived;
    return tddp_store_values_sum(&hash->values, key, 0, &arrived) ? -1 : arrived;
}

static bool all_arrived(const hash_store *hash, const wanted *w)
{
    return arrived_at(hash, w->keys[0]) >= w->world_size;
}

static tddp_status hash_barrier(tddp_store *store, tddp_slice key, int world_size,
                                const tddp_store_call *call)
{
    hash_store *hash = lock(store);
    int64_t arrived;
    tddp_status status = tddp_store_values_add(&hash->values, key, 1, &arrived);
    if (status) {
        return unlock(hash, status);
    }
    wake_waiters(hash);
    wanted w = {.there = all_arrived, .keys = &key, .world_size = world_size};
    status = wait_locked(hash, &w, call);
    arrived = arrived_at(hash, key);
    (void)unlock(hash, TDDP_OK);
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        return tddp_store_fail_barrier(status, key, arrived, world_size, call, store_name);
    }
    return status;
}

static bool hash_extended(const tddp_store *store)
{
    (void)store;
    return true;
}

static tddp_status hash_clone(tddp_store *store, const tddp_store_call *call, tddp_store **out)
{
    (void)call;
    *out = tddp_store_retain(store);
    return TDDP_OK;
}

static void hash_destroy(tddp_store *store)
{
    hash_store *hash = (hash_store *)store;
    tddp_store_map_clear(&hash->values);
    tddp_store_queues_clear(&hash->queues);
    (void)pthread_mutex_destroy(&hash->mutex);
    free(hash);
}

static const tddp_store_ops hash_ops = {
    .set = hash_set,
    .get = hash_get,
    .add = hash_add,
    .compare_set = hash_compare_set,
    .delete_key = hash_delete_key,
    .num_keys = hash_num_keys,
    .wait = hash_wait,
    .check = hash_check,
    .append = hash_append,
    .multi_get = hash_multi_get,
    .multi_set = hash_multi_set,
    .queue_push = hash_queue_push,
    .queue_pop = hash_queue_pop,
    .queue_len = hash_queue_len,
    .list_keys = hash_list_keys,
    .barrier = hash_barrier,
    .extended = hash_extended,
    .clone = hash_clone,
    .destroy = hash_destroy,
};

tddp_status tddp_hash_store_create(int64_t timeout_ms, tddp_store **out)
{
    if (!out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the result is NULL");
    }
    hash_store *hash = tddp_alloc(sizeof *hash);
    if (!hash) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store_init(&hash->base, &hash_ops, timeout_ms);
    (void)pthread_mutex_init(&hash->mutex, NULL);
    *out = &hash->base;
    return TDDP_OK;
}
