/*
 * Files that are installed with torchrun.
 */
#ifndef TDDP_LAUNCH_INSTALLED_H
#define TDDP_LAUNCH_INSTALLED_H

#include <tddp/status.h>

/* The path of a file that `flag` needs, `place` being its path from the program's folder. Caller:
 * free(). Errors: TDDP_NOT_FOUND, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_installed(const char *flag, const char *place, char **out);

#endif
