/*
 * Writes to standard output and standard error without blocking, since a blocked write would delay
 * the handling of signals. The descriptors are shared with other programs (the shell's terminal),
 * so they are not switched to non-blocking: a pipe or terminal is reopened by its name in /dev/fd,
 * which gives a description of our own. Log files are written at once, as soon as something was
 * read. Main thread, but for log_line().
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/output/console.h"

/* Beyond this much waiting workers wait, and lines of tddp_log() stay in their pipe; torchrun's own
 * lines are lost beyond twice as much. */
static const size_t full_bytes = (size_t)1 << 20;

static const char own_head[] = "torchrun: ";

enum {
    SAID_BYTES = 8192 + 256, /* other nodes' messages and what stands before; the rest is cut */
    KEPT_CAPACITY = 1 << 18, /* memory kept for what comes next */
    READ_BYTES = 1 << 14
};

/* --- lines of tddp_log() --------------------------------------------------------------------- */

/* A pipe is the queue between all threads and the loop: it is bounded, and a line, which has its
 * NUL behind it and is shorter than PIPE_BUF, is in it wholly or not at all. It is never closed: a
 * thread that the rendezvous has stopped waiting for may log until the process ends. */
static int log_pipe[2] = {-1, -1};
static _Atomic uint64_t log_lost; /* lines for which it had no room */

static void log_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level, (void)room, (void)data;
    size_t size = strlen(text) + 1;
    if (write(log_pipe[1], text, size) != (ssize_t)size) {
        atomic_fetch_add(&log_lost, 1);
    }
}

/* The end of the run need not wait for these lines: clients that are no part of the job may be the
 * reason for them. */
static tddp_status on_logged(void *data)
{
    tddp_launch_console *console = data;
    tddp_bytes *lines = &console->logged;
    tddp_launch_sink *sink = console->streams[TDDP_LAUNCH_ERR];
    ssize_t got = 1;
    console->lost += atomic_exchange(&log_lost, 0);
    while (got > 0 && !tddp_launch_sink_full(sink) &&
           tddp_bytes_reserve(lines, READ_BYTES) == TDDP_OK) {
        got = read(console->logs.fd, lines->data + lines->size, READ_BYTES);
        lines->size += got > 0 ? (size_t)got : 0;
        size_t done = 0;
        const char *end;
        while ((end = memchr(lines->data + done, '\0', lines->size - done))) {
            size_t owed = sink->owed;
            tddp_launch_console_put(console, own_head, lines->data + done);
            sink->owed = owed;
            done = (size_t)(end - lines->data) + 1;
        }
        tddp_bytes_consume(lines, done);
    }
    return TDDP_OK;
}

static tddp_status open_log_pipe(tddp_launch_console *console, tddp_launch_loop *loop)
{
    if (log_pipe[0] < 0 && pipe2(log_pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
        return tddp_fail_errno("pipe");
    }
    console->logs = (tddp_launch_source){.fd = log_pipe[0],
                                         .events = POLLIN,
                                         .priority = TDDP_LAUNCH_PRIORITY_EVENT,
                                         .callback = on_logged,
                                         .data = console};
    tddp_log_set_sink(log_line, NULL);
    return tddp_launch_loop_add(loop, &console->logs);
}

/* --- opening and closing --------------------------------------------------------------------- */

static tddp_status on_room(void *data)
{
    tddp_launch_console_flush(data);
    return TDDP_OK;
}

static tddp_status open_stream(tddp_launch_console *console, int stream, tddp_launch_loop *loop)
{
    char path[32];
    struct stat found = {0};
    int fd = stream == TDDP_LAUNCH_OUT ? STDOUT_FILENO : STDERR_FILENO;
    (void)fstat(fd, &found);
    bool terminal = S_ISCHR(found.st_mode) && isatty(fd);
    bool blocks = terminal || S_ISFIFO(found.st_mode) || S_ISSOCK(found.st_mode);
    (void)snprintf(path, sizeof path, "/dev/fd/%d", fd);
    int own = blocks ? open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
    tddp_launch_sink *sink = &console->sinks[stream];
    *sink = (tddp_launch_sink){
        .fd = own >= 0 ? own : fd,
        .name = stream == TDDP_LAUNCH_OUT ? "standard output" : "standard error",
        .own = own >= 0,
        .careful = blocks && own < 0,
        .terminal = terminal,
        .at_line = true,
    };
    sink->source = (tddp_launch_source){.fd = sink->fd,
                                        .priority = TDDP_LAUNCH_PRIORITY_EVENT,
                                        .callback = on_room,
                                        .data = console};
    return tddp_launch_loop_add(loop, &sink->source);
}

tddp_status tddp_launch_console_open(tddp_launch_console *console, tddp_launch_loop *loop)
{
    struct stat out;
    struct stat err;
    bool same = fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
                out.st_dev == err.st_dev && out.st_ino == err.st_ino;
    console->streams[TDDP_LAUNCH_OUT] = &console->sinks[TDDP_LAUNCH_OUT];
    console->streams[TDDP_LAUNCH_ERR] = &console->sinks[same ? TDDP_LAUNCH_OUT : TDDP_LAUNCH_ERR];
    tddp_status first = open_stream(console, TDDP_LAUNCH_OUT, loop);
    tddp_status second = open_stream(console, TDDP_LAUNCH_ERR, loop);
    tddp_status status = first != TDDP_OK ? first : second;
    return status == TDDP_OK ? open_log_pipe(console, loop) : status;
}

void tddp_launch_console_close(tddp_launch_console *console)
{
    if (console->logs.callback) {
        (void)!on_logged(console);
    }
    tddp_launch_console_flush(console);
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        if (console->sinks[i].own) {
            tddp_close(console->sinks[i].fd);
        }
        tddp_bytes_free(&console->sinks[i].queue);
    }
    tddp_bytes_free(&console->logged);
}

