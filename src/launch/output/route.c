/*
 * Passes one stream on: to its log file byte for byte as it comes, to the console and the filtered
 * log by whole lines. What waits for the end of its line is bounded (lines.h). On a terminal a
 * progress bar, which is one line written over and over after carriage returns, shows in place; of
 * several workers' bars one at a time. Main thread.
 */
#include <string.h>

#include "launch/output/route.h"

/* The length of the first line, with its newline if it has one. */
static size_t first_line(const char *data, size_t size)
{
    const char *newline = memchr(data, '\n', size);
    return newline ? (size_t)(newline - data) + 1 : size;
}

/* How much of a line is written over by what follows its last carriage return. */
static size_t overwritten(const char *data, size_t size)
{
    while (size > 0 && (data[size - 1] == '\n' || data[size - 1] == '\r')) {
        size--;
    }
    const char *last = size > 0 ? memrchr(data, '\r', size) : NULL;
    return last ? (size_t)(last - data) + 1 : 0;
}

static tddp_status draw(tddp_launch_route *route, const char *line, size_t size)
{
    size_t hidden = overwritten(line, size);
    route->drawn = line[size - 1] != '\n';
    return tddp_launch_console_write_over(route->console, route->stream, route, route->prefix,
                                          line + hidden, size - hidden);
}

static tddp_status show_live(tddp_launch_route *route, const char *data, size_t size)
{
    tddp_status status = TDDP_OK;
    while (size > 0 && status == TDDP_OK) {
        size_t length = first_line(data, size);
        if (route->drawn || memchr(data, '\r', length)) {
            status = draw(route, data, length);
        } else {
            status = tddp_launch_console_write_line(route->console, route->stream, route,
                                                    route->prefix, data, length);
        }
        data += length;
        size -= length;
    }
    return status;
}

static tddp_status show(tddp_launch_route *route, const char *data, size_t size)
{
    tddp_status status = TDDP_OK;
    if (route->live) {
        return show_live(route, data, size);
    }
    while (size > 0 && status == TDDP_OK) {
        size_t length = route->prefix ? first_line(data, size) : size;
        status = tddp_launch_console_write_line(route->console, route->stream, route, route->prefix,
                                                data, length);
        data += length;
        size -= length;
    }
    return status;
}

static tddp_status append_marked(tddp_bytes *matched, const char *mark, const char *line,
                                 size_t size)
{
    tddp_status status = tddp_bytes_append(matched, mark, strlen(mark));
    if (status == TDDP_OK) {
        status = tddp_bytes_append(matched, line, size);
    }
    if (status == TDDP_OK && line[size - 1] != '\n') {
        status = tddp_bytes_append(matched, "\n", 1);
    }
    return status;
}

static tddp_status duplicate(const tddp_launch_route *route, const char *data, size_t size)
{
    tddp_bytes matched = {0};
    tddp_status status = TDDP_OK;
    while (size > 0 && status == TDDP_OK) {
        size_t length = first_line(data, size);
        if (tddp_launch_filters_match(route->filters, data, length)) {
            status = append_marked(&matched, route->mark, data, length);
        }
        data += length;
        size -= length;
    }
    if (status == TDDP_OK) {
        tddp_launch_log_file_write(route->filtered, matched.data, matched.size, route->console);
    }
    tddp_bytes_free(&matched);
    return status;
}

static tddp_status pass_lines(tddp_launch_route *route, const char *data, size_t size)
{
    tddp_status status = TDDP_OK;
    if (size > 0 && route->shown && !route->raw) {
        status = show(route, data, size);
    }
    if (size > 0 && route->filters && status == TDDP_OK) {
        status = duplicate(route, data, size);
    }
    return status;
}

/* Shows a line that has no end yet, if it is one that is written over. */
static tddp_status show_unfinished(tddp_launch_route *route, bool returned)
{
    tddp_bytes *pending = &route->lines.pending;
    if (!route->live || !route->shown || route->raw || pending->size == 0 ||
        !(returned || route->drawn) ||
        !tddp_launch_console_is_free(route->console, route->stream, route)) {
        return TDDP_OK;
    }
    tddp_status status = draw(route, pending->data, pending->size);
    if (!route->filters) {
        tddp_launch_lines_consume(&route->lines, overwritten(pending->data, pending->size));
    }
    return status;
}

/* Splits off whole lines; those that come whole are not copied. */
static tddp_status take_lines(tddp_launch_route *route, const char *data, size_t size)
{
    tddp_status status = TDDP_OK;
    tddp_bytes *pending = &route->lines.pending;
    if (pending->size == 0) {
        const char *newline = size > 0 ? memrchr(data, '\n', size) : NULL;
        size_t whole = newline ? (size_t)(newline - data) + 1 : 0;
        status = pass_lines(route, data, whole);
        data += whole;
        size -= whole;
    }
    if (status == TDDP_OK && size > 0) {
        status = tddp_bytes_append(pending, data, size);
        size_t ready = status == TDDP_OK ? tddp_launch_lines_ready(&route->lines) : 0;
        if (ready > 0) {
            status = pass_lines(route, pending->data, ready);
            tddp_launch_lines_consume(&route->lines, ready);
        }
        if (status == TDDP_OK) {
            status = show_unfinished(route, memchr(data, '\r', size) != NULL);
        }
    }
    return status;
}

static tddp_status end_lines(tddp_launch_route *route)
{
    tddp_bytes *rest = &route->lines.pending;
    tddp_status status = pass_lines(route, rest->data, rest->size);
    if (status == TDDP_OK && rest->size > 0 && route->shown && !route->raw) {
        /* The next worker's line must not go on behind it. */
        status =
            tddp_launch_console_write_line(route->console, route->stream, route, NULL, "\n", 1);
    }
    tddp_launch_lines_free(&route->lines);
    return status;
}

tddp_status tddp_launch_route_take(tddp_launch_route *route, const char *data, size_t size,
                                   bool at_end)
{
    tddp_status status = TDDP_OK;
    tddp_launch_log_file_write(&route->file, data, size, route->console);
    if (route->shown && route->raw) {
        status = tddp_launch_console_write(route->console, route->stream, data, size);
    }
    if ((route->shown && !route->raw) || route->filters) {
        if (status == TDDP_OK) {
            status = take_lines(route, data, size);
        }
        if (status == TDDP_OK && at_end) {
            status = end_lines(route);
        }
    }
    return status;
}

void tddp_launch_route_free(tddp_launch_route *route)
{
    tddp_launch_lines_free(&route->lines);
    tddp_launch_log_file_close(&route->file);
}
