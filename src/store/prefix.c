/*
 * A view of another store in which key k is `prefix/k`. Keeps no state but its prefix and its
 * reference, so it is as thread-safe as the store beneath. Calls that store's table directly: the
 * outermost view has checked the arguments and computed the deadline.
 */
#include <stdlib.h>
#include <string.h>

#include "store/store_impl.h"

typedef struct prefix_store {
    tddp_store base;
    char *prefix; /* with its slash */
    size_t prefix_size;
} prefix_store;

tddp_status tddp_store_prefixed(tddp_slice prefix, const tddp_slice *keys, size_t count,
                                tddp_slice **out)
{
    size_t bytes = count * (sizeof(tddp_slice) + prefix.size);
    for (size_t i = 0; i < count; i++) {
        bytes += keys[i].size;
    }
    tddp_slice *block = tddp_alloc(bytes);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    char *at = (char *)(block + count);
    for (size_t i = 0; i < count; i++) {
        block[i] = (tddp_slice){at, prefix.size + keys[i].size};
        memcpy(at, prefix.data, prefix.size);
        memcpy(at + prefix.size, keys[i].data, keys[i].size);
        at += block[i].size;
    }
    *out = block;
    return TDDP_OK;
}

/* The keys as the store beneath has them. */
static tddp_status rewrite(const tddp_store *store, const tddp_slice *keys, size_t count,
                           tddp_slice **out)
{
    const prefix_store *prefix = (const prefix_store *)store;
    return tddp_store_prefixed((tddp_slice){prefix->prefix, prefix->prefix_size}, keys, count, out);
}

/* Runs one operation of the store beneath with its keys rewritten as `full`. */
#define BENEATH(keys, count, call_beneath)                   \
    tddp_slice *full = NULL;                                 \
    tddp_store *under = store->under;                        \
    tddp_status status = rewrite(store, keys, count, &full); \
    if (status == TDDP_OK) {                                 \
        status = (call_beneath);                             \
        free(full);                                          \
    }                                                        \
    return status

static tddp_status prefix_set(tddp_store *store, tddp_slice key, tddp_slice value,
                              const tddp_store_call *call)
{
    BENEATH(&key, 1, under->ops->set(under, full[0], value, call));
}

static tddp_status prefix_get(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                              tddp_blob *out)
{
    BENEATH(&key, 1, under->ops->get(under, full[0], call, out));
}

static tddp_status prefix_add(tddp_store *store, tddp_slice key, int64_t delta,
                              const tddp_store_call *call, int64_t *out)
{
    BENEATH(&key, 1, under->ops->add(under, full[0], delta, call, out));
}

static tddp_status prefix_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                      tddp_slice desired, const tddp_store_call *call,
                                      tddp_blob *out)
{
    BENEATH(&key, 1, under->ops->compare_set(under, full[0], expected, desired, call, out));
}

static tddp_status prefix_delete_key(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                     int *deleted)
{
    BENEATH(&key, 1, under->ops->delete_key(under, full[0], call, deleted));
}

static tddp_status prefix_num_keys(tddp_store *store, const tddp_store_call *call, int64_t *out)
{
    return store->under->ops->num_keys(store->under, call, out);
}

static tddp_status prefix_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                               const tddp_store_call *call)
{
    BENEATH(keys, count, under->ops->wait(under, full, count, call));
}

static tddp_status prefix_check(tddp_store *store, const tddp_slice *keys, size_t count,
                                const tddp_store_call *call, int *all_exist)
{
    BENEATH(keys, count, under->ops->check(under, full, count, call, all_exist));
}

static tddp_status prefix_append(tddp_store *store, tddp_slice key, tddp_slice value,
                                 const tddp_store_call *call)
{
    BENEATH(&key, 1, under->ops->append(under, full[0], value, call));
}

static tddp_status prefix_multi_get(tddp_store *store, const tddp_slice *keys, size_t count,
                                    const tddp_store_call *call, tddp_blob *out)
{
    BENEATH(keys, count, under->ops->multi_get(under, full, count, call, out));
}

static tddp_status prefix_multi_set(tddp_store *store, const tddp_slice *keys,
                                    const tddp_slice *values, size_t count,
                                    const tddp_store_call *call)
{
    BENEATH(keys, count, under->ops->multi_set(under, full, values, count, call));
}

static tddp_status prefix_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                     const tddp_store_call *call)
{
    BENEATH(&key, 1, under->ops->queue_push(under, full[0], value, call));
}

