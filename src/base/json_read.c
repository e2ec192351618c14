/*
 * Reads JSON as a stream of items: no tree is built, and a text that ends early or is damaged
 * yields what was read before the fault. Depth is bounded. Any thread.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/json_read.h"

enum { MOST_DEPTH = 32 };

typedef struct reader {
    const char *at;
    const char *end;
    const tddp_json_visitor *visitor;
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

/* --- strings --------------------------------------------------------------------------------- */

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

/* One character of a string, its escape decoded; returns its bytes, 0 at a fault. */
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

/* --- values ---------------------------------------------------------------------------------- */

/* A string, or a bare word: a number, true, false or null. */
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
        text = length > 0 && length < TDDP_JSON_WORD_BYTES
                   ? tddp_format("%.*s", (int)length, in->at)
                   : NULL;
        in->at += length;
    }
    if (text) {
        in->visitor->scalar(in->visitor->context, key, text);
    }
    free(text);
    return text != NULL;
}

static bool read_value(reader *in, const char *key, int depth);

static bool read_member(reader *in, int depth)
{
    char *key = read_string(in);
    bool sound = key && take(in, ':') && read_value(in, key, depth);
    free(key);
    return sound;
}

/* The members of an object or an array, whose opening bracket was taken. */
static bool read_members(reader *in, const char *key, bool object, int depth)
{
    char closing = object ? '}' : ']';
    if (take(in, closing)) {
        return true;
    }
    do {
        if (!(object ? read_member(in, depth + 1) : read_value(in, key, depth + 1))) {
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
    if (take(in, '[')) {
        return read_members(in, key, false, depth);
    }
    if (!take(in, '{')) {
        return read_scalar(in, key);
    }
    if (in->visitor->object) {
        in->visitor->object(in->visitor->context, key);
    }
    return read_members(in, key, true, depth);
}

bool tddp_json_read(const char *text, size_t size, const tddp_json_visitor *visitor)
{
    reader in = {text, text + size, visitor};
    bool valid = read_value(&in, "", 0);
    skip_space(&in);
    return valid && in.at == in.end;
}
