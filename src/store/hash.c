/*
 * A store inside this process, for threads and tests. One mutex, held for moments only, guards the
 * map and the list of waiting calls; each waiting call has a notifier of its own, so that it can
 * wait for that, its deadline and its cancel token at once. A waiter is in the list exactly while
 * its call runs.
 */
#include <stdlib.h>
#include <string.h>

#include "net/net.h"
#include "store/store_impl.h"
#include "store/values.h"
#include <poll.h>

typedef struct waiter {
    struct waiter *next;
    tddp_cancel *changed; /* a token is an event that can be polled: here "look again" */
} waiter;

typedef struct hash_store {
    tddp_store base;
    pthread_mutex_t mutex;
    tddp_store_map values;
    waiter *waiters;
} hash_store;

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

static tddp_status unlock_changed(hash_store *hash, tddp_status status)
{
    for (waiter *each = hash->waiters; each && status == TDDP_OK; each = each->next) {
        tddp_cancel_trigger(each->changed);
    }
    return unlock(hash, status);
}

/* Holding the mutex, lets go of it until the keys are there. */
static tddp_status wait_locked(hash_store *hash, const tddp_slice *keys, size_t count,
                               const tddp_store_call *call)
{
    if (tddp_store_values_have(&hash->values, keys, count)) {
        return TDDP_OK;
    }
    waiter self = {.next = hash->waiters};
    tddp_status status = tddp_cancel_create(&self.changed);
    if (status) {
        return status;
    }
    hash->waiters = &self;
    while (!tddp_store_values_have(&hash->values, keys, count)) {
        (void)pthread_mutex_unlock(&hash->mutex);
        status = tddp_net_poll(tddp_cancel_fd(self.changed), POLLIN, call->deadline_ns,
                               tddp_store_call_cancel_fd(call));
        tddp_cancel_reset(self.changed);
        (void)pthread_mutex_lock(&hash->mutex);
        if (status) {
            break;
        }
    }
    waiter **link = &hash->waiters;
    while (*link != &self) {
        link = &(*link)->next;
    }
    *link = self.next;
    tddp_cancel_free(self.changed);
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        return tddp_store_fail_wait(status, keys, count, call, "hash store");
    }
    return status;
}

static tddp_status copy_values(hash_store *hash, const tddp_slice *keys, size_t count,
                               tddp_blob *out)
{
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        const tddp_store_entry *entry = tddp_store_map_find(&hash->values, keys[i]);
        status = tddp_blob_copy(tddp_store_entry_value(entry), &out[i]);
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
    tddp_status status = wait_locked(hash, keys, count, call);
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
    return unlock(hash, wait_locked(hash, keys, count, call));
}

static tddp_status hash_check(tddp_store *store, const tddp_slice *keys, size_t count,
                              const tddp_store_call *call, int *all_exist)
{
    (void)call;
    hash_store *hash = lock(store);
    *all_exist = tddp_store_values_have(&hash->values, keys, count);
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
