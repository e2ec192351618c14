/*
 * Log lines for people: one write(2) a line, so that lines of several threads and processes do not
 * mix. No thread waits long for the reader of standard error: a line for which a pipe or a terminal
 * has no room is lost after a moment, and counted. The sink, the level and that count are the
 * library's only mutable globals beside fork-safety's.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tddp/log.h>

#include "base/base.h"

/* GRACE_MS: a reader that is merely slow loses nothing. */
enum { LINE_BYTES = 2048, LEVEL_UNREAD = -1, GRACE_MS = 100 };

static atomic_int threshold = LEVEL_UNREAD;
static _Atomic(tddp_log_sink) current_sink;
static _Atomic(void *) current_sink_data;
static atomic_bool stalled;        /* standard error had no room for the last line */
static atomic_uint_least64_t lost; /* lines, since the last that was written */

static const char *const level_names[] = {
    [TDDP_LOG_ERROR] = "error",
    [TDDP_LOG_WARN] = "warn",
    [TDDP_LOG_INFO] = "info",
    [TDDP_LOG_DEBUG] = "debug",
};

static int level_from_environment(void)
{
    const char *text = getenv("TDDP_LOG");
    for (int level = TDDP_LOG_ERROR; text && level <= TDDP_LOG_DEBUG; level++) {
        if (strcmp(text, level_names[level]) == 0) {
            return level;
        }
    }
    return TDDP_LOG_WARN;
}

void tddp_log_set_sink(tddp_log_sink sink, void *data)
{
    atomic_store(&current_sink_data, data);
    atomic_store(&current_sink, sink);
}

void tddp_log_set_level(tddp_log_level level)
{
    atomic_store(&threshold, (int)level);
}

int tddp_log_enabled(tddp_log_level level)
{
    int shown = atomic_load_explicit(&threshold, memory_order_relaxed);
    if (shown == LEVEL_UNREAD) {
        shown = level_from_environment();
        atomic_store(&threshold, shown);
    }
    return (int)level <= shown;
}

/* Standard error, in a mode in which it never blocks: a descriptor of its own, to be closed, since
 * the mode of the one that there is belongs to other processes as well. */
static int open_to_write(const struct stat *info, bool *own)
{
    *own = false;
    if (S_ISFIFO(info->st_mode) || S_ISCHR(info->st_mode)) {
        int fd = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        *own = fd >= 0;
        return fd >= 0 ? fd : STDERR_FILENO;
    }
    return STDERR_FILENO;
}

/* Whether there is room, at the latest at the deadline. */
static bool await_room(int fd, int64_t deadline)
{
    struct pollfd room = {.fd = fd, .events = POLLOUT};
    int count;
    do {
        count = poll(&room, 1, tddp_deadline_poll_ms(deadline));
    } while (count < 0 && errno == EINTR);
    return count > 0;
}

/* False: there was no room in the time. A line that cannot be written at all is lost: there is no
 * other place for it. */
static bool put(const char *line, size_t length, int64_t grace_ms)
{
    struct stat info;
    bool own;
    if (fstat(STDERR_FILENO, &info) != 0) {
        return true;
    }
    const bool socket = S_ISSOCK(info.st_mode);
    const int64_t deadline = tddp_deadline_after_ms(grace_ms);
    int fd = open_to_write(&info, &own);
    bool room = own || socket || S_ISREG(info.st_mode) || await_room(fd, deadline);
    size_t done = 0;
    while (room && done < length) {
        ssize_t size = socket ? send(fd, line + done, length - done, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : write(fd, line + done, length - done);
        if (size > 0) {
            done += (size_t)size;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            room = await_room(fd, deadline);
        } else if (errno != EINTR) {
            break;
        }
    }
    if (own) {
        tddp_close(fd);
    }
    return room;
}

/* Says how many lines were lost; false if there is no room for that either. */
static bool tell_losses(void)
{
    char line[128];
    uint64_t count = atomic_load(&lost);
    if (count == 0) {
        return true;
    }
    int length = snprintf(line, sizeof line,
                          "[tddp] warn log: %llu lines were lost: nobody read standard error\n",
                          (unsigned long long)count);
    if (!put(line, (size_t)length, 0)) {
        return false;
    }
    atomic_fetch_sub(&lost, count);
    return true;
}

void tddp_log_to_stderr(const char *line)
{
    int saved = errno;
    bool written = tell_losses() && put(line, strlen(line), atomic_load(&stalled) ? 0 : GRACE_MS);
    if (!written) {
        atomic_fetch_add(&lost, 1);
    }
    atomic_store(&stalled, !written);
    errno = saved;
}

void tddp_log(tddp_log_level level, const char *room, const char *format, ...)
{
    if (!tddp_log_enabled(level)) {
        return;
    }
    int saved = errno;
    char line[LINE_BYTES];
    int head = snprintf(line, sizeof line, "[tddp] %s %s: ", level_names[level], room);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + head, sizeof line - (size_t)head - 1, format, arguments);
    va_end(arguments);
    (void)tddp_mask_controls(line); /* parts of it may come from other processes */
    tddp_log_sink sink = atomic_load(&current_sink);
    if (sink) {
        sink(level, room, line + head, atomic_load(&current_sink_data));
    } else {
        size_t length = strlen(line);
        line[length] = '\n';
        line[length + 1] = '\0';
        tddp_log_to_stderr(line);
    }
    errno = saved;
}
