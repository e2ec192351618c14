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

static bool write_all(int fd, const char *data, size_t size)
{
    while (size > 0) {
        ssize_t wrote = write(fd, data, size);
        if (wrote < 0 && errno != EINTR) {
            return false;
        }
        data += wrote > 0 ? wrote : 0;
        size -= wrote > 0 ? (size_t)wrote : 0;
    }
    return true;
}

tddp_status tddp_launch_write_file(const char *path, const char *data, size_t size)
{
    struct stat found;
    bool there = stat(path, &found) == 0;
    bool ordinary = !there || S_ISREG(found.st_mode);
    /* A link stays, and what it leads to is replaced. */
    char *real = there ? realpath(path, NULL) : NULL;
    const char *target = real ? real : path;
    char *draft = ordinary ? tddp_format("%s.%d", target, (int)getpid()) : NULL;
    if (draft) {
        (void)unlink(draft); /* of a process long gone that had our number */
    }
    int fd = draft ? open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)
                   : open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    tddp_status status = TDDP_OK;
    if (fd < 0 || !write_all(fd, data, size) || (draft && rename(draft, target) != 0)) {
        status = tddp_fail(TDDP_SYSTEM, "cannot write %s: %s", path, strerror(errno));
        (void)(fd >= 0 && draft && unlink(draft));
    }
    tddp_close(fd);
    free(draft);
    free(real);
    return status;
}
