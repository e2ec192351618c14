/*
 * Small helpers for ephemeral keys and watches.
 */
#ifndef TDDP_STORE_EPHEMERAL_H
#define TDDP_STORE_EPHEMERAL_H

#include "kinds.h"

static inline void own(tddp_store *store, const char *key, const char *value, int64_t limit_ms)
{
    int set = -1;
    CHECK_OK(
        tddp_store_set_ephemeral(store, text(key), text(value), limit_ms, 0, NULL, &set, NULL));
    CHECK_INT(set, 1);
}

/* Whether this caller has the key now, which has the value `expected` then. */
static inline bool wins(tddp_store *store, const char *key, const char *value, const char *expected)
{
    int set = -1;
    tddp_blob now = {0};
    CHECK_OK(tddp_store_set_ephemeral(store, text(key), text(value), 0, 1, NULL, &set, &now));
    CHECK_TEXT(now.data, expected);
    tddp_blob_free(&now);
    return set;
}

/* "key=value" of all keys that a watch returns, in the order of the alphabet. */
static inline const char *seen(tddp_store *store, const char *prefix)
{
    static char all[512];
    tddp_store_entries got;
    CHECK_OK(tddp_store_watch(store, text(prefix), NULL, &got));
    CHECK_INT(got.keys.count, got.values.count);
    const char *last = "";
    all[0] = '\0';
    for (size_t i = 0; i < got.keys.count; i++) {
        size_t next = got.keys.count;
        for (size_t j = 0; j < got.keys.count; j++) {
            const char *key = got.keys.blobs[j].data;
            if (strcmp(key, last) > 0 &&
                (next == got.keys.count || strcmp(key, got.keys.blobs[next].data) < 0)) {
                next = j;
            }
        }
        last = got.keys.blobs[next].data;
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s=%s", i ? " " : "", last,
                 got.values.blobs[next].data);
    }
    tddp_store_entries_free(&got);
    CHECK(!got.keys.blobs && got.values.count == 0);
    return all;
}

static inline void check_quiet(tddp_store *store, const char *prefix)
{
    tddp_store_entries got;
    tddp_wait soon = within_ms(20);
    CHECK_STATUS(tddp_store_watch(store, text(prefix), &soon, &got), TDDP_TIMEOUT);
}

#endif
