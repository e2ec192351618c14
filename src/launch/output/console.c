/*
 * Writes to standard output and standard error without blocking, since a blocked write
 * would delay the handling of signals. The descriptors are shared with other programs (the shell's
 * terminal), so they are not switched to non-blocking: a pipe or terminal is reopened by its
 * name in /dev/fd, which gives a description of our own. Main thread only.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/output/console.h"

/* Beyond this much waiting workers wait, and what other threads log is lost; torchrun's own lines
 * are lost beyond twice as much. */
static const size_t full_bytes = (size_t)1 << 20;

static const char own_head[] = "torchrun: ";

enum {
    SAID_BYTES = 8192 + 256, /* other nodes' messages and what stands before; the rest is cut */
    CAREFUL_BYTES = 512,     /* POSIX's least PIPE_BUF: a pipe ready for writing takes it at once */
    KEPT_CAPACITY = 1 << 18  /* memory kept for what comes next */
};

static void open_sink(tddp_launch_sink *sink, int fd)
{
    char path[32];
    struct stat found;
    *sink = (tddp_launch_sink){.fd = fd, .kind = TDDP_LAUNCH_SINK_CAREFUL, .at_line = true};
    if (fstat(fd, &found) != 0) {
        sink->error = errno;
        return;
    }
    if (S_ISSOCK(found.st_mode)) {
        sink->kind = TDDP_LAUNCH_SINK_SOCKET;
        return;
    }
    sink->terminal = S_ISCHR(found.st_mode) && isatty(fd);
    if (!S_ISFIFO(found.st_mode) && !sink->terminal) {
        sink->kind = TDDP_LAUNCH_SINK_PLAIN;
        return;
    }
    (void)snprintf(path, sizeof path, "/dev/fd/%d", fd);
    int own = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (own >= 0) {
        sink->fd = own;
        sink->kind = TDDP_LAUNCH_SINK_REOPENED;
    }
}

static bool same_file(int a, int b)
{
    struct stat first;
    struct stat second;
    return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

void tddp_launch_console_open(tddp_launch_console *console)
{
    open_sink(&console->sinks[TDDP_LAUNCH_OUT], STDOUT_FILENO);
    open_sink(&console->sinks[TDDP_LAUNCH_ERR], STDERR_FILENO);
    bool same = same_file(STDOUT_FILENO, STDERR_FILENO);
    console->streams[TDDP_LAUNCH_OUT] = &console->sinks[TDDP_LAUNCH_OUT];
    console->streams[TDDP_LAUNCH_ERR] = &console->sinks[same ? TDDP_LAUNCH_OUT : TDDP_LAUNCH_ERR];
}

void tddp_launch_console_close(tddp_launch_console *console)
{
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_sink *sink = &console->sinks[i];
        if (sink->kind == TDDP_LAUNCH_SINK_REOPENED) {
            tddp_close(sink->fd);
        }
        tddp_bytes_free(&sink->queue);
        *sink = (tddp_launch_sink){.fd = -1, .error = EBADF};
    }
}

static tddp_status on_room(void *data, int events)
{
    (void)events;
    tddp_launch_console_flush(data);
    return TDDP_OK;
}

tddp_status tddp_launch_console_watch(tddp_launch_console *console, tddp_launch_loop *loop)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; i < TDDP_LAUNCH_STREAMS && status == TDDP_OK; i++) {
        tddp_launch_sink *sink = &console->sinks[i];
        sink->source = (tddp_launch_source){
            .fd = sink->fd,
            .priority = TDDP_LAUNCH_PRIORITY_EVENT,
            .callback = on_room,
            .data = console,
        };
        status = tddp_launch_loop_add(loop, &sink->source);
    }
    return status;
}

static size_t waiting(const tddp_launch_sink *sink)
{
    return sink->queue.size - sink->sent;
}

static tddp_status queue(tddp_launch_sink *sink, const void *writer, const char *data, size_t size)
{
    sink->at_line = data[size - 1] == '\n';
    sink->writer = writer;
    sink->source.events = POLLOUT;
    tddp_status status = tddp_bytes_append(&sink->queue, data, size);
    sink->owed = sink->queue.size;
    return status;
}

tddp_status tddp_launch_console_write(tddp_launch_console *console, int stream, const char *data,
                                      size_t size)
{
    tddp_launch_sink *sink = console->streams[stream];
    return sink->error || size == 0 ? TDDP_OK : queue(sink, NULL, data, size);
}

tddp_status tddp_launch_console_write_line(tddp_launch_console *console, int stream,
                                           const void *writer, const char *prefix, const char *data,
                                           size_t size)
{
    tddp_launch_sink *sink = console->streams[stream];
    tddp_status status = TDDP_OK;
    if (sink->error || size == 0) {
        return TDDP_OK;
    }
    if (!sink->at_line && sink->writer != writer) {
        status = queue(sink, NULL, "\n", 1);
    }
    if (status == TDDP_OK && sink->at_line && prefix && *prefix != '\0') {
        status = tddp_bytes_append(&sink->queue, prefix, strlen(prefix));
    }
    return status == TDDP_OK ? queue(sink, writer, data, size) : status;
}

tddp_status tddp_launch_console_write_over(tddp_launch_console *console, int stream,
                                           const void *writer, const char *prefix, const char *data,
                                           size_t size)
{
    static const char erase[] = "\r\033[K";
    tddp_launch_sink *sink = console->streams[stream];
    tddp_status status = TDDP_OK;
    if (sink->error || size == 0) {
        return TDDP_OK;
    }
    if (!sink->at_line && sink->writer == writer) {
        status = queue(sink, writer, erase, sizeof erase - 1);
        sink->at_line = true;
    }
    return status == TDDP_OK
               ? tddp_launch_console_write_line(console, stream, writer, prefix, data, size)
               : status;
}

