/*
 * The flight recorder's files. Each is written under a temporary name, then renamed, so that
 * readers find a complete file or none. Any thread; no lock of a group is held.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

static tddp_status fail_file(const char *what, const char *path)
{
    return tddp_fail(TDDP_SYSTEM, "flight recorder: cannot %s %s: %s", what, path, strerror(errno));
}

static tddp_status write_all(int fd, const char *path, const char *data, size_t size)
{
    while (size > 0) {
        ssize_t written = write(fd, data, size);
        if (written < 0 && errno != EINTR) {
            return fail_file("write", path);
        }
        if (written > 0) {
            data += written;
            size -= (size_t)written;
        }
    }
    return TDDP_OK;
}

static tddp_status write_file(const char *path, const char *data, size_t size)
{
    char *temporary = tddp_format("%s.%d.XXXXXX", path, (int)getpid());
    if (!temporary) {
        return TDDP_OUT_OF_MEMORY;
    }
    int fd = mkostemp(temporary, O_CLOEXEC);
    tddp_status status =
        fd < 0 ? fail_file("make", temporary) : write_all(fd, temporary, data, size);
    if (status == TDDP_OK && fchmod(fd, 0644)) {
        status = fail_file("set the rights of", temporary);
    }
    if (fd >= 0 && close(fd) && status == TDDP_OK) {
        status = fail_file("close", temporary);
    }
    if (status == TDDP_OK && rename(temporary, path)) {
        status = fail_file("rename to", path);
    }
    if (status && fd >= 0) {
        (void)unlink(temporary);
    }
    free(temporary);
    return status;
}

static tddp_status dump(tddp_recorder *const *all, size_t count, const char *path)
{
    tddp_bytes text = {0};
    tddp_status status = tddp_recorder_to_json(all, count, &text);
    if (status == TDDP_OK) {
        status = write_file(path, text.data, text.size);
    }
    tddp_bytes_free(&text);
    return status;
}

tddp_status tddp_group_dump(tddp_group *group, const char *path)
{
    tddp_status status = tddp_group_check_usable(group, "dump");
    if (status == TDDP_OK && (!path || !path[0])) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "dump: path is empty");
    }
    return status ? status : dump(&group->recorder, 1, path);
}

/* --- paths ----------------------------------------------------------------------------------- */

static char *path_for(const char *prefix, int rank)
{
    size_t length = strlen(prefix);
    struct stat entry;
    if (prefix[length - 1] == '/') {
        /* If this fails, creating the file fails too, with an error. */
        (void)mkdir(prefix, 0777);
        return tddp_format("%stddp_trace_rank_%d", prefix, rank);
    }
    if (stat(prefix, &entry) == 0 && S_ISDIR(entry.st_mode)) {
        return tddp_format("%s/tddp_trace_rank_%d", prefix, rank);
    }
    return tddp_format("%s%d", prefix, rank);
}

static const char *wanted_prefix(void)
{
    static const char *const names[] = {"TDDP_FR_DUMP", "TORCH_FR_DUMP_TEMP_FILE",
                                        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        if (text && *text) {
            return text;
        }
    }
    return NULL;
}

/* Writes one file with the groups of one rank, the oldest group first. */
static tddp_status dump_rank(tddp_recorder *const *all, size_t count, int rank, const char *prefix)
{
    tddp_recorder **selected = tddp_alloc_array(count, sizeof(tddp_recorder *));
    char *path = selected ? path_for(prefix, rank) : NULL;
    tddp_status status = path ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    size_t found = 0;
    for (size_t i = count; status == TDDP_OK && i-- > 0;) {
        if (all[i]->root_rank == rank) {
            selected[found++] = all[i];
        }
    }
    if (found > 0) {
        status = dump(selected, found, path);
    }
    free(path);
    free(selected);
    return status;
}

/* `only` is the one rank to write, or -1 for all: a process's threads may be several ranks. */
static tddp_status dump_all(const char *prefix, int only, int *files)
{
    tddp_recorder **all;
    size_t count;
    tddp_status status = tddp_recorder_all(&all, &count);
    if (status) {
        return status;
    }
    int written = 0;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        int rank = all[i]->root_rank;
        bool seen = only >= 0 && rank != only;
        for (size_t j = 0; j < i && !seen; j++) {
            seen = all[j]->root_rank == rank;
        }
        if (!seen) {
            status = dump_rank(all, count, rank, prefix);
            written += status == TDDP_OK;
        }
    }
    for (size_t i = 0; i < count; i++) {
        tddp_recorder_release(all[i]);
    }
    free(all);
    if (status == TDDP_OK && files) {
        *files = written;
    }
    return status;
}

tddp_status tddp_recorder_dump_all(const char *prefix, int *files)
{
    prefix = prefix ? prefix : wanted_prefix();
    if (!prefix) {
        if (files) {
            *files = 0;
        }
        return TDDP_OK;
    }
    if (!prefix[0]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "flight recorder: the prefix is empty: expected a "
                                                "folder or what a file's name begins with");
    }
    return dump_all(prefix, -1, files);
}

/* Keeps this thread's error text, which is the group's failure. */
void tddp_recorder_dump_failure(tddp_group *group)
{
    char text[4096];
    const char *prefix = wanted_prefix();
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (prefix && dump_all(prefix, group->root_rank, NULL)) {
        tddp_log(TDDP_LOG_WARN, "group", "%s", tddp_error_message());
        (void)tddp_fail(TDDP_SYSTEM, "%s", text);
    }
}
