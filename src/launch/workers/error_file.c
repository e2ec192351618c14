/*
 * Reads a worker's error file. A program that has just failed writes it, perhaps only half of it,
 * so every step is bounded and what cannot be read is left out. Main thread, after the worker's
 * end.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "base/json_read.h"
#include "launch/workers/worker.h"

enum { MOST_BYTES = 1 << 20 };

static void take_item(void *context, const char *key, const char *text)
{
    tddp_launch_error *found = context;
    char **field = strcmp(key, "message") == 0        ? &found->message
                   : strcmp(key, "py_callstack") == 0 ? &found->traceback
                                                      : NULL;
    if (field && !*field) {
        *field = tddp_copy_string(text);
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
    out->missing =
        out->message || out->traceback ? NULL : "not understood: there is no message in it";
}

/* The path is the worker's to write: a pipe or a device there must not hold us up, and a link may
 * lead anywhere. */
void tddp_launch_error_read(const char *path, tddp_launch_error *out)
{
    struct stat found;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY);
    if (fd < 0 && errno == ENOENT) {
        return;
    }
    *out = (tddp_launch_error){
        .missing = "not read: it is no ordinary file of at most 1 MiB that may be read"};
    if (fd >= 0 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode) &&
        found.st_size <= MOST_BYTES && (text = tddp_alloc(MOST_BYTES))) {
        size_t size = 0;
        ssize_t got;
        while ((got = read(fd, text + size, MOST_BYTES - size)) > 0 ||
               (got < 0 && errno == EINTR)) {
            size += got > 0 ? (size_t)got : 0;
        }
        tddp_launch_error_parse(text, size, out);
    }
    free(text);
    tddp_close(fd);
}

void tddp_launch_error_free(tddp_launch_error *error)
{
    free(error->message);
    free(error->traceback);
    *error = (tddp_launch_error){0};
}