bool tddp_launch_console_is_free(const tddp_launch_console *console, int stream, const void *writer)
{
    const tddp_launch_sink *sink = console->streams[stream];
    return waiting(sink) == 0 && (sink->at_line || sink->writer == writer);
}

bool tddp_launch_console_is_terminal(const tddp_launch_console *console, int stream)
{
    return console->streams[stream]->terminal;
}

/* --- what torchrun itself says --------------------------------------------------------------- */

static void queue_text(tddp_launch_sink *sink, const char *text)
{
    if (*text != '\0') {
        (void)!queue(sink, NULL, text, strlen(text)); /* short memory costs the text alone */
    }
}

/* Whether there is room for one more line; those that were lost before are reported first. */
static bool has_room(tddp_launch_console *console, size_t limit)
{
    char text[96];
    tddp_launch_sink *sink = console->streams[TDDP_LAUNCH_ERR];
    if (sink->error || waiting(sink) >= limit) {
        console->lost++;
        return false;
    }
    if (console->lost > 0) {
        (void)snprintf(text, sizeof text,
                       "%storchrun: %" PRIu64 " lines were lost: nobody read standard error\n",
                       sink->at_line ? "" : "\n", console->lost);
        console->lost = 0;
        queue_text(sink, text);
    }
    return true;
}

/* Queues `text`, which is overwritten, behind `head`. Further lines are indented: one of another
 * node's must not look like one of torchrun's. */
static void queue_lines(tddp_launch_sink *sink, const char *head, char *text)
{
    char indent[32];
    char *rest = tddp_mask_controls(text);
    (void)snprintf(indent, sizeof indent, "%*s", (int)strlen(head), "");
    queue_text(sink, sink->at_line ? "" : "\n");
    do {
        queue_text(sink, head);
        queue_text(sink, strsep(&rest, "\n"));
        queue_text(sink, "\n");
        head = indent;
    } while (rest && *rest != '\0');
}

void tddp_launch_console_say(tddp_launch_console *console, const char *format, ...)
{
    char text[SAID_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (has_room(console, 2 * full_bytes)) {
        queue_lines(console->streams[TDDP_LAUNCH_ERR], own_head, text);
    }
}

void tddp_launch_console_log(tddp_launch_console *console, char *text)
{
    tddp_launch_sink *sink = console->streams[TDDP_LAUNCH_ERR];
    size_t owed = sink->owed;
    if (has_room(console, full_bytes)) {
        queue_lines(sink, own_head, text);
        sink->owed = owed;
    }
}

void tddp_launch_console_put(tddp_launch_console *console, const char *head, const char *text)
{
    char *copy = has_room(console, 2 * full_bytes) ? tddp_copy_string(text) : NULL;
    if (copy) {
        queue_lines(console->streams[TDDP_LAUNCH_ERR], head, copy);
    }
    free(copy);
}

void tddp_launch_console_lose(tddp_launch_console *console, uint64_t lines)
{
    console->lost += lines;
}

/* --- writing --------------------------------------------------------------------------------- */

static ssize_t write_some(const tddp_launch_sink *sink, const char *data, size_t size)
{
    struct pollfd ready = {.fd = sink->fd, .events = POLLOUT};
    switch (sink->kind) {
    case TDDP_LAUNCH_SINK_SOCKET:
        return send(sink->fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    case TDDP_LAUNCH_SINK_CAREFUL:
        if (poll(&ready, 1, 0) != 1) {
            errno = EAGAIN;
            return -1;
        }
        return write(sink->fd, data, size < CAREFUL_BYTES ? size : CAREFUL_BYTES);
    case TDDP_LAUNCH_SINK_PLAIN:
    case TDDP_LAUNCH_SINK_REOPENED:
        break;
    }
    return write(sink->fd, data, size);
}

static void flush_sink(tddp_launch_sink *sink)
{
    tddp_bytes *queue = &sink->queue;
    while (!sink->error && sink->sent < queue->size) {
        ssize_t wrote = write_some(sink, queue->data + sink->sent, queue->size - sink->sent);
        if (wrote >= 0) {
            sink->sent += (size_t)wrote;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            break;
        } else if (errno != EINTR) {
            sink->error = errno;
        }
    }
    if (sink->error || sink->sent == queue->size) {
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
        flush_sink(&console->sinks[i]);
    }
}

bool tddp_launch_console_full(const tddp_launch_console *console, int stream)
{
    return waiting(console->streams[stream]) >= full_bytes;
}

bool tddp_launch_console_pending(const tddp_launch_console *console)
{
    const tddp_launch_sink *sinks = console->sinks;
    return sinks[0].sent < sinks[0].owed || sinks[1].sent < sinks[1].owed;
}

bool tddp_launch_console_abandoned(tddp_launch_console *console)
{
    bool abandoned = false;
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_sink *sink = &console->sinks[i];
        if (sink->error && sink->error != EPIPE && !sink->told) {
            sink->told = true;
            tddp_launch_console_say(console, "standard %s: %s; what follows there is lost",
                                    i == TDDP_LAUNCH_OUT ? "output" : "error",
                                    strerror(sink->error));
        }
        abandoned |= sink->error == EPIPE;
    }
    return abandoned;
}
