/*
 * NCCL and the CUDA runtime, loaded on first use. A program with libtorch for CUDA has loaded both
 * already, and then those are used.
 */
#ifndef TDDP_NCCL_LIBRARIES_H
#define TDDP_NCCL_LIBRARIES_H

#include <tddp/status.h>

#include "backend/nccl/nccl_api.h"

typedef struct tddp_nccl_libraries {
    const tddp_cuda *cuda;
    tddp_nccl nccl;
    int nccl_version; /* 22005 is 2.20.5 */
} tddp_nccl_libraries;

/* Any thread. Loaded libraries stay for the life of the process; after a failure the next call
 * tries again. TDDP_NCCL_LIBRARY names the only file to try. Errors: TDDP_UNAVAILABLE, with what
 * was tried and what to install. */
TDDP_NODISCARD tddp_status tddp_nccl_libraries_get(const tddp_nccl_libraries **out);

/* Writes 22005 as "2.20.5". */
enum { TDDP_NCCL_VERSION_TEXT = 32 };
const char *tddp_nccl_version_text(int version, char text[TDDP_NCCL_VERSION_TEXT]);

/* The failure of a call; `what` names it. `comm`: where NCCL may say more, or NULL. */
TDDP_NODISCARD tddp_status tddp_nccl_fail(const tddp_nccl_libraries *libraries, tddp_nccl_comm comm,
                                          tddp_nccl_result result, const char *what);

/* TDDP_GROUP_FAILED: the communicator was aborted meanwhile. */
TDDP_NODISCARD tddp_status tddp_nccl_fail_aborted(const char *what);

#endif