tddp_status tddp_launch_sink_create(tddp_launch_sink *sink, char *path)
{
    *sink = (tddp_launch_sink){.fd = -1, .name = path, .at_line = true};
    if (!path) {
        return TDDP_OUT_OF_MEMORY;
    }
    sink->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY, 0644);
    return sink->fd >= 0 ? TDDP_OK : tddp_fail_errno(path);
}

void tddp_launch_sink_close(tddp_launch_sink *sink)
{
    tddp_close(sink->fd);
    free((char *)sink->name);
    tddp_bytes_free(&sink->queue);
    *sink = (tddp_launch_sink){.fd = -1};
}

/* --- queueing -------------------------------------------------------------------------------- */

static size_t waiting(const tddp_launch_sink *sink)
{
    return sink->queue.size - sink->sent;
}

bool tddp_launch_sink_full(const tddp_launch_sink *sink)
{
    return waiting(sink) >= full_bytes;
}

static tddp_status append(tddp_launch_sink *sink, const char *data, size_t size)
{
    tddp_status status = tddp_bytes_append(&sink->queue, data, size);
    sink->owed = sink->queue.size;
    sink->source.events = POLLOUT;
    return status;
}

/* After a loss: takes away the rest of a line that it broke off. The file may end within a line; an
 * empty line there is also a mark of the gap. */
static tddp_status start_line(tddp_launch_sink *sink, const char **data, size_t *size)
{
    if (!sink->at_line) {
        const char *newline = memchr(*data, '\n', *size);
        size_t rest = newline ? (size_t)(newline - *data) + 1 : *size;
        *data += rest;
        *size -= rest;
        sink->at_line = newline != NULL;
    }
    if (*size == 0) {
        return TDDP_OK;
    }
    sink->behind = false;
    return append(sink, "\n", 1);
}

tddp_status tddp_launch_sink_put(tddp_launch_sink *sink, const void *writer, const char *prefix,
                                 const char *data, size_t size)
{
    tddp_status status = TDDP_OK;
    if (sink->fd < 0 || sink->abandoned || size == 0) {
        return TDDP_OK;
    }
    if (sink->behind) {
        status = start_line(sink, &data, &size);
    } else if (!sink->at_line && sink->writer != writer) {
        status = append(sink, "\n", 1);
        sink->at_line = true;
    }
    if (status != TDDP_OK || size == 0) {
        return status;
    }
    if (prefix && (sink->at_line || (sink->returned && *data != '\n'))) {
        status = append(sink, prefix, strlen(prefix));
    }
    sink->writer = writer;
    sink->at_line = data[size - 1] == '\n';
    sink->returned = data[size - 1] == '\r';
    return status == TDDP_OK ? append(sink, data, size) : status;
}

