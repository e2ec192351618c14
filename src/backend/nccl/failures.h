/* NCCL's errors as statuses with texts. Any thread; keeps no state. */
#ifndef TDDP_NCCL_FAILURES_H
#define TDDP_NCCL_FAILURES_H

#include "backend/nccl/libraries.h"

/* The failure of a call; `what` names it. `comm`: where NCCL may say more, or NULL. */
TDDP_NODISCARD tddp_status tddp_nccl_fail(const tddp_nccl_libraries *libraries, tddp_nccl_comm comm,
                                          tddp_nccl_result result, const char *what);

/* TDDP_GROUP_FAILED: the communicator was aborted meanwhile. */
TDDP_NODISCARD tddp_status tddp_nccl_fail_aborted(const char *what);

#endif
