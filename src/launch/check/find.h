/*
 * Where the program is that --check runs as the workers.
 */
#ifndef TDDP_LAUNCH_CHECK_FIND_H
#define TDDP_LAUNCH_CHECK_FIND_H

#include <tddp/status.h>

/* The path of torchrun-check, which is installed beside torchrun. Caller: free(). Errors:
 * TDDP_NOT_FOUND, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_check_find(char **out);

#endif
