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

#include <tddp/file.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

static tddp_status fail_file(const char *what, const char *path)
{
    return tddp_fail(TDDP_SYSTEM, "flight recorder: cannot %s %s: %s", what, path, strerror(errno));
}

static tddp_status write_file(const char *path, const tddp_bytes *text)
{
    char *temporary = tddp_format("%s.%d.XXXXXX", path, (int)getpid());
    if (!temporary) {
        return TDDP_OUT_OF_MEMORY;
    }
    int fd = mkostemp(temporary, O_CLOEXEC);
    tddp_file_piece piece = {.fd = fd, .name = temporary, .data = text->data, .size = text->size};
    tddp_status status = fd < 0 ? fail_file("make", temporary) : tddp_file_write(&piece, NULL);
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
        status = write_file(path, &text);
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
    const char *value;
    return tddp_recorder_setting(names, &value) ? value : NULL;
}

/* Writes one file with the groups of one rank. */
static tddp_status dump_rank(int rank, const char *prefix)
{
    tddp_recorder **all;
    size_t count;
    tddp_status status = tddp_recorder_all(rank, &all, &count);
    if (status) {
        return status;
    }
    char *path = path_for(prefix, rank);
    status = path ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && count > 0) {
        status = dump(all, count, path);
    }
    for (size_t i = 0; i < count; i++) {
        tddp_recorder_release(all[i]);
    }
    free(all);
    free(path);
    return status;
}

tddp_status tddp_recorder_dump_all(const char *prefix, int *files)
{
    int written = 0;
    tddp_status status = TDDP_OK;
    prefix = prefix ? prefix : wanted_prefix();
    if (prefix && !prefix[0]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "flight recorder: the prefix is empty: expected a "
                                                "folder or what a file's name begins with");
    }
    /* A process's threads may be several ranks. */
    for (int rank = prefix ? tddp_recorder_next_rank(0) : -1; rank >= 0 && status == TDDP_OK;
         rank = tddp_recorder_next_rank(rank + 1)) {
        status = dump_rank(rank, prefix);
        written++;
    }
    if (status == TDDP_OK && files) {
        *files = written;
    }
    return status;
}

/* Keeps this thread's error text, which is the group's failure. */
void tddp_recorder_dump_failure(tddp_group *group)
{
    char text[4096];
    const char *prefix = wanted_prefix();
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (prefix && dump_rank(group->root_rank, prefix)) {
        tddp_log(TDDP_LOG_WARN, "group", "%s", tddp_error_message());
        (void)tddp_fail(TDDP_SYSTEM, "%s", text);
    }
}
