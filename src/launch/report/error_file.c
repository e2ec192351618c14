/*
 * Reads a worker's error file: as much JSON as that needs. The file is written by a program that
 * has just failed, perhaps half; so every step is bounded and what cannot be read is left out.
 * Main thread, after the worker has ended.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/report/error_file.h"

enum { MOST_BYTES = 1 << 20, MOST_DEPTH = 32, KEY_BYTES = 32 };

typedef struct reader {
    const char *at;
    const char *end;
    tddp_launch_error *found;
} reader;

static void skip_space(reader *in)
{
    while (in->at < in->end && memchr(" \t\r\n", *in->at, 4)) {
        in->at++;
    }
}

static bool take(reader *in, char wanted)
{
    skip_space(in);
    if (in->at < in->end && *in->at == wanted) {
        in->at++;
        return true;
    }
    return false;
}

static bool read_hex(reader *in, unsigned *out)
{
    unsigned value = 0;
    for (int i = 0; i < 4; i++, in->at++) {
        static const char digits[] = "0123456789abcdef0123456789ABCDEF";
        const char *digit = in->at < in->end ? memchr(digits, *in->at, 32) : NULL;
        if (!digit) {
            return false;
        }
        value = value * 16 + (unsigned)((digit - digits) % 16);
    }
    *out = value;
    return true;
}

static size_t encode_utf8(unsigned code, char out[4])
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | (code >> 6));
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | (code >> 12));
        out[1] = (char)(0x80 | ((code >> 6) & 0x3F));
        out[2] = (char)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | (code >> 18));
    out[1] = (char)(0x80 | ((code >> 12) & 0x3F));
    out[2] = (char)(0x80 | ((code >> 6) & 0x3F));
    out[3] = (char)(0x80 | (code & 0x3F));
    return 4;
}

/* After "\u": one code point, of one escape or of a surrogate pair. */
static bool read_unicode(reader *in, unsigned *out)
{
    unsigned low;
    if (!read_hex(in, out)) {
        return false;
    }
    if (*out >= 0xD800 && *out < 0xDC00 && in->end - in->at > 1 && in->at[0] == '\\' &&
        in->at[1] == 'u') {
        in->at += 2;
        if (!read_hex(in, &low)) {
            return false;
        }
        *out = 0x10000 + ((*out & 0x3FF) << 10) + (low & 0x3FF);
    }
    if (*out == 0 || (*out >= 0xD800 && *out < 0xE000)) {
        *out = '?'; /* NUL would end the text early, half a pair means nothing */
    }
    return true;
}

