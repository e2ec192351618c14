/*
 * The temporary folder of one run. Its owner is the agent, which removes it on every way out.
 * Links in it are removed, never followed: workers may write there. Main thread.
 */
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/base.h"
#include "launch/report/scratch.h"

enum { DESCRIPTORS = 8 };

tddp_status tddp_launch_scratch_make(char **out)
{
    const char *parent = getenv("TMPDIR");
    char *path = tddp_format("%s/torchrun_XXXXXX", parent && *parent != '\0' ? parent : "/tmp");
    if (!path) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (!mkdtemp(path)) {
        tddp_status status = tddp_fail_errno(path);
        free(path);
        return status;
    }
    *out = path;
    return TDDP_OK;
}

static bool make_folder(const char *path)
{
    if (mkdir(path, 0700) == 0 || errno == EEXIST) {
        return true;
    }
    (void)tddp_fail_errno(path);
    return false;
}

char *tddp_launch_scratch_error_file(const char *folder, int attempt, int local_rank)
{
    char *path = NULL;
    char *upper = tddp_format("%s/attempt_%d", folder, attempt);
    char *lower = tddp_format("%s/attempt_%d/%d", folder, attempt, local_rank);
    if (upper && lower && make_folder(upper) && make_folder(lower)) {
        path = tddp_format("%s/error.json", lower);
    }
    free(upper);
    free(lower);
    return path;
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    (void)found;
    (void)kind;
    (void)where;
    (void)remove(path); /* what cannot be removed stays; the rest goes all the same */
    return 0;
}

void tddp_launch_scratch_remove(char *folder)
{
    if (folder) {
        (void)nftw(folder, remove_one, DESCRIPTORS, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
        free(folder);
    }
}
