/*
 * Passes one stream on: to its log file byte for byte as it comes, to the console and the filtered
 * log by whole lines, of which memory holds one at most. On a terminal a progress bar, which is one
 * line written over and over after carriage returns, shows in place; of several workers' bars one
 * at a time. Bytes are bytes: NULs and broken UTF-8 pass as they are. Main thread.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/output/route.h"

enum {
    KEPT_CAPACITY = 256 * 1024, /* memory kept for the next line */
    READ_BYTES = 64 * 1024,     /* as large as a pipe */
    MOST_READS = 256 /* of what a pipe holds, which is 64 KiB, or by a worker's wish some MiB */
};

/* How much at the start of `size` pending bytes may go out: a line, or what there is of one that is
 * too long; on a terminal also what comes before a carriage return and, of a bar, behind it. */
static size_t ready(tddp_launch_route *route, const char *data, size_t size)
{
    /* The terminal shows what this route has written of a line, or may show it. */
    bool live = route->shown && route->shown->terminal &&
                (route->shown->at_line || route->shown->writer == route);
    size_t scanned = live ? 0 : route->scanned;
    const char *newline = memchr(data + scanned, '\n', size - scanned);
    size_t line = newline ? (size_t)(newline - data) + 1 : size;
    const char *back = live ? memchr(data, '\r', line) : NULL;
    if (back && back + 1 != newline) {
        return (size_t)(back - data) + 1;
    }
    bool bar = live && !route->shown->at_line;
    return newline || bar || size >= TDDP_LAUNCH_LONGEST_LINE ? line : 0;
}

static tddp_status pass(const tddp_launch_route *route, const char *data, size_t size)
{
    tddp_status status = TDDP_OK;
    if (route->shown && !route->raw) {
        status = tddp_launch_sink_put(route->shown, route, route->marked ? route->prefix : NULL,
                                      data, size);
    }
    if (status == TDDP_OK && route->filters &&
        tddp_launch_filters_match(route->filters, data, size)) {
        status = tddp_launch_sink_put(route->filtered, route, route->prefix, data, size);
    }
    return status;
}

static tddp_status take_lines(tddp_launch_route *route, const char *data, size_t size, bool at_end)
{
    tddp_bytes *pending = &route->pending;
    tddp_status status = tddp_bytes_append(pending, data, size);
    bool unfinished = pending->size > 0
                          ? pending->data[pending->size - 1] != '\n'
                          : route->shown && !route->shown->at_line && route->shown->writer == route;
    if (status == TDDP_OK && at_end && unfinished) {
        /* The next worker's line must not go on behind it. */
        status = tddp_bytes_append(pending, "\n", 1);
    }
    size_t done = 0;
    size_t length;
    while (status == TDDP_OK && done < pending->size &&
           (length = ready(route, pending->data + done, pending->size - done)) > 0) {
        status = pass(route, pending->data + done, length);
        done += length;
        route->scanned = 0;
    }
    tddp_bytes_consume(pending, done);
    route->scanned = pending->size;
    if (pending->size == 0 && (at_end || pending->capacity > KEPT_CAPACITY)) {
        tddp_bytes_free(pending);
    }
    return status;
}

tddp_status tddp_launch_route_take(tddp_launch_route *route, const char *data, size_t size,
                                   bool at_end)
{
    tddp_status status = tddp_launch_sink_put(&route->file, NULL, NULL, data, size);
    tddp_launch_sink_flush(&route->file, route->console);
    if (status == TDDP_OK && route->shown && route->raw) {
        status = tddp_launch_sink_put(route->shown, NULL, NULL, data, size);
    }
    if (status == TDDP_OK && ((route->shown && !route->raw) || route->filters)) {
        status = take_lines(route, data, size, at_end);
    }
    if (route->filters) {
        tddp_launch_sink_flush(route->filtered, route->console);
    }
    return status;
}

/* --- the pipe -------------------------------------------------------------------------------- */

static tddp_status end_pipe(tddp_launch_route *route)
{
    tddp_launch_loop_remove(route->loop, &route->source);
    tddp_close(route->source.fd);
    route->source.fd = -1;
    return tddp_launch_route_take(route, NULL, 0, true);
}

static tddp_status on_pipe(void *data)
{
    tddp_launch_route *route = data;
    char read_bytes[READ_BYTES];
    ssize_t got;
    do {
        got = read(route->source.fd, read_bytes, sizeof read_bytes);
    } while (got < 0 && errno == EINTR);
    return got > 0 ? tddp_launch_route_take(route, read_bytes, (size_t)got, false)
                   : end_pipe(route);
}

tddp_status tddp_launch_route_watch(tddp_launch_route *route, tddp_launch_loop *loop, int fd)
{
    route->loop = loop;
    route->source = (tddp_launch_source){.fd = fd,
                                         .events = POLLIN,
                                         .priority = TDDP_LAUNCH_PRIORITY_STREAM,
                                         .callback = on_pipe,
                                         .data = route};
    return fd >= 0 ? tddp_launch_loop_add(loop, &route->source) : TDDP_OK;
}

void tddp_launch_route_drain(tddp_launch_route *route)
{
    tddp_status status = TDDP_OK; /* short memory costs output, nothing else */
    for (int i = 0; route->source.fd >= 0; i++) {
        /* Normally the stream has an end, since nobody is left to write; but its descriptor may
         * have been handed to a process that is not ours, which may write for ever. */
        struct pollfd readable = {.fd = route->source.fd, .events = POLLIN};
        bool more = i < MOST_READS && status == TDDP_OK && poll(&readable, 1, 0) == 1;
        status = more ? on_pipe(route) : end_pipe(route);
    }
}

void tddp_launch_route_free(tddp_launch_route *route)
{
    if (route->source.fd >= 0) {
        (void)!end_pipe(route);
    }
    tddp_bytes_free(&route->pending);
    tddp_launch_sink_close(&route->file);
    free(route->prefix);
}

/* --- prefixes -------------------------------------------------------------------------------- */

/* The macro whose name, of any length, is at `at`, with braces or without; or NULL. `*size`: what
 * is taken of the template. */
static const tddp_launch_macro *find_macro(const char *at, const tddp_launch_macro *macros,
                                           size_t *size)
{
    static const char name_characters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";
    bool braced = at[1] == '{';
    const char *name = at + 1 + braced;
    size_t length = strspn(name, name_characters);
    *size = 1 + length + 2 * (size_t)braced;
    for (; macros->name; macros++) {
        if (strlen(macros->name) == length && memcmp(macros->name, name, length) == 0 &&
            (!braced || name[length] == '}')) {
            return macros;
        }
    }
    return NULL;
}

char *tddp_launch_fill(const char *template, const tddp_launch_macro *macros)
{
    tddp_bytes text = {0};
    tddp_status status = TDDP_OK;
    for (const char *at = template; *at != '\0' && status == TDDP_OK;) {
        size_t size = strcspn(at, "$");
        const tddp_launch_macro *macro = size == 0 ? find_macro(at, macros, &size) : NULL;
        if (macro) {
            status = tddp_bytes_append(&text, macro->value, strlen(macro->value));
        } else if (*at == '$') {
            size = at[1] == '$' ? 2 : 1;
            status = tddp_bytes_append(&text, "$", 1);
        } else {
            status = tddp_bytes_append(&text, at, size);
        }
        at += size;
    }
    if (status != TDDP_OK || tddp_bytes_append(&text, "", 1) != TDDP_OK) {
        tddp_bytes_free(&text);
    }
    return text.data;
}
