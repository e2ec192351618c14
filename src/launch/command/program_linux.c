/*
 * Finds files by their place beside the program that runs. How a program learns its own path
 * differs from system to system. Main thread.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/command/program.h"

tddp_status tddp_launch_installed(const char *flag, const char *place, char **out)
{
    char own[PATH_MAX];
    if (!realpath("/proc/self/exe", own)) {
        return tddp_fail_errno("/proc/self/exe");
    }
    char *path = tddp_format("%.*s/%s", (int)(strrchr(own, '/') - own), own, place);
    if (!path) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (access(path, F_OK) != 0) {
        tddp_status status =
            tddp_fail(TDDP_NOT_FOUND, "%s: %s: %s; it is built and installed with torchrun", flag,
                      path, strerror(errno));
        free(path);
        return status;
    }
    *out = path;
    return TDDP_OK;
}
