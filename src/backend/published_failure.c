/*
 * Publishes in the store why a rank fails, in place of a value that other ranks wait for while they
 * connect. Any thread; keeps no state.
 */
#include <stdio.h>
#include <string.h>

#include <tddp/backend.h>

#include "base/base.h"

enum { PUBLISH_MS = 1000, TEXT_BYTES = 1024 };

static const char PREFIX[] = "failed: ";

void tddp_backend_publish_failure(tddp_store *store, tddp_slice key, const char *reason)
{
    const tddp_wait wait = {PUBLISH_MS, NULL};
    char text[TEXT_BYTES]; /* not allocated: the failure may be a lack of memory */
    (void)snprintf(text, sizeof text, "%s%s", PREFIX, reason);
    if (tddp_store_set(store, key, (tddp_slice){text, strlen(text)}, &wait)) {
        tddp_log(TDDP_LOG_DEBUG, "backend", "%s", tddp_error_message());
    }
}

const char *tddp_backend_published_failure(tddp_slice value)
{
    const size_t length = sizeof PREFIX - 1;
    const char *text = value.data;
    return value.size >= length && memcmp(text, PREFIX, length) == 0 ? text + length : NULL;
}
