/*
 * What carries a group's operations. Runs on the thread that makes the group.
 */
#include "backend/open.h"

tddp_status tddp_backend_open(const tddp_backend_v1 *asked, const tddp_backend_opts *opts,
                              const tddp_wait *wait, const tddp_backend_v1 **serving,
                              void **context)
{
    tddp_status status = asked->create(opts, wait, context);
    if (status == TDDP_OK) {
        *serving = asked;
    }
    return status;
}
