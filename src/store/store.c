/*
 * The public functions of every store: they check arguments, compute the deadline and the keys as
 * they are kept, and call the implementation's table. Any thread; the only state here is the
 * reference count. The implementations are tcp/ and local/; prefix.c has views of them.
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

tddp_status tddp_blob_list_grow(tddp_blob_list *list)
{
    tddp_blob *blobs = tddp_grow(list->blobs, list->count, sizeof *blobs);
    if (!blobs) {
        return TDDP_OUT_OF_MEMORY;
    }
    list->blobs = blobs;
    return TDDP_OK;
}

tddp_status tddp_blob_list_add(tddp_blob_list *list, tddp_slice bytes)
{
    tddp_status status = tddp_blob_list_grow(list);
    status = status ? status : tddp_blob_copy(bytes, &list->blobs[list->count]);
    list->count += status == TDDP_OK;
    return status;
}

void tddp_store_entries_free(tddp_store_entries *entries)
{
    if (entries) {
        tddp_blob_list_free(&entries->keys);
        tddp_blob_list_free(&entries->values);
    }
}

void tddp_store_init(tddp_store *store, const tddp_store_ops *ops, const char *name,
                     int64_t timeout_ms)
{
    store->ops = ops;
    store->name = name;
    store->prefix = (tddp_slice){"/", 1};
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
        if (!store->under) {
            store->ops->destroy(store);
            return;
        }
        tddp_store_release(store->under);
        free((char *)(uintptr_t)store->prefix.data);
        free(store);
    }
}

int64_t tddp_store_timeout(const tddp_store *store)
{
    return atomic_load(&tddp_store_base(store)->timeout_ms);
}

tddp_status tddp_store_set_timeout(tddp_store *store, int64_t timeout_ms)
{
    if (!store || timeout_ms <= 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         store ? "timeout %lld ms: expected more than 0"
                               : "the store is NULL (timeout %lld ms)",
                         (long long)timeout_ms);
    }
    atomic_store(&tddp_store_base(store)->timeout_ms, timeout_ms);
    return TDDP_OK;
}

/* One call: the store that carries it out, its keys as they are kept, and its time. */
typedef struct operation {
    tddp_store *base;
    const tddp_store_ops *ops;
    tddp_slice *keys;
    tddp_store_call call;
} operation;

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

static tddp_status begin(tddp_store *store, const void *out, const tddp_slice *keys, size_t count,
                         const tddp_wait *wait, operation *op)
{
    if (!store || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the %s is NULL", store ? "result" : "store");
    }
    if (wait && wait->cancel && tddp_cancel_triggered(wait->cancel)) {
        return tddp_fail(TDDP_CANCELED, "interrupted before the request was sent");
    }
    op->base = tddp_store_base(store);
    op->ops = store->ops;
    op->call = tddp_store_call_begin(wait, tddp_store_timeout(store));
    op->keys = NULL;
    return count ? tddp_store_kept_keys(store, keys, count, &op->keys) : TDDP_OK;
}

static tddp_status end(operation *op, tddp_status status)
{
    free(op->keys);
    return status;
}

/* How every function begins; `values` are checked too. `op` is there, and end() frees it. */
#define BEGIN(out, keys, count, values, value_count)                      \
    operation op;                                                         \
    tddp_status status = check_keys(keys, count);                         \
    status = status ? status : check_values(values, value_count);         \
    status = status ? status : begin(store, out, keys, count, wait, &op); \
    if (status) {                                                         \
        return status;                                                    \
    }

static tddp_status fail_unsupported(const operation *op, const char *what)
{
    return tddp_fail(TDDP_UNSUPPORTED, "a %s has no %s", op->base->name, what);
}

tddp_status tddp_store_multi_set(tddp_store *store, const tddp_slice *keys,
                                 const tddp_slice *values, size_t count, const tddp_wait *wait)
{
    if (count && !values) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the list of %zu values is NULL", count);
    }
    BEGIN(&store, keys, count, values, count);
    return end(&op, count ? op.ops->set(op.base, op.keys, values, count, &op.call) : TDDP_OK);
}

tddp_status tddp_store_set(tddp_store *store, tddp_slice key, tddp_slice value,
                           const tddp_wait *wait)
{
    return tddp_store_multi_set(store, &key, &value, 1, wait);
}

