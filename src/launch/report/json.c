/*
 * JSON for programs that read the outcome of a job, and writing it to a file. Keys are ours and
 * need no escapes; values may be any bytes. Main thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/report/json.h"

static void add(tddp_launch_json *json, const char *data, size_t size)
{
    json->failed |= tddp_bytes_append(&json->text, data, size) != TDDP_OK;
}

/* What stands before a value: the comma after the one before it, a new line, its key. */
static void begin(tddp_launch_json *json, const char *key)
{
    if (json->follows) {
        add(json, ",\n", 2);
    } else if (json->text.size > 0) {
        add(json, "\n", 1);
    }
    if (key) {
        add(json, "\"", 1);
        add(json, key, strlen(key));
        add(json, "\": ", 3);
    }
    json->follows = true;
}

void tddp_launch_json_open(tddp_launch_json *json, const char *key, char bracket)
{
    begin(json, key);
    add(json, &bracket, 1);
    json->follows = false;
}

void tddp_launch_json_close(tddp_launch_json *json, char bracket)
{
    char closing = bracket == '{' ? '}' : ']';
    add(json, &closing, 1);
    json->follows = true;
}

void tddp_launch_json_text(tddp_launch_json *json, const char *key, const char *value)
{
    begin(json, key);
    if (value) {
        json->failed |= tddp_bytes_append_json(&json->text, value) != TDDP_OK;
    } else {
        add(json, "null", 4);
    }
}

void tddp_launch_json_number(tddp_launch_json *json, const char *key, int64_t value)
{
    char text[32];
    int length = snprintf(text, sizeof text, "%" PRId64, value);
    tddp_launch_json_raw(json, key, text, (size_t)length);
}

void tddp_launch_json_bool(tddp_launch_json *json, const char *key, bool value)
{
    tddp_launch_json_raw(json, key, value ? "true" : "false", value ? 4 : 5);
}

void tddp_launch_json_raw(tddp_launch_json *json, const char *key, const char *data, size_t size)
{
    begin(json, key);
    add(json, data, size);
}

/* --- files ----------------------------------------------------------------------------------- */

static tddp_status cannot_write(const char *path)
{
    return tddp_fail(TDDP_SYSTEM, "cannot write %s: %s", path, strerror(errno));
}

static bool write_all(int fd, const char *data, size_t size)
{
    while (size > 0) {
        ssize_t wrote = write(fd, data, size);
        if (wrote < 0 && errno != EINTR) {
            return false;
        }
        if (wrote > 0) {
            data += wrote;
            size -= (size_t)wrote;
        }
    }
    return true;
}

static tddp_status write_and_close(int fd, const char *path, const char *data, size_t size)
{
    if (fd < 0) {
        return cannot_write(path);
    }
    tddp_status status = write_all(fd, data, size) ? TDDP_OK : cannot_write(path);
    tddp_close(fd);
    return status;
}

static tddp_status replace(const char *path, const char *data, size_t size)
{
    char *draft = tddp_format("%s.%d", path, (int)getpid());
    if (!draft) {
        return TDDP_OUT_OF_MEMORY;
    }
    (void)unlink(draft); /* of a process long gone that had our number */
    int fd = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    tddp_status status = write_and_close(fd, path, data, size);
    if (status == TDDP_OK && rename(draft, path) != 0) {
        status = cannot_write(path);
    }
    if (status != TDDP_OK && fd >= 0) {
        (void)unlink(draft);
    }
    free(draft);
    return status;
}

tddp_status tddp_launch_write_file(const char *path, const char *data, size_t size)
{
    struct stat found;
    bool there = stat(path, &found) == 0;
    if (there && !S_ISREG(found.st_mode)) {
        int fd = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        return write_and_close(fd, path, data, size);
    }
    /* A link stays, and what it leads to is replaced. */
    char *whole = there ? realpath(path, NULL) : NULL;
    tddp_status status = replace(whole ? whole : path, data, size);
    free(whole);
    return status;
}
