/*
 * The operations on a map of values, with the semantics of PyTorch's servers. One thread at a time;
 * the stores themselves wait and wake. A failure leaves the map as it was.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/store_impl.h"
#include "store/values.h"

tddp_status tddp_store_values_set(tddp_store_map *map, tddp_slice key, tddp_slice value)
{
    tddp_bytes bytes = {0};
    tddp_store_entry *entry;
    tddp_status status = TDDP_OK;
    if (value.size) {
        /* Exactly as large as needed: tddp_bytes would round up, and values seldom grow. */
        bytes.data = tddp_alloc(value.size);
        bytes.capacity = value.size;
        status =
            bytes.data ? tddp_bytes_append(&bytes, value.data, value.size) : TDDP_OUT_OF_MEMORY;
    }
    if (status == TDDP_OK) {
        status = tddp_store_map_obtain(map, key, &entry);
    }
    if (status) {
        tddp_bytes_free(&bytes);
        return status;
    }
    size_t before = entry->value.capacity;
    tddp_bytes_free(&entry->value);
    entry->value = bytes;
    tddp_store_map_count(map, entry, before);
    return TDDP_OK;
}

tddp_status tddp_store_values_append(tddp_store_map *map, tddp_slice key, tddp_slice value)
{
    tddp_store_entry *entry = tddp_store_map_find(map, key);
    if (!entry) {
        return tddp_store_values_set(map, key, value);
    }
    size_t before = entry->value.capacity;
    tddp_status status = tddp_bytes_append(&entry->value, value.data, value.size);
    tddp_store_map_count(map, entry, before);
    return status;
}

/* As the C function strtoll that PyTorch's servers use: space before and anything after the number
 * is passed over. */
static bool parse_number(tddp_slice text, int64_t *out)
{
    char digits[64];
    size_t size = text.size < sizeof digits ? text.size : sizeof digits - 1;
    if (size) {
        memcpy(digits, text.data, size);
    }
    digits[size] = '\0';
    char *end;
    errno = 0;
    long long number = strtoll(digits, &end, 10);
    if (end == digits || errno) {
        return false;
    }
    *out = number;
    return true;
}

tddp_status tddp_store_values_sum(const tddp_store_map *map, tddp_slice key, int64_t delta,
                                  int64_t *out)
{
    const tddp_store_entry *entry = tddp_store_map_find(map, key);
    int64_t present = 0;
    if (entry && !parse_number(tddp_store_entry_value(entry), &present)) {
        char text[TDDP_STORE_KEYS_TEXT_BYTES];
        return tddp_fail(TDDP_STORE, "cannot add to the key %s: its value is not a number",
                         tddp_store_keys_text(&key, 1, text));
    }
    /* Unsigned, so that an overflow wraps as it does there. */
    *out = (int64_t)((uint64_t)present + (uint64_t)delta);
    return TDDP_OK;
}

tddp_slice tddp_store_number(int64_t number, char text[TDDP_STORE_NUMBER_BYTES])
{
    int size = snprintf(text, TDDP_STORE_NUMBER_BYTES, "%lld", (long long)number);
    return (tddp_slice){text, (size_t)size};
}

tddp_slice tddp_store_values_compare(const tddp_store_map *map, tddp_slice key, tddp_slice expected,
                                     tddp_slice desired, bool *store)
{
    const tddp_store_entry *entry = tddp_store_map_find(map, key);
    if (!entry) {
        *store = expected.size == 0;
        return *store ? desired : expected;
    }
    tddp_slice present = tddp_store_entry_value(entry);
    *store = tddp_slices_equal(present, expected);
    return *store ? desired : present;
}
