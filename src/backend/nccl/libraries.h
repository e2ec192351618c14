/*
 * NCCL and the CUDA runtime, found when first asked for: a program with libtorch for CUDA has both
 * in its process already, and these are then the ones.
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

/*
 * Any thread. What was found stays for the life of the process; what was not is looked for again by
 * the next call. TDDP_NCCL_LIBRARY names a file to take and no other.
 * Errors: TDDP_UNAVAILABLE, with what was tried and what to install.
 */
TDDP_NODISCARD tddp_status tddp_nccl_libraries_get(const tddp_nccl_libraries **out);

/* "2.20.5" of 22005. */
enum { TDDP_NCCL_VERSION_TEXT = 32 };
const char *tddp_nccl_version_text(int version, char text[TDDP_NCCL_VERSION_TEXT]);

#endif
