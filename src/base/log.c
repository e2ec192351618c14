/*
 * Log lines for people: one write(2) a line, so that lines of several threads and processes do not
 * mix. The sink and the level are the library's only mutable globals beside fork-safety's.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tddp/log.h>

enum { LINE_BYTES = 2048, LEVEL_UNREAD = -1 };

static atomic_int threshold = LEVEL_UNREAD;
static _Atomic(tddp_log_sink) current_sink;
static _Atomic(void *) current_sink_data;

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
    tddp_log_sink sink = atomic_load(&current_sink);
    if (sink) {
        sink(level, room, line + head, atomic_load(&current_sink_data));
    } else {
        size_t length = strlen(line);
        line[length] = '\n';
        /* A line that cannot be written is lost: there is no other place for it. */
        ssize_t ignored = write(STDERR_FILENO, line, length + 1);
        (void)ignored;
    }
    errno = saved;
}
