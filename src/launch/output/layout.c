/*
 * Makes the folders of a run, and removes them if they are private. Links in those are removed,
 * never followed: workers may write there. Main thread.
 */
#include <errno.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "base/base.h"
#include "launch/output/layout.h"

enum { DESCRIPTORS = 8, MOST_TRIES = 100, MOST_STARTS = 1000000 };

/* Names something in TMPDIR or /tmp, told from the root: workers may go to another folder. free();
 * NULL with a text. */
static char *temporary_path(const char *name)
{
    const char *given = getenv("TMPDIR");
    const char *parent = given && *given != '\0' ? given : "/tmp";
    char *absolute = realpath(parent, NULL);
    if (!absolute) {
        (void)tddp_fail_errno(parent);
        return NULL;
    }
    char *path = tddp_format("%s/%s", absolute, name);
    free(absolute);
    return path;
}

static tddp_status make_temporary(char **out)
{
    char *path = temporary_path("torchrun_XXXXXX");
    if (!path) {
        return TDDP_SYSTEM;
    }
    if (!mkdtemp(path)) {
        tddp_status status = tddp_fail_errno(path);
        free(path);
        return status;
    }
    *out = path;
    return TDDP_OK;
}

char *tddp_launch_layout_private_name(void)
{
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        (void)tddp_fail_errno("getrandom");
        return NULL;
    }
    char name[48];
    (void)snprintf(name, sizeof name, "torchrun_%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    return temporary_path(name);
}

tddp_status tddp_launch_layout_make_private(const char *path, tddp_launch_layout *out)
{
    char *made = path ? tddp_copy_string(path) : tddp_launch_layout_private_name();
    if (!made) {
        return TDDP_SYSTEM;
    }
    if (mkdir(made, 0700) != 0) {
        tddp_status status = tddp_fail_errno(made);
        free(made);
        return status;
    }
    *out = (tddp_launch_layout){.run = made};
    return TDDP_OK;
}

static tddp_status cannot_make(const char *path)
{
    return tddp_fail(TDDP_SYSTEM, "cannot make the log folder %s: %s", path, strerror(errno));
}

/* Makes a folder and those above it. */
static tddp_status make_all(const char *path)
{
    struct stat found;
    char *copy = tddp_copy_string(path);
    if (!copy) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(copy, 0777); /* the last one tells whether all went well */
        *slash = '/';
    }
    free(copy);
    if (mkdir(path, 0777) != 0 && errno != EEXIST) {
        return cannot_make(path);
    }
    if (stat(path, &found) == 0 && !S_ISDIR(found.st_mode)) {
        return tddp_fail(TDDP_SYSTEM,
                         "cannot make the log folder %s: a file has that name; choose another",
                         path);
    }
    return TDDP_OK;
}

/* "PARENT/RUN_ID_RANDOM", as PyTorch names it; a slash in the id is no folder. */
static char *run_path(const char *parent, const char *run_id)
{
    static const char letters[33] = "abcdefghijklmnopqrstuvwxyz012345";
    unsigned char random[8];
    char suffix[sizeof random + 1] = "";
    if (getrandom(random, sizeof random, 0) != sizeof random) {
        (void)tddp_fail_errno("getrandom");
        return NULL;
    }
    for (size_t i = 0; i < sizeof random; i++) {
        suffix[i] = letters[random[i] % 32];
    }
    char *path = tddp_format("%s/%s_%s", parent, run_id, suffix);
    for (char *at = path ? path + strlen(parent) + 1 : NULL; at && *at != '\0'; at++) {
        *at = *at == '/' ? '_' : *at;
    }
    return path;
}

/* Workers may go to another folder, so paths are told from the root. */
static tddp_status make_parent(const char *log_dir, char **out)
{
    if (!log_dir) {
        return make_temporary(out);
    }
    tddp_status status = make_all(log_dir);
    if (status == TDDP_OK) {
        *out = realpath(log_dir, NULL);
        status = *out ? TDDP_OK : cannot_make(log_dir);
    }
    return status;
}

tddp_status tddp_launch_layout_make(const char *log_dir, const char *run_id,
                                    tddp_launch_layout *out)
{
    char *parent = NULL;
    tddp_status status = make_parent(log_dir, &parent);
    for (int i = 0; status == TDDP_OK; i++) {
        char *path = run_path(parent, run_id);
        if (!path) {
            status = TDDP_SYSTEM;
        } else if (mkdir(path, 0777) == 0) {
            *out = (tddp_launch_layout){.run = path, .kept = true};
            break;
        } else if (errno != EEXIST || i == MOST_TRIES) {
            status = cannot_make(path);
        }
        free(path);
    }
    free(parent);
    return status;
}

static char *attempt_path(const char *run, int restart, int start)
{
    return start == 0 ? tddp_format("%s/attempt_%d", run, restart)
                      : tddp_format("%s/attempt_%d.%d", run, restart, start);
}

/* The first of the restart's names that is free: nobody else makes folders in the run's. */
static tddp_status make_attempt(const tddp_launch_layout *layout, int restart, char **out)
{
    for (int start = 0; start < MOST_STARTS; start++) {
        char *path = attempt_path(layout->run, restart, start);
        if (!path) {
            return TDDP_OUT_OF_MEMORY;
        }
        if (mkdir(path, 0777) == 0) {
            *out = path;
            return TDDP_OK;
        }
        int error = errno;
        if (error != EEXIST) {
            tddp_status status = tddp_fail_errno(path);
            free(path);
            return status;
        }
        free(path);
    }
    return tddp_fail(TDDP_SYSTEM, "%s: too many attempts", layout->run);
}

tddp_status tddp_launch_layout_begin(tddp_launch_layout *layout, int restart, int local_size)
{
    free(layout->attempt);
    layout->attempt = NULL;
    if (!layout->run) {
        return TDDP_OK;
    }
    char *attempt = NULL;
    tddp_status status = make_attempt(layout, restart, &attempt);
    if (status != TDDP_OK) {
        return status;
    }
    for (int i = 0; i < local_size && status == TDDP_OK; i++) {
        char *path = tddp_format("%s/%d", attempt, i);
        if (!path) {
            status = TDDP_OUT_OF_MEMORY;
        } else if (mkdir(path, 0777) != 0) {
            status = tddp_fail_errno(path);
        }
        free(path);
    }
    if (status == TDDP_OK) {
        layout->attempt = attempt;
    } else {
        free(attempt);
    }
    return status;
}

char *tddp_launch_layout_path(const tddp_launch_layout *layout, int local_rank, const char *name)
{
    if (!layout->attempt) {
        return NULL;
    }
    return local_rank < 0 ? tddp_format("%s/%s", layout->attempt, name)
                          : tddp_format("%s/%d/%s", layout->attempt, local_rank, name);
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    (void)found;
    (void)kind;
    (void)where;
    (void)remove(path); /* what cannot be removed stays; the rest goes all the same */
    return 0;
}

void tddp_launch_layout_remove(const char *path)
{
    (void)nftw(path, remove_one, DESCRIPTORS, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

void tddp_launch_layout_free(tddp_launch_layout *layout)
{
    if (layout->run && !layout->kept) {
        tddp_launch_layout_remove(layout->run);
    }
    free(layout->run);
    free(layout->attempt);
    *layout = (tddp_launch_layout){0};
}
