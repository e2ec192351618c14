/* A key of another rank's in the store, waited for on a connection of its own. */
#include "backend/nccl/store_key.h"

#include <inttypes.h>

tddp_status tddp_nccl_await_key(tddp_store *store, tddp_store **own, tddp_slice key,
                                tddp_nccl_limits limits, const char *late, tddp_blob *out)
{
    const int64_t start = tddp_now_ns();
    tddp_wait left = tddp_nccl_time_left(limits);
    tddp_status status = *own ? TDDP_OK : tddp_store_clone(store, &left, own);
    if (status == TDDP_OK) {
        left = tddp_nccl_time_left(limits);
        status = tddp_store_get(*own, key, &left, out);
    }
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(status, "timed out after %" PRId64 " ms waiting for the key \"%.*s\": %s",
                         (tddp_now_ns() - start) / TDDP_NS_PER_MS, (int)key.size,
                         (const char *)key.data, late);
    }
    return status;
}
