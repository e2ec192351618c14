/*
 * The public functions of every store: they check arguments, compute the deadline, and call the
 * implementation's table. Any thread; the only state here is the reference count. The
 * implementations are tcp/, file/, hash.c and prefix.c.
 */
#include <stdlib.h>
#include <string.h>

#include "store/store_impl.h"

void tddp_blob_free(tddp_blob *blob)
{
    if (blob) {
        free(blob->data);
        *blob = (tddp_blob){0};
    }
}

tddp_status tddp_blob_copy(tddp_slice bytes, tddp_blob *out)
{
    char *data = tddp_alloc(bytes.size + 1);
    if (!data) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (bytes.size) {
        memcpy(data, bytes.data, bytes.size);
    }
    *out = (tddp_blob){data, bytes.size};
    return TDDP_OK;
}

void tddp_blob_list_free(tddp_blob_list *list)
{
    if (list) {
        for (size_t i = 0; i < list->count; i++) {
            tddp_blob_free(&list->blobs[i]);
        }
        free(list->blobs);
        *list = (tddp_blob_list){0};
    }
}

tddp_status tddp_blob_list_make(size_t count, tddp_blob_list *out)
{
    tddp_blob *blobs = tddp_alloc_array(count ? count : 1, sizeof *blobs);
    if (!blobs) {
        return TDDP_OUT_OF_MEMORY;
    }
    *out = (tddp_blob_list){blobs, count};
    return TDDP_OK;
}

void tddp_store_init(tddp_store *store, const tddp_store_ops *ops, int64_t timeout_ms)
{
    store->ops = ops;
    atomic_init(&store->references, 1);
    atomic_init(&store->timeout_ms, timeout_ms > 0 ? timeout_ms : TDDP_STORE_DEFAULT_TIMEOUT_MS);
}

tddp_store_call tddp_store_call_begin(const tddp_wait *wait, int64_t default_ms)
{
    return (tddp_store_call){
        .deadline_ns = tddp_wait_deadline(wait, default_ms),
        .timeout_ms = wait && wait->timeout_ms >= 0 ? wait->timeout_ms : default_ms,
        .cancel = tddp_wait_cancel(wait),
    };
}

tddp_store *tddp_store_retain(tddp_store *store)
{
    if (store) {
        atomic_fetch_add(&store->references, 1);
    }
    return store;
}

void tddp_store_release(tddp_store *store)
{
    if (store && atomic_fetch_sub(&store->references, 1) == 1) {
        store->ops->destroy(store);
    }
}

int64_t tddp_store_timeout(const tddp_store *store)
{
    while (store->under) {
        store = store->under;
    }
    return atomic_load(&store->timeout_ms);
}

tddp_status tddp_store_set_timeout(tddp_store *store, int64_t timeout_ms)
{
    if (!store || timeout_ms <= 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         store ? "timeout %lld ms: expected more than 0"
                               : "the store is NULL (timeout %lld ms)",
                         (long long)timeout_ms);
    }
    while (store->under) {
        store = store->under;
    }
    atomic_store(&store->timeout_ms, timeout_ms);
    return TDDP_OK;
}

static tddp_status begin(const tddp_store *store, const void *out, const tddp_wait *wait,
                         tddp_store_call *call)
{
    if (!store || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the %s is NULL", store ? "result" : "store");
    }
    if (wait && wait->cancel && tddp_cancel_triggered(wait->cancel)) {
        return tddp_fail(TDDP_CANCELED, "interrupted before the request was sent");
    }
    *call = tddp_store_call_begin(wait, tddp_store_timeout(store));
    return TDDP_OK;
}

static tddp_status check_values(const tddp_slice *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!values[i].data && values[i].size) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "value %zu is NULL, its size %zu", i,
                             values[i].size);
        }
    }
    return TDDP_OK;
}

static tddp_status check_keys(const tddp_slice *keys, size_t count)
{
    if (!keys && count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the list of %zu keys is NULL", count);
    }
    for (size_t i = 0; i < count; i++) {
        if (!keys[i].data || keys[i].size == 0) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "key %zu is empty", i);
        }
    }
    return TDDP_OK;
}

#define BEGIN(out, keys, count)                                \
    tddp_store_call call;                                      \
    tddp_status status = check_keys(keys, count);              \
    status = status ? status : begin(store, out, wait, &call); \
    if (status) {                                              \
        return status;                                         \
    }

tddp_status tddp_store_set(tddp_store *store, tddp_slice key, tddp_slice value,
                           const tddp_wait *wait)
{
    BEGIN(&key, &key, 1);
    status = check_values(&value, 1);
    return status ? status : store->ops->set(store, key, value, &call);
}

tddp_status tddp_store_get(tddp_store *store, tddp_slice key, const tddp_wait *wait, tddp_blob *out)
{
    BEGIN(out, &key, 1);
    return store->ops->get(store, key, &call, out);
}

tddp_status tddp_store_add(tddp_store *store, tddp_slice key, int64_t delta, const tddp_wait *wait,
                           int64_t *out)
{
    BEGIN(out, &key, 1);
    return store->ops->add(store, key, delta, &call, out);
}

