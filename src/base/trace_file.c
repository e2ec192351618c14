/*
 * A trace's file: a JSON array whose closing bracket is written with every batch of events and
 * overwritten by the next, so that a reader between two writes, or after a kill there, finds valid
 * JSON. Entered by the thread that opens the trace, then by its writer
 * alone.
 *
 * Invariant: between two calls the file's text ends at `end` and the closing bracket after it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/trace_parts.h"

/* Viewers open no more, and a forgotten variable must not fill a disk. */
#define DEFAULT_MOST_BYTES (INT64_C(1) << 30)
#define MOST_BYTES_VARIABLE "TDDP_TRACE_MAX_BYTES"

static const char closing[] = "\n]\n";
enum { CLOSING_BYTES = sizeof closing - 1 };

static tddp_status fail_file(const char *what, const char *path)
{
    return tddp_fail(TDDP_SYSTEM, "trace: cannot %s %s: %s", what, path, strerror(errno));
}

/* Two that write to one file leave neither's trace: the parent of a forked rank, or another job. */
static tddp_status fail_busy(const char *path)
{
    return errno == EWOULDBLOCK
               ? tddp_fail(
                     TDDP_SYSTEM,
                     "trace: another process is writing %s: give each job a folder of its own",
                     path)
               : fail_file("lock", path);
}

static tddp_status make_folders(const char *dir)
{
    char *path = tddp_copy_string(dir);
    if (!path) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = TDDP_OK;
    for (char *at = path + 1; status == TDDP_OK; at++) {
        char here = *at;
        if (here != '/' && here != '\0') {
            continue;
        }
        *at = '\0';
        if (mkdir(path, 0777) && errno != EEXIST) {
            status = fail_file("make the folder", path);
        }
        *at = here;
        if (here == '\0') {
            break;
        }
    }
    free(path);
    return status;
}

static tddp_status write_at(int fd, const char *data, size_t size, off_t at)
{
    while (size > 0) {
        ssize_t written = pwrite(fd, data, size, at);
        /* A disk that takes nothing has no room, though POSIX does not say how that is reported. */
        if (written == 0) {
            errno = ENOSPC;
        }
        if (written == 0 || (written < 0 && errno != EINTR)) {
            return TDDP_SYSTEM;
        }
        if (written > 0) {
            data += written;
            size -= (size_t)written;
            at += written;
        }
    }
    return TDDP_OK;
}

tddp_status tddp_trace_file_append(tddp_trace_file *file, tddp_bytes *events)
{
    size_t size = events->size;
    if (file->end + (int64_t)size + CLOSING_BYTES > file->most_bytes) {
        return tddp_fail(TDDP_SYSTEM,
                         "trace: %s has reached its limit of %lld bytes (" MOST_BYTES_VARIABLE ")",
                         file->path, (long long)file->most_bytes);
    }
    tddp_status status = tddp_bytes_append(events, closing, CLOSING_BYTES);
    if (status) {
        return status;
    }
    if (write_at(file->fd, events->data, events->size, file->end)) {
        status = fail_file("write", file->path);
        /* Back to what was there; the bytes of the bracket are the file's already. */
        if (ftruncate(file->fd, file->end + CLOSING_BYTES) == 0) {
            (void)write_at(file->fd, closing, CLOSING_BYTES, file->end);
        }
        return status;
    }
    file->end += (off_t)size;
    return TDDP_OK;
}

/* Whether the file is still as this process left it. */
static bool goes_on(const tddp_trace_file *known, const char *path, int fd)
{
    struct stat entry;
    return known && known->path && strcmp(known->path, path) == 0 && fstat(fd, &entry) == 0 &&
           entry.st_size == known->end + CLOSING_BYTES;
}

static tddp_status begin(tddp_trace_file *file, const char *first)
{
    tddp_bytes text = {0};
    tddp_status status = ftruncate(file->fd, 0) ? fail_file("empty", file->path) : TDDP_OK;
    status = status ? status : tddp_bytes_format(&text, "[\n%s", first);
    file->end = 0;
    status = status ? status : tddp_trace_file_append(file, &text);
    tddp_bytes_free(&text);
    return status;
}

static tddp_status read_limit(int64_t *out)
{
    enum { LEAST = 4096 }; /* the first events, and some more */
    const char *text = getenv(MOST_BYTES_VARIABLE);
    *out = DEFAULT_MOST_BYTES;
    if (text && *text && !tddp_parse_int(text, LEAST, INT64_MAX, out)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "trace: " MOST_BYTES_VARIABLE "=\"%s\": expected a number of bytes, %d or "
                         "more",
                         text, LEAST);
    }
    return TDDP_OK;
}

tddp_status tddp_trace_file_open(const char *dir, int rank, const char *first,
                                 const tddp_trace_file *known, tddp_trace_file *out)
{
    tddp_trace_file file = {.fd = -1};
    tddp_status status = read_limit(&file.most_bytes);
    status = status ? status : make_folders(dir);
    if (status) {
        return status;
    }
    file.path = tddp_format("%s/trace_rank_%d.json", dir, rank);
    if (!file.path) {
        return TDDP_OUT_OF_MEMORY;
    }
    file.fd = open(file.path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file.fd < 0) {
        status = fail_file("open", file.path);
    } else if (flock(file.fd, LOCK_EX | LOCK_NB)) {
        status = fail_busy(file.path);
    } else if (goes_on(known, file.path, file.fd)) {
        file.end = known->end;
    } else {
        status = begin(&file, first);
    }
    if (status) {
        tddp_close(file.fd);
        free(file.path);
        return status;
    }
    *out = file;
    return TDDP_OK;
}

void tddp_trace_file_close(tddp_trace_file *file)
{
    tddp_close(file->fd);
    file->fd = -1;
}
