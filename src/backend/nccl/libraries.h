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

#endif