static tddp_status prefix_queue_pop(tddp_store *store, tddp_slice key, bool block,
                                    const tddp_store_call *call, tddp_blob *out)
{
    BENEATH(&key, 1, under->ops->queue_pop(under, full[0], block, call, out));
}

static tddp_status prefix_queue_len(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                    int64_t *out)
{
    BENEATH(&key, 1, under->ops->queue_len(under, full[0], call, out));
}

static tddp_status prefix_barrier(tddp_store *store, tddp_slice key, int world_size,
                                  const tddp_store_call *call)
{
    BENEATH(&key, 1, under->ops->barrier(under, full[0], world_size, call));
}

static tddp_status prefix_await_clients(tddp_store *store, const tddp_slice *keys, size_t count,
                                        const tddp_store_call *call)
{
    if (!store->under->ops->await_clients) {
        return TDDP_OK;
    }
    BENEATH(keys, count, under->ops->await_clients(under, full, count, call));
}

/* Takes the prefix off a key; false if it is not beneath it. */
static bool strip(const prefix_store *prefix, tddp_blob *key)
{
    size_t size = prefix->prefix_size;
    if (key->size <= size || memcmp(key->data, prefix->prefix, size) != 0) {
        return false;
    }
    memmove(key->data, key->data + size, key->size - size + 1);
    key->size -= size;
    return true;
}

static tddp_status prefix_list_keys(tddp_store *store, const tddp_store_call *call,
                                    tddp_blob_list *out)
{
    tddp_status status = store->under->ops->list_keys(store->under, call, out);
    size_t kept = 0;
    for (size_t i = 0; i < out->count; i++) {
        tddp_blob key = out->blobs[i];
        if (status == TDDP_OK && strip((const prefix_store *)store, &key)) {
            out->blobs[kept++] = key;
        } else {
            tddp_blob_free(&key);
        }
    }
    out->count = kept;
    return status;
}

static void prefix_destroy(tddp_store *store)
{
    prefix_store *prefix = (prefix_store *)store;
    tddp_store_release(store->under);
    free(prefix->prefix);
    free(prefix);
}

static tddp_status prefix_clone(tddp_store *store, const tddp_store_call *call, tddp_store **out);

static const tddp_store_ops prefix_ops = {
    .set = prefix_set,
    .get = prefix_get,
    .add = prefix_add,
    .compare_set = prefix_compare_set,
    .delete_key = prefix_delete_key,
    .num_keys = prefix_num_keys,
    .wait = prefix_wait,
    .check = prefix_check,
    .append = prefix_append,
    .multi_get = prefix_multi_get,
    .multi_set = prefix_multi_set,
    .queue_push = prefix_queue_push,
    .queue_pop = prefix_queue_pop,
    .queue_len = prefix_queue_len,
    .list_keys = prefix_list_keys,
    .barrier = prefix_barrier,
    .await_clients = prefix_await_clients,
    .clone = prefix_clone,
    .destroy = prefix_destroy,
};

/* Takes over `with_slash` and a reference to `under`, on success only. */
static tddp_status create(char *with_slash, tddp_store *under, tddp_store **out)
{
    prefix_store *prefix = tddp_alloc(sizeof *prefix);
    if (!prefix) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store_init(&prefix->base, &prefix_ops, 0);
    prefix->base.under = under;
    prefix->prefix = with_slash;
    prefix->prefix_size = strlen(with_slash);
    *out = &prefix->base;
    return TDDP_OK;
}

static tddp_status prefix_clone(tddp_store *store, const tddp_store_call *call, tddp_store **out)
{
    tddp_store *under;
    tddp_status status = store->under->ops->clone(store->under, call, &under);
    if (status) {
        return status;
    }
    char *with_slash = tddp_copy_string(((prefix_store *)store)->prefix);
    status = with_slash ? create(with_slash, under, out) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(with_slash);
        tddp_store_release(under);
    }
    return status;
}

tddp_status tddp_prefix_store_create(const char *prefix, tddp_store *store, tddp_store **out)
{
    if (!prefix || !store || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the %s is NULL",
                         !prefix  ? "prefix"
                         : !store ? "store"
                                  : "result");
    }
    char *with_slash = tddp_format("%s/", prefix);
    if (!with_slash) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = create(with_slash, store, out);
    if (status) {
        free(with_slash);
    } else {
        (void)tddp_store_retain(store);
    }
    return status;
}
