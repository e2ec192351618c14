/*
 * Prefix stores: views of another store in which key k is `prefix/k`. A view keeps no state but its
 * prefix and its reference, so it is as thread-safe as the store beneath; store.c calls that one's
 * table, with the keys that this file makes. A view of a view looks into the store beneath both.
 */
#include <stdlib.h>
#include <string.h>

#include "store/store_impl.h"

tddp_status tddp_store_kept_keys(const tddp_store *store, const tddp_slice *keys, size_t count,
                                 tddp_slice **out)
{
    tddp_slice prefix = store->prefix;
    size_t bytes = count * (sizeof(tddp_slice) + prefix.size);
    for (size_t i = 0; i < count; i++) {
        bytes += keys[i].size;
    }
    tddp_slice *block = tddp_alloc(bytes ? bytes : 1);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    char *at = (char *)(block + count);
    for (size_t i = 0; i < count; i++) {
        block[i] = (tddp_slice){at, prefix.size + keys[i].size};
        memcpy(at, prefix.data, prefix.size);
        if (keys[i].size) {
            memcpy(at + prefix.size, keys[i].data, keys[i].size);
        }
        at += block[i].size;
    }
    *out = block;
    return TDDP_OK;
}

bool tddp_store_strip(const tddp_store *store, tddp_blob *key)
{
    size_t size = store->prefix.size;
    if (key->size <= size || memcmp(key->data, store->prefix.data, size) != 0) {
        return false;
    }
    memmove(key->data, key->data + size, key->size - size + 1);
    key->size -= size;
    return true;
}

tddp_status tddp_store_view(tddp_slice prefix, tddp_store *base, tddp_store **out)
{
    tddp_blob copy;
    tddp_store *view = tddp_alloc(sizeof *view);
    if (!view || tddp_blob_copy(prefix, &copy)) {
        free(view);
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store_init(view, base->ops, base->name, 0);
    view->prefix = (tddp_slice){copy.data, copy.size};
    view->under = base;
    *out = view;
    return TDDP_OK;
}

tddp_status tddp_prefix_store_create(const char *prefix, tddp_store *store, tddp_store **out)
{
    if (!prefix || !store || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the %s is NULL",
                         !prefix  ? "prefix"
                         : !store ? "store"
                                  : "result");
    }
    char *whole = tddp_format("%s%s/", store->prefix.data, prefix);
    if (!whole) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store *base = tddp_store_retain(tddp_store_base(store));
    tddp_status status = tddp_store_view((tddp_slice){whole, strlen(whole)}, base, out);
    free(whole);
    if (status) {
        tddp_store_release(base);
    }
    return status;
}
