/* NCCL's errors as statuses with texts. */
#include "backend/nccl/failures.h"

static tddp_status status_of(tddp_nccl_result result)
{
    switch (result) {
    case TDDP_NCCL_SUCCESS:
    case TDDP_NCCL_IN_PROGRESS:
        return TDDP_OK;
    case TDDP_NCCL_REMOTE_ERROR:
        return TDDP_PEER_LOST;
    case TDDP_NCCL_SYSTEM_ERROR:
        return TDDP_NETWORK;
    case TDDP_NCCL_INVALID_ARGUMENT:
    case TDDP_NCCL_INVALID_USAGE:
        return TDDP_INVALID_ARGUMENT;
    default:
        return TDDP_SYSTEM;
    }
}

tddp_status tddp_nccl_fail(const tddp_nccl_libraries *libraries, tddp_nccl_comm comm,
                           tddp_nccl_result result, const char *what)
{
    const tddp_nccl *nccl = &libraries->nccl;
    const char *more = comm ? nccl->ncclGetLastError(comm) : NULL;
    return tddp_fail(status_of(result), "%s: %s%s%s", what, nccl->ncclGetErrorString(result),
                     more && *more ? ": " : "", more && *more ? more : "");
}

tddp_status tddp_nccl_fail_aborted(const char *what)
{
    return tddp_fail(TDDP_GROUP_FAILED, "%s: aborted", what);
}