tddp_status tddp_store_multi_get(tddp_store *store, const tddp_slice *keys, size_t count,
                                 const tddp_wait *wait, tddp_blob *out)
{
    BEGIN(count ? (const void *)out : &store, keys, count, NULL, 0);
    if (count == 0) {
        return TDDP_OK;
    }
    tddp_blob_list got = {tddp_alloc_array(count, sizeof *got.blobs), count};
    if (!got.blobs) {
        return end(&op, TDDP_OUT_OF_MEMORY);
    }
    status = op.ops->get(op.base, op.keys, count, &op.call, got.blobs);
    if (status) {
        tddp_blob_list_free(&got);
        return end(&op, status);
    }
    memcpy(out, got.blobs, count * sizeof *out);
    free(got.blobs);
    return end(&op, TDDP_OK);
}

tddp_status tddp_store_get(tddp_store *store, tddp_slice key, const tddp_wait *wait, tddp_blob *out)
{
    return tddp_store_multi_get(store, &key, 1, wait, out);
}

tddp_status tddp_store_add(tddp_store *store, tddp_slice key, int64_t delta, const tddp_wait *wait,
                           int64_t *out)
{
    BEGIN(out, &key, 1, NULL, 0);
    return end(&op, op.ops->add(op.base, op.keys[0], delta, &op.call, out));
}

tddp_status tddp_store_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                   tddp_slice desired, const tddp_wait *wait, tddp_blob *out)
{
    tddp_slice values[] = {expected, desired};
    BEGIN(out, &key, 1, values, 2);
    return end(&op, op.ops->compare_set(op.base, op.keys[0], expected, desired, &op.call, out));
}

tddp_status tddp_store_delete_key(tddp_store *store, tddp_slice key, const tddp_wait *wait,
                                  int *deleted)
{
    BEGIN(deleted, &key, 1, NULL, 0);
    return end(&op, op.ops->delete_key(op.base, op.keys[0], &op.call, deleted));
}

tddp_status tddp_store_num_keys(tddp_store *store, const tddp_wait *wait, int64_t *out)
{
    BEGIN(out, NULL, 0, NULL, 0);
    return op.ops->num_keys(op.base, &op.call, out);
}

tddp_status tddp_store_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                            const tddp_wait *wait)
{
    BEGIN(&store, keys, count, NULL, 0);
    return end(&op, count ? op.ops->wait(op.base, op.keys, count, &op.call) : TDDP_OK);
}

tddp_status tddp_store_check(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_wait *wait, int *all_exist)
{
    BEGIN(all_exist, keys, count, NULL, 0);
    return end(&op, op.ops->check(op.base, op.keys, count, &op.call, all_exist));
}

tddp_status tddp_store_append(tddp_store *store, tddp_slice key, tddp_slice value,
                              const tddp_wait *wait)
{
    BEGIN(&key, &key, 1, &value, 1);
    return end(&op, op.ops->append(op.base, op.keys[0], value, &op.call));
}

int tddp_store_has_extended_api(const tddp_store *store)
{
    return store && (!store->ops->extended || store->ops->extended(tddp_store_base(store)));
}

tddp_status tddp_store_list_keys(tddp_store *store, const tddp_wait *wait, tddp_blob_list *out)
{
    BEGIN(out, NULL, 0, NULL, 0);
    tddp_blob_list list = {0};
    status = op.ops->list_keys(op.base, &op.call, &list);
    if (status) {
        tddp_blob_list_free(&list);
        return status;
    }
    size_t kept = 0;
    for (size_t i = 0; i < list.count; i++) {
        tddp_blob key = list.blobs[i];
        if (tddp_store_strip(store, &key)) {
            list.blobs[kept++] = key;
        } else {
            tddp_blob_free(&key);
        }
    }
    list.count = kept;
    *out = list;
    return TDDP_OK;
}

