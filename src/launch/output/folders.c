/*
 * Makes and removes the folders of a run. Links in those are removed, never followed: workers may
 * write there. Main thread.
 */
#include <errno.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/output/output.h"

enum { DESCRIPTORS = 8, MOST_STARTS = 1000000 };

/* Makes a folder and those above it; false with errno. */
static bool make_all(const char *path)
{
    char *copy = tddp_copy_string(path);
    if (!copy) {
        errno = ENOMEM;
        return false;
    }
    for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(copy, 0777); /* the last one tells whether all went well */
        *slash = '/';
    }
    free(copy);
    return mkdir(path, 0777) == 0 || errno == EEXIST;
}

char *tddp_launch_folder_make(const char *parent, const char *name)
{
    const char *temporary = getenv("TMPDIR");
    const char *in = parent ? parent : temporary && *temporary != '\0' ? temporary : "/tmp";
    char *absolute = !parent || make_all(parent) ? realpath(in, NULL) : NULL;
    char *path = absolute ? tddp_format("%s/%s_XXXXXX", absolute, name) : NULL;
    for (char *at = path ? path + strlen(absolute) + 1 : NULL; at && *at != '\0'; at++) {
        *at = *at == '/' ? '_' : *at; /* a slash in the name is no folder */
    }
    if (!path || !mkdtemp(path)) {
        (void)tddp_fail(TDDP_SYSTEM, "cannot make a folder in %s: %s", in, strerror(errno));
        free(path);
        path = NULL;
    }
    free(absolute);
    return path;
}

/* Makes the first of the restart's folders that is free: nobody else makes any in the run's. */
static char *make_attempt(const char *run, int restart)
{
    char *path = tddp_format("%s/attempt_%d", run, restart);
    for (int start = 1; path && mkdir(path, 0777) != 0; start++) {
        bool taken = errno == EEXIST && start < MOST_STARTS;
        if (!taken) {
            (void)tddp_fail_errno(path);
        }
        free(path);
        path = taken ? tddp_format("%s/attempt_%d.%d", run, restart, start) : NULL;
    }
    return path;
}

char *tddp_launch_folder_begin(const char *run, int restart, int local_size)
{
    char *attempt = make_attempt(run, restart);
    for (int i = 0; i < local_size && attempt; i++) {
        char *path = tddp_format("%s/%d", attempt, i);
        if (!path || mkdir(path, 0777) != 0) {
            (void)(path ? tddp_fail_errno(path) : TDDP_OUT_OF_MEMORY);
            free(attempt);
            attempt = NULL;
        }
        free(path);
    }
    return attempt;
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    (void)found, (void)kind, (void)where;
    (void)remove(path); /* what cannot be removed stays; the rest goes all the same */
    return 0;
}

void tddp_launch_folder_remove(const char *path)
{
    if (path) {
        (void)nftw(path, remove_one, DESCRIPTORS, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    }
}
