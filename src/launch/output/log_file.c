/*
 * Appends to log files without a buffer of our own, so that what a worker wrote is there as soon as
 * it was read. On a full disk lines are lost until there is room again, always whole ones. Main
 * thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/output/log_file.h"

tddp_status tddp_launch_log_file_open(tddp_launch_log_file *file, char *path)
{
    *file = (tddp_launch_log_file){.fd = -1, .path = path};
    if (!path) {
        return TDDP_OUT_OF_MEMORY;
    }
    file->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY, 0644);
    return file->fd >= 0 ? TDDP_OK : tddp_fail_errno(path);
}

/* Returns how many bytes were written. */
static size_t append(const tddp_launch_log_file *file, const char *data, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t wrote = write(file->fd, data + done, size - done);
        if (wrote > 0) {
            done += (size_t)wrote;
        } else if (wrote == 0 || errno != EINTR) {
            break;
        }
    }
    return done;
}

static void note_loss(tddp_launch_log_file *file, tddp_launch_console *console)
{
    file->behind = true;
    if (!file->told) {
        file->told = true;
        tddp_launch_console_say(console, "%s: %s; what cannot be written there is lost", file->path,
                                strerror(errno));
    }
}

void tddp_launch_log_file_write(tddp_launch_log_file *file, const char *data, size_t size,
                                tddp_launch_console *console)
{
    if (file->fd < 0 || size == 0) {
        return;
    }
    bool mid_line = file->mid_line;
    file->mid_line = data[size - 1] != '\n';
    if (file->behind) {
        if (mid_line) {
            const char *newline = memchr(data, '\n', size);
            size_t rest = newline ? (size_t)(newline - data) + 1 : size;
            data += rest;
            size -= rest;
        }
        /* The file may end within a line; an empty line there is also a mark of the gap. */
        if (size == 0 || append(file, "\n", 1) != 1) {
            return;
        }
        file->behind = false;
    }
    if (append(file, data, size) != size) {
        note_loss(file, console);
    }
}

void tddp_launch_log_file_close(tddp_launch_log_file *file)
{
    tddp_close(file->fd);
    free(file->path);
    *file = (tddp_launch_log_file){.fd = -1};
}