tddp_status tddp_store_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                   tddp_slice desired, const tddp_wait *wait, tddp_blob *out)
{
    BEGIN(out, &key, 1);
    tddp_slice values[] = {expected, desired};
    status = check_values(values, 2);
    return status ? status : store->ops->compare_set(store, key, expected, desired, &call, out);
}

tddp_status tddp_store_delete_key(tddp_store *store, tddp_slice key, const tddp_wait *wait,
                                  int *deleted)
{
    BEGIN(deleted, &key, 1);
    return store->ops->delete_key(store, key, &call, deleted);
}

tddp_status tddp_store_num_keys(tddp_store *store, const tddp_wait *wait, int64_t *out)
{
    BEGIN(out, NULL, 0);
    return store->ops->num_keys(store, &call, out);
}

tddp_status tddp_store_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                            const tddp_wait *wait)
{
    BEGIN(&store, keys, count);
    return count ? store->ops->wait(store, keys, count, &call) : TDDP_OK;
}

tddp_status tddp_store_check(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_wait *wait, int *all_exist)
{
    BEGIN(all_exist, keys, count);
    return store->ops->check(store, keys, count, &call, all_exist);
}

tddp_status tddp_store_append(tddp_store *store, tddp_slice key, tddp_slice value,
                              const tddp_wait *wait)
{
    BEGIN(&key, &key, 1);
    status = check_values(&value, 1);
    return status ? status : store->ops->append(store, key, value, &call);
}

tddp_status tddp_store_multi_get(tddp_store *store, const tddp_slice *keys, size_t count,
                                 const tddp_wait *wait, tddp_blob *out)
{
    BEGIN(count ? (const void *)out : &store, keys, count);
    if (count == 0) {
        return TDDP_OK;
    }
    tddp_blob *blobs = tddp_alloc_array(count, sizeof *blobs);
    if (!blobs) {
        return TDDP_OUT_OF_MEMORY;
    }
    status = store->ops->multi_get(store, keys, count, &call, blobs);
    for (size_t i = 0; i < count; i++) {
        if (status) {
            tddp_blob_free(&blobs[i]);
        } else {
            out[i] = blobs[i];
        }
    }
    free(blobs);
    return status;
}

tddp_status tddp_store_multi_set(tddp_store *store, const tddp_slice *keys,
                                 const tddp_slice *values, size_t count, const tddp_wait *wait)
{
    BEGIN(count ? (const void *)values : &store, keys, count);
    status = check_values(values, count);
    if (status || count == 0) {
        return status;
    }
    return store->ops->multi_set(store, keys, values, count, &call);
}

int tddp_store_has_extended_api(const tddp_store *store)
{
    while (store && store->under) {
        store = store->under;
    }
    return store && store->ops->extended(store);
}

tddp_status tddp_store_list_keys(tddp_store *store, const tddp_wait *wait, tddp_blob_list *out)
{
    BEGIN(out, NULL, 0);
    tddp_blob_list list = {0};
    status = store->ops->list_keys(store, &call, &list);
    if (status) {
        tddp_blob_list_free(&list);
    } else {
        *out = list;
    }
    return status;
}

tddp_status tddp_store_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                  const tddp_wait *wait)
{
    BEGIN(&key, &key, 1);
    status = check_values(&value, 1);
    return status ? status : store->ops->queue_push(store, key, value, &call);
}

tddp_status tddp_store_queue_pop(tddp_store *store, tddp_slice key, int block,
                                 const tddp_wait *wait, tddp_blob *out)
{
    BEGIN(out, &key, 1);
    status = store->ops->queue_pop(store, key, block != 0, &call, out);
    if (status == TDDP_NOT_FOUND) {
        char text[TDDP_STORE_KEYS_TEXT_BYTES];
        return tddp_fail(status, "the queue %s is empty, and the pop was not to wait",
                         tddp_store_keys_text(&key, 1, text));
    }
    return status;
}

tddp_status tddp_store_queue_len(tddp_store *store, tddp_slice key, const tddp_wait *wait,
                                 int64_t *out)
{
    BEGIN(out, &key, 1);
    return store->ops->queue_len(store, key, &call, out);
}

tddp_status tddp_store_barrier(tddp_store *store, tddp_slice key, int world_size,
                               const tddp_wait *wait)
{
    BEGIN(&key, &key, 1);
    if (world_size < 1) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "barrier: world size %d, expected 1 or more",
                         world_size);
    }
    return store->ops->barrier(store, key, world_size, &call);
}

tddp_status tddp_store_await_clients(tddp_store *store, const tddp_slice *keys, size_t count,
                                     const tddp_wait *wait)
{
    BEGIN(&store, keys, count);
    return store->ops->await_clients ? store->ops->await_clients(store, keys, count, &call)
                                     : TDDP_OK;
}

tddp_status tddp_store_clone(tddp_store *store, const tddp_wait *wait, tddp_store **out)
{
    BEGIN(out, NULL, 0);
    return store->ops->clone(store, &call, out);
}
