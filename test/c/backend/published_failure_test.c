/* Failures that a rank publishes in place of a value. */
#include <string.h>

#include <tddp/backend.h>

#include "check.h"

static const tddp_slice key = {"key", 3};

static tddp_slice slice_of(const tddp_blob *blob)
{
    return (tddp_slice){blob->data, blob->size};
}

TEST(a_published_failure_is_recognised)
{
    tddp_store *store;
    tddp_blob blob;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_backend_publish_failure(store, key, "no memory: 5 bytes");
    CHECK_OK(tddp_store_get(store, key, NULL, &blob));
    CHECK_TEXT(tddp_backend_published_failure(slice_of(&blob)), "no memory: 5 bytes");
    tddp_blob_free(&blob);
    tddp_store_release(store);
}

TEST(other_values_are_no_failures)
{
    const char *const values[] = {"", "yes", "failed", "Failed: x", "12345678 failed: "};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        CHECK(!tddp_backend_published_failure((tddp_slice){values[i], strlen(values[i])}));
    }
    CHECK_TEXT(tddp_backend_published_failure((tddp_slice){"failed: ", 8}), "");
}
