/*
 * Reads a worker's error file. A program that has just failed writes it, perhaps only half of it,
 * so every step is bounded and what cannot be read is left out. Main thread, after the worker's
 * end.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "base/json_read.h"
#include "launch/workers/error_file.h"

enum { MOST_BYTES = 1 << 20 };

static void keep_first(char **field, const char *text)
{
    if (!*field) {
        *field = tddp_copy_string(text);
    }
}

static void take_item(void *context, const char *key, const char *text)
{
    tddp_launch_error *found = context;
    if (strcmp(key, "message") == 0) {
        keep_first(&found->message, text);
    } else if (strcmp(key, "py_callstack") == 0) {
        keep_first(&found->traceback, text);
    } else if (strcmp(key, "timestamp") == 0) {
        found->timestamp = atoll(text);
    } else if (strcmp(key, "consequence") == 0) {
        found->consequence = strcmp(text, "1") == 0;
    }
}

void tddp_launch_error_parse(const char *text, size_t size, tddp_launch_error *out)
{
    *out = (tddp_launch_error){0};
    const tddp_json_visitor visitor = {.context = out, .scalar = take_item};
    (void)tddp_json_read(text, size, &visitor); /* a file that was cut still has its start */
    out->state =
        out->message || out->traceback ? TDDP_LAUNCH_ERROR_READ : TDDP_LAUNCH_ERROR_NOT_UNDERSTOOD;
}

/* The path is the worker's to write: a pipe or a device there must not hold us up, and a link may
 * lead anywhere. */
static int open_ordinary(const char *path)
{
    struct stat found;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY);
    if (fd >= 0 &&
        (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size > MOST_BYTES)) {
        tddp_close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

void tddp_launch_error_read(const char *path, tddp_launch_error *out)
{
    *out = (tddp_launch_error){0};
    tddp_bytes text = {0};
    int fd = open_ordinary(path);
    if (fd < 0) {
        out->state = errno == ENOENT ? TDDP_LAUNCH_ERROR_NONE : TDDP_LAUNCH_ERROR_NOT_TO_BE_READ;
        return;
    }
    if (tddp_bytes_reserve(&text, MOST_BYTES) != TDDP_OK) {
        tddp_close(fd);
        out->state = TDDP_LAUNCH_ERROR_NOT_TO_BE_READ;
        return;
    }
    ssize_t got;
    while (text.size < MOST_BYTES &&
           ((got = read(fd, text.data + text.size, MOST_BYTES - text.size)) > 0 ||
            (got < 0 && errno == EINTR))) {
        text.size += got > 0 ? (size_t)got : 0;
    }
    tddp_close(fd);
    tddp_launch_error_parse(text.data, text.size, out);
    tddp_bytes_free(&text);
}

void tddp_launch_error_free(tddp_launch_error *error)
{
    free(error->message);
    free(error->traceback);
    *error = (tddp_launch_error){0};
}