/* One character of a string, escapes undone; 0 at a fault. */
static size_t read_character(reader *in, char out[4])
{
    static const char escapes[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    unsigned code;
    out[0] = *in->at++;
    if (out[0] != '\\') {
        return 1;
    }
    if (in->at >= in->end) {
        return 0;
    }
    char letter = *in->at++;
    if (letter == 'u') {
        return read_unicode(in, &code) ? encode_utf8(code, out) : 0;
    }
    const char *escape = memchr(escapes, letter, sizeof escapes - 1);
    if (!escape) {
        return 0;
    }
    out[0] = meanings[escape - escapes];
    return 1;
}

/* A string; free(). NULL at a fault. */
static char *read_string(reader *in)
{
    tddp_bytes made = {0};
    if (!take(in, '"')) {
        return NULL;
    }
    while (in->at < in->end && *in->at != '"') {
        char character[4];
        size_t size = read_character(in, character);
        if (size == 0 || tddp_bytes_append(&made, character, size) != TDDP_OK) {
            tddp_bytes_free(&made);
            return NULL;
        }
    }
    if (!take(in, '"') || tddp_bytes_append(&made, "", 1) != TDDP_OK) {
        tddp_bytes_free(&made);
    }
    return made.data;
}

static void keep(char **field, char *text)
{
    if (*field) {
        free(text);
    } else {
        *field = text;
    }
}

/* A string or a bare word (number, true, null) that stands under `key`. */
static bool read_scalar(reader *in, const char *key)
{
    char *text;
    if (*in->at == '"') {
        text = read_string(in);
    } else {
        size_t length = 0;
        while (in->at + length < in->end && !memchr(",]} \t\r\n", in->at[length], 7)) {
            length++;
        }
        text = length > 0 && length < KEY_BYTES ? tddp_format("%.*s", (int)length, in->at) : NULL;
        in->at += length;
    }
    if (!text) {
        return false;
    }
    if (strcmp(key, "message") == 0) {
        keep(&in->found->message, text);
    } else if (strcmp(key, "py_callstack") == 0) {
        keep(&in->found->traceback, text);
    } else {
        if (strcmp(key, "timestamp") == 0) {
            in->found->timestamp = atoll(text);
        }
        if (strcmp(key, "consequence") == 0) {
            in->found->consequence = strcmp(text, "1") == 0;
        }
        free(text);
    }
    return true;
}

static bool read_value(reader *in, const char *key, int depth);

/* The members of an object or an array, whose opening bracket is taken already. */
static bool read_members(reader *in, bool object, int depth)
{
    char closing = object ? '}' : ']';
    if (take(in, closing)) {
        return true;
    }
    do {
        char key[KEY_BYTES] = "";
        if (object) {
            char *name = read_string(in);
            if (!name) {
                return false;
            }
            (void)snprintf(key, sizeof key, "%s", name);
            free(name);
            if (!take(in, ':')) {
                return false;
            }
        }
        if (!read_value(in, key, depth + 1)) {
            return false;
        }
    } while (take(in, ','));
    return take(in, closing);
}

static bool read_value(reader *in, const char *key, int depth)
{
    skip_space(in);
    if (in->at >= in->end || depth > MOST_DEPTH) {
        return false;
    }
    if (take(in, '{')) {
        return read_members(in, true, depth);
    }
    if (take(in, '[')) {
        return read_members(in, false, depth);
    }
    return read_scalar(in, key);
}

void tddp_launch_error_parse(const char *text, size_t size, tddp_launch_error *out)
{
    *out = (tddp_launch_error){0};
    reader in = {text, text + size, out};
    /* What was read before a fault is of use all the same. */
    (void)read_value(&in, "", 0);
    out->state =
        out->message || out->traceback ? TDDP_LAUNCH_ERROR_READ : TDDP_LAUNCH_ERROR_NOT_UNDERSTOOD;
}

/* The path is the worker's to write: a pipe or a device there must not hold us up, and a link may
 * lead anywhere. */
static int open_ordinary(const char *path)
{
    struct stat found;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY);
    if (fd >= 0 &&
        (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size > MOST_BYTES)) {
        tddp_close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

void tddp_launch_error_read(const char *path, tddp_launch_error *out)
{
    *out = (tddp_launch_error){0};
    tddp_bytes text = {0};
    int fd = open_ordinary(path);
    if (fd < 0) {
        out->state = errno == ENOENT ? TDDP_LAUNCH_ERROR_NONE : TDDP_LAUNCH_ERROR_NOT_TO_BE_READ;
        return;
    }
    if (tddp_bytes_reserve(&text, MOST_BYTES) != TDDP_OK) {
        tddp_close(fd);
        out->state = TDDP_LAUNCH_ERROR_NOT_TO_BE_READ;
        return;
    }
    ssize_t got;
    while (text.size < MOST_BYTES &&
           ((got = read(fd, text.data + text.size, MOST_BYTES - text.size)) > 0 ||
            (got < 0 && errno == EINTR))) {
        text.size += got > 0 ? (size_t)got : 0;
    }
    tddp_close(fd);
    tddp_launch_error_parse(text.data, text.size, out);
    tddp_bytes_free(&text);
}

void tddp_launch_error_free(tddp_launch_error *error)
{
    free(error->message);
    free(error->traceback);
    *error = (tddp_launch_error){0};
}
