/*
 * JSON for programs that read the outcome of a job, and writing it to a file. Keys are ours and
 * need no escapes; values may be any bytes. Main thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launch/report/json.h"

static void add(tddp_launch_json *json, const char *text)
{
    json->failed |= tddp_bytes_append(&json->text, text, strlen(text)) != TDDP_OK;
}

/* Adds what stands before a value (the comma after the one before it, a new line, its key), and the
 * value. */
static void add_value(tddp_launch_json *json, const char *key, const char *value)
{
    add(json, json->follows ? ",\n" : json->text.size > 0 ? "\n" : "");
    if (key) {
        add(json, "\"");
        add(json, key);
        add(json, "\": ");
    }
    add(json, value);
    json->follows = true;
}

void tddp_launch_json_open(tddp_launch_json *json, const char *key, char bracket)
{
    add_value(json, key, bracket == '{' ? "{" : "[");
    json->follows = false;
}

void tddp_launch_json_close(tddp_launch_json *json, char bracket)
{
    add(json, bracket == '{' ? "}" : "]");
    json->follows = true;
}

void tddp_launch_json_text(tddp_launch_json *json, const char *key, const char *value)
{
    add_value(json, key, value ? "" : "null");
    json->failed |= value && tddp_bytes_append_json(&json->text, value) != TDDP_OK;
}

void tddp_launch_json_number(tddp_launch_json *json, const char *key, int64_t value)
{
    char text[32];
    (void)snprintf(text, sizeof text, "%" PRId64, value);
    add_value(json, key, text);
}

void tddp_launch_json_bool(tddp_launch_json *json, const char *key, bool value)
{
    add_value(json, key, value ? "true" : "false");
}

/* --- files ----------------------------------------------------------------------------------- */

tddp_status tddp_launch_write_file(const char *path, const char *data, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
    ssize_t wrote = 0;
    while (fd >= 0 && size > 0 &&
           ((wrote = write(fd, data, size)) > 0 || (wrote < 0 && errno == EINTR))) {
        data += wrote > 0 ? wrote : 0;
        size -= wrote > 0 ? (size_t)wrote : 0;
    }
    tddp_close(fd);
    return fd >= 0 && size == 0
               ? TDDP_OK
               : tddp_fail(TDDP_SYSTEM, "cannot write %s: %s", path, strerror(errno));
}
