/*
 * Parses an HTTP/1 request as far as needed: method, path, and where it ends. What headers say does
 * not matter. Any thread.
 */
#include <string.h>

#include "launch/health/health.h"

static bool starts_with(const char *data, size_t size, const char *text)
{
    size_t length = strlen(text);
    return size >= length && memcmp(data, text, length) == 0;
}

/* An empty line ends the headers. */
static bool is_complete(const char *data, size_t size)
{
    return memmem(data, size, "\r\n\r\n", 4) || memmem(data, size, "\n\n", 2);
}

/* No client of ours sends control characters; one that speaks TLS does. */
static bool is_text(const char *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = (unsigned char)data[i];
        if ((byte < ' ' && byte != '\r' && byte != '\n' && byte != '\t') || byte == 0x7f) {
            return false;
        }
    }
    return true;
}

/* "/health", "/healthz", "/health/live", "/health?all". */
static bool is_health(const char *path, size_t size)
{
    static const char name[] = "/health";
    size_t at = sizeof name - 1;
    if (!starts_with(path, size, name)) {
        return false;
    }
    at += at < size && path[at] == 'z';
    return at == size || path[at] == '?' || path[at] == '/';
}

/* "GET /health HTTP/1.1" */
static tddp_launch_health_status parse_line(const char *line, size_t size, bool *head)
{
    const char *end = line + size;
    const char *path = memchr(line, ' ', size);
    const char *version = path ? memchr(path + 1, ' ', (size_t)(end - path - 1)) : NULL;
    if (!version || path == line || path[1] != '/' ||
        !starts_with(version, (size_t)(end - version), " HTTP/1.")) {
        return TDDP_LAUNCH_HEALTH_BAD;
    }
    *head = starts_with(line, size, "HEAD ");
    if (!*head && !starts_with(line, size, "GET ")) {
        return TDDP_LAUNCH_HEALTH_METHOD;
    }
    return is_health(path + 1, (size_t)(version - path - 1)) ? TDDP_LAUNCH_HEALTH_OK
                                                             : TDDP_LAUNCH_HEALTH_NOT_FOUND;
}

tddp_launch_health_status tddp_launch_health_parse(const char *data, size_t size, bool *head)
{
    *head = false;
    if (!is_text(data, size)) {
        return TDDP_LAUNCH_HEALTH_BAD;
    }
    if (!is_complete(data, size)) {
        return size >= TDDP_LAUNCH_HEALTH_REQUEST_BYTES ? TDDP_LAUNCH_HEALTH_TOO_LARGE
                                                        : TDDP_LAUNCH_HEALTH_INCOMPLETE;
    }
    const char *end = memchr(data, '\n', size);
    return parse_line(data, (size_t)(end - data), head);
}