tddp_status tddp_store_set_ephemeral(tddp_store *store, tddp_slice key, tddp_slice value,
                                     int64_t limit_ms, int if_absent, const tddp_wait *wait,
                                     int *set, tddp_blob *now)
{
    tddp_blob got = {0};
    BEGIN(set, &key, 1, &value, 1);
    if (limit_ms < 0) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "limit %lld ms: expected 0 or more",
                           (long long)limit_ms);
    } else if (!op.ops->set_ephemeral) {
        status = fail_unsupported(&op, "ephemeral keys");
    } else {
        status = op.ops->set_ephemeral(op.base, op.keys[0], value, limit_ms, if_absent != 0,
                                       &op.call, set, &got);
    }
    if (status || !now) {
        tddp_blob_free(&got);
    } else {
        *now = got;
    }
    return end(&op, status);
}

tddp_status tddp_store_watch(tddp_store *store, tddp_slice prefix, const tddp_wait *wait,
                             tddp_store_entries *out)
{
    BEGIN(out, NULL, 0, &prefix, 1);
    tddp_store_entries got = {0};
    status = tddp_store_kept_keys(store, &prefix, 1, &op.keys);
    if (status == TDDP_OK) {
        status = op.ops->watch ? op.ops->watch(op.base, op.keys[0], &op.call, &got)
                               : fail_unsupported(&op, "watches");
    }
    for (size_t i = 0; i < got.keys.count && status == TDDP_OK; i++) {
        (void)tddp_store_strip(store, &got.keys.blobs[i]);
    }
    if (status) {
        tddp_store_entries_free(&got);
    } else {
        *out = got;
    }
    return end(&op, status);
}

tddp_status tddp_store_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                  const tddp_wait *wait)
{
    BEGIN(&key, &key, 1, &value, 1);
    return end(&op, op.ops->queue_push ? op.ops->queue_push(op.base, op.keys[0], value, &op.call)
                                       : fail_unsupported(&op, "queues"));
}

tddp_status tddp_store_queue_pop(tddp_store *store, tddp_slice key, int block,
                                 const tddp_wait *wait, tddp_blob *out)
{
    BEGIN(out, &key, 1, NULL, 0);
    status = op.ops->queue_pop ? op.ops->queue_pop(op.base, op.keys[0], block != 0, &op.call, out)
                               : fail_unsupported(&op, "queues");
    if (status == TDDP_NOT_FOUND) {
        char text[TDDP_STORE_KEYS_TEXT_BYTES];
        status = tddp_fail(status, "the queue %s is empty, and the pop was not to wait",
                           tddp_store_keys_text(&key, 1, text));
    }
    return end(&op, status);
}

tddp_status tddp_store_queue_len(tddp_store *store, tddp_slice key, const tddp_wait *wait,
                                 int64_t *out)
{
    BEGIN(out, &key, 1, NULL, 0);
    return end(&op, op.ops->queue_len ? op.ops->queue_len(op.base, op.keys[0], &op.call, out)
                                      : fail_unsupported(&op, "queues"));
}

tddp_status tddp_store_barrier(tddp_store *store, tddp_slice key, int world_size,
                               const tddp_wait *wait)
{
    BEGIN(&key, &key, 1, NULL, 0);
    status = world_size < 1 ? tddp_fail(TDDP_INVALID_ARGUMENT,
                                        "barrier: world size %d, expected 1 or more", world_size)
                            : op.ops->barrier(op.base, op.keys[0], world_size, &op.call);
    return end(&op, status);
}

tddp_status tddp_store_await_clients(tddp_store *store, const tddp_slice *keys, size_t count,
                                     const tddp_wait *wait)
{
    BEGIN(&store, keys, count, NULL, 0);
    return end(&op, op.ops->await_clients ? op.ops->await_clients(op.base, op.keys, count, &op.call)
                                          : TDDP_OK);
}

tddp_status tddp_store_clone(tddp_store *store, const tddp_wait *wait, tddp_store **out)
{
    BEGIN(out, NULL, 0, NULL, 0);
    tddp_store *base = op.base;
    if (op.ops->clone) {
        status = op.ops->clone(op.base, &op.call, &base);
    } else {
        (void)tddp_store_retain(base);
    }
    if (status == TDDP_OK && !store->under) {
        *out = base;
    } else if (status == TDDP_OK) {
        status = tddp_store_view(store->prefix, base, out);
        if (status) {
            tddp_store_release(base);
        }
    }
    return status;
}