/* --- torchrun's own lines -------------------------------------------------------------------- */

void tddp_launch_console_put(tddp_launch_console *console, const char *head, const char *text)
{
    char indent[32];
    tddp_launch_sink *sink = console->streams[TDDP_LAUNCH_ERR];
    if (sink->abandoned || waiting(sink) >= 2 * full_bytes) {
        console->lost++;
        return;
    }
    if (console->lost > 0) {
        uint64_t lost = console->lost;
        console->lost = 0;
        tddp_launch_console_log(console, "%" PRIu64 " lines were lost: nobody read standard error",
                                lost);
    }
    /* One of another node's lines must not look like one of torchrun's. */
    (void)snprintf(indent, sizeof indent, "%*s", (int)strlen(head), "");
    size_t from = sink->queue.size;
    do {
        /* Short memory costs the text alone. */
        size_t length = strcspn(text, "\n");
        (void)!tddp_launch_sink_put(sink, console, head, text, length);
        (void)!tddp_launch_sink_put(sink, console, head, "\n", 1);
        text += length + (text[length] == '\n');
        head = indent;
    } while (*text != '\0');
    if (tddp_bytes_append(&sink->queue, "", 1) == TDDP_OK) {
        sink->queue.size = from + strlen(tddp_mask_controls(sink->queue.data + from));
        sink->owed = sink->queue.size;
    }
}

void tddp_launch_console_log(tddp_launch_console *console, const char *format, ...)
{
    char text[SAID_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    tddp_launch_console_put(console, own_head, text);
}

/* --- writing --------------------------------------------------------------------------------- */

static ssize_t write_some(const tddp_launch_sink *sink)
{
    struct pollfd ready = {.fd = sink->fd, .events = POLLOUT};
    size_t size = waiting(sink);
    if (sink->careful) {
        /* What is ready takes as much as this at once. */
        size = size < _POSIX_PIPE_BUF ? size : _POSIX_PIPE_BUF;
        if (poll(&ready, 1, 0) != 1) {
            errno = EAGAIN;
            return -1;
        }
    }
    return write(sink->fd, sink->queue.data + sink->sent, size);
}

static void lose(tddp_launch_sink *sink, tddp_launch_console *console)
{
    int error = errno;
    sink->sent = sink->queue.size;
    sink->behind = true;
    sink->abandoned = error == EPIPE;
    if (!sink->reported && !sink->abandoned) {
        sink->reported = true;
        tddp_launch_console_log(console, "%s: %s; what cannot be written there is lost", sink->name,
                                strerror(error));
    }
}

void tddp_launch_sink_flush(tddp_launch_sink *sink, tddp_launch_console *console)
{
    tddp_bytes *queue = &sink->queue;
    while (waiting(sink) > 0) {
        ssize_t wrote = write_some(sink);
        if (wrote >= 0) {
            sink->sent += (size_t)wrote;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            break;
        } else if (errno != EINTR) {
            lose(sink, console);
            break;
        }
    }
    if (waiting(sink) == 0) {
        queue->size = 0;
        sink->sent = 0;
        sink->owed = 0;
        sink->source.events = 0;
        if (queue->capacity > KEPT_CAPACITY) {
            tddp_bytes_free(queue);
        }
    } else if (sink->sent > queue->size / 2) {
        /* Only now: moving the rest after each write would cost the square of its size. */
        tddp_bytes_consume(queue, sink->sent);
        sink->owed -= sink->sent < sink->owed ? sink->sent : sink->owed;
        sink->sent = 0;
    }
}

void tddp_launch_console_flush(tddp_launch_console *console)
{
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_sink_flush(&console->sinks[i], console);
    }
    /* Ahead of what waits already nothing is taken. */
    console->logs.events = tddp_launch_sink_full(console->streams[TDDP_LAUNCH_ERR]) ? 0 : POLLIN;
}

bool tddp_launch_console_pending(const tddp_launch_console *console)
{
    const tddp_launch_sink *sinks = console->sinks;
    return sinks[0].sent < sinks[0].owed || sinks[1].sent < sinks[1].owed;
}

bool tddp_launch_console_abandoned(const tddp_launch_console *console)
{
    return console->sinks[0].abandoned || console->sinks[1].abandoned;
}
