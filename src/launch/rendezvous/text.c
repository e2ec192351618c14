/*
 * Events as text, and the reading and writing of lines that events and messages share. Called by
 * the member's and the host's threads; holds no state. Everything that comes from a store is
 * checked here: what decodes is within the limits of text.h. Messages are text_message.c's.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/text.h"

enum { LONGEST_NUMBER = 20, SHOWN_BYTES = 64 };

static const char *const kinds[] = {"join",   "ready", "beat",  "master",
                                    "failed", "done",  "leave", "bye"};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* --- writing --------------------------------------------------------------------------------- */

tddp_status tddp_launch_write(tddp_bytes *out, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) {
        return tddp_fail(TDDP_INTERNAL, "a message cannot be written");
    }
    tddp_status status = tddp_bytes_reserve(out, (size_t)length + 1);
    if (status == TDDP_OK) {
        va_start(arguments, format);
        (void)vsnprintf(out->data + out->size, (size_t)length + 1, format, arguments);
        va_end(arguments);
        out->size += (size_t)length;
    }
    return status;
}

static bool is_plain(char c)
{
    return (unsigned char)c > ' ' && c != '%' && c != 0x7f;
}

tddp_status tddp_launch_write_name(tddp_bytes *out, const char *name)
{
    tddp_status status = name[0] ? TDDP_OK : tddp_bytes_append(out, "%", 1);
    for (const char *at = name; status == TDDP_OK && *at; at++) {
        status = is_plain(*at) ? tddp_bytes_append(out, at, 1)
                               : tddp_launch_write(out, "%%%02X", (unsigned)(unsigned char)*at);
    }
    return status;
}

static tddp_status write_field(tddp_bytes *out, const char *key, const char *name)
{
    tddp_status status = tddp_launch_write(out, "\n%s=", key);
    return status == TDDP_OK ? tddp_launch_write_name(out, name) : status;
}

static tddp_status write_joiner(tddp_bytes *out, const tddp_launch_joiner *joiner)
{
    const char *const names[][2] = {
        {"id", joiner->id}, {"host", joiner->host}, {"role", joiner->role}, {"addr", joiner->addr}};
    tddp_status status = TDDP_OK;
    for (size_t i = 0; status == TDDP_OK && i < sizeof names / sizeof names[0]; i++) {
        status = write_field(out, names[i][0], names[i][1]);
    }
    if (status == TDDP_OK) {
        status = tddp_launch_write(
            out,
            "\npid=%lld\nlocal_size=%d\nnode_rank=%d\nlast_rank=%d\nround=%d\nrestart=%d\n"
            "nodes=%d\nhosting=%d",
            (long long)joiner->pid, joiner->local_size, joiner->node_rank, joiner->last_rank,
            joiner->round, joiner->restart, joiner->nodes, joiner->hosting);
    }
    return status;
}

tddp_status tddp_launch_event_encode(const tddp_launch_event *event, tddp_bytes *out)
{
    tddp_status status = tddp_launch_write(out, "%s %d", kinds[event->kind], event->slot);
    if (status != TDDP_OK) {
        return status;
    }
    switch (event->kind) {
    case TDDP_LAUNCH_EVENT_JOIN:
        return write_joiner(out, &event->joiner);
    case TDDP_LAUNCH_EVENT_READY:
    case TDDP_LAUNCH_EVENT_DONE:
        return tddp_launch_write(out, " %d", event->round);
    case TDDP_LAUNCH_EVENT_MASTER:
        status = tddp_launch_write(out, " %d ", event->round);
        status = status == TDDP_OK ? tddp_launch_write_name(out, event->addr) : status;
        return status == TDDP_OK ? tddp_launch_write(out, " %d", event->port) : status;
    case TDDP_LAUNCH_EVENT_FAILED:
        return tddp_launch_write(out, " %d\n%s", event->round, event->text);
    case TDDP_LAUNCH_EVENT_LEAVE:
        return tddp_launch_write(out, "\n%s", event->text);
    case TDDP_LAUNCH_EVENT_BEAT:
    case TDDP_LAUNCH_EVENT_BYE:
        break;
    }
    return status;
}

/* --- reading --------------------------------------------------------------------------------- */

tddp_status tddp_launch_read_failed(const tddp_launch_reader *reader, const char *what)
{
    const char *line = reader->at < reader->end ? reader->at : reader->end;
    while (line > reader->start && line[-1] != '\n') {
        line--;
    }
    char shown[SHOWN_BYTES + 1];
    size_t size = 0;
    for (; line < reader->end && *line != '\n' && size < SHOWN_BYTES; line++) {
        shown[size++] = (unsigned char)*line < ' ' ? '?' : *line;
    }
    shown[size] = '\0';
    return tddp_fail(TDDP_PROTOCOL,
                     "\"%s\" is no %s of the rendezvous; expected the same version of torchrun on "
                     "all nodes",
                     shown, what);
}

bool tddp_launch_read_literal(tddp_launch_reader *reader, const char *literal)
{
    size_t length = strlen(literal);
    bool same =
        (size_t)(reader->end - reader->at) >= length && memcmp(reader->at, literal, length) == 0;
    reader->at += same ? length : 0;
    return same;
}

static size_t field_length(const tddp_launch_reader *reader)
{
    const char *at = reader->at;
    while (at < reader->end && *at != ' ' && *at != '\n') {
        at++;
    }
    return (size_t)(at - reader->at);
}

bool tddp_launch_read_number(tddp_launch_reader *reader, int64_t min, int64_t max, int64_t *out)
{
    char digits[LONGEST_NUMBER + 1];
    size_t length = field_length(reader);
    if (length == 0 || length > LONGEST_NUMBER || memchr(reader->at, '\0', length)) {
        return false;
    }
    memcpy(digits, reader->at, length);
    digits[length] = '\0';
    if (!tddp_parse_int(digits, min, max, out)) {
        return false;
    }
    reader->at += length;
    return true;
}

bool tddp_launch_read_int(tddp_launch_reader *reader, int min, int max, int *out)
{
    int64_t number;
    bool good = tddp_launch_read_number(reader, min, max, &number);
    if (good) {
        *out = (int)number;
    }
    return good;
}

static int hex_digit(char c)
{
    const char *digits = "0123456789ABCDEF";
    const char *found = c ? strchr(digits, c) : NULL;
    return found ? (int)(found - digits) : -1;
}

/* Reads one character of a name, which is no NUL. */
static bool read_character(tddp_launch_reader *reader, char *out)
{
    if (*reader->at != '%') {
        *out = *reader->at;
        bool good = is_plain(*out);
        reader->at += good;
        return good;
    }
    if (reader->end - reader->at < 3) {
        return false;
    }
    int high = hex_digit(reader->at[1]);
    int low = hex_digit(reader->at[2]);
    if (high < 0 || low < 0 || high + low == 0) {
        return false;
    }
    *out = (char)(unsigned char)(high * 16 + low);
    reader->at += 3;
    return true;
}

bool tddp_launch_read_name(tddp_launch_reader *reader, char *out, size_t size)
{
    size_t length = field_length(reader);
    const char *stop = reader->at + length;
    size_t used = 0;
    if (length == 0) {
        return false;
    }
    if (length == 1 && *reader->at == '%') {
        reader->at++;
        out[0] = '\0';
        return true;
    }
    while (reader->at < stop) {
        if (used + 1 >= size || !read_character(reader, &out[used])) {
            return false;
        }
        used++;
    }
    out[used] = '\0';
    return true;
}

bool tddp_launch_read_blank(tddp_launch_reader *reader)
{
    return tddp_launch_read_literal(reader, " ");
}

bool tddp_launch_read_line_end(tddp_launch_reader *reader)
{
    return reader->at == reader->end || tddp_launch_read_literal(reader, "\n");
}

bool tddp_launch_read_rest(tddp_launch_reader *reader, char *out, size_t size)
{
    size_t length = (size_t)(reader->end - reader->at);
    if (length > 0 && memchr(reader->at, '\0', length)) {
        return false;
    }
    size_t kept = length < size ? length : size - 1;
    if (kept > 0) {
        memcpy(out, reader->at, kept);
    }
    out[kept] = '\0';
    reader->at = reader->end;
    return true;
}

/* One line of a join. A key that is not known is an error: all nodes run the same version. */
static bool read_field(tddp_launch_reader *reader, tddp_launch_joiner *joiner)
{
    const struct {
        const char *key;
        char *name;
        size_t size;
    } names[] = {
        {"id=", joiner->id, sizeof joiner->id},
        {"host=", joiner->host, sizeof joiner->host},
        {"role=", joiner->role, sizeof joiner->role},
        {"addr=", joiner->addr, sizeof joiner->addr},
    };
    const struct {
        const char *key;
        int *number;
        int min;
        int max;
    } numbers[] = {
        {"local_size=", &joiner->local_size, 1, TDDP_LAUNCH_MOST_MEMBERS},
        {"node_rank=", &joiner->node_rank, -1, TDDP_LAUNCH_MOST_MEMBERS},
        {"last_rank=", &joiner->last_rank, -1, TDDP_LAUNCH_MOST_MEMBERS},
        {"round=", &joiner->round, -1, TDDP_LAUNCH_HIGHEST_ROUND},
        {"restart=", &joiner->restart, 0, TDDP_LAUNCH_HIGHEST_ROUND},
        {"nodes=", &joiner->nodes, 0, TDDP_LAUNCH_MOST_MEMBERS},
    };
    int hosting;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (tddp_launch_read_literal(reader, names[i].key)) {
            return tddp_launch_read_name(reader, names[i].name, names[i].size) &&
                   tddp_launch_read_line_end(reader);
        }
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (tddp_launch_read_literal(reader, numbers[i].key)) {
            return tddp_launch_read_int(reader, numbers[i].min, numbers[i].max,
                                        numbers[i].number) &&
                   tddp_launch_read_line_end(reader);
        }
    }
    if (tddp_launch_read_literal(reader, "pid=")) {
        return tddp_launch_read_number(reader, 0, INT64_MAX, &joiner->pid) &&
               tddp_launch_read_line_end(reader);
    }
    if (tddp_launch_read_literal(reader, "hosting=")) {
        bool good = tddp_launch_read_int(reader, 0, 1, &hosting);
        joiner->hosting = good && hosting;
        return good && tddp_launch_read_line_end(reader);
    }
    return false;
}

static bool read_joiner(tddp_launch_reader *reader, tddp_launch_joiner *joiner)
{
    joiner->node_rank = joiner->last_rank = joiner->round = -1;
    while (reader->at < reader->end) {
        if (!read_field(reader, joiner)) {
            return false;
        }
    }
    return joiner->local_size > 0; /* the others have good defaults */
}

static bool read_body(tddp_launch_reader *reader, tddp_launch_event *event)
{
    const int last = TDDP_LAUNCH_HIGHEST_ROUND;
    switch (event->kind) {
    case TDDP_LAUNCH_EVENT_JOIN:
        return tddp_launch_read_line_end(reader) && read_joiner(reader, &event->joiner);
    case TDDP_LAUNCH_EVENT_READY:
    case TDDP_LAUNCH_EVENT_DONE:
        return tddp_launch_read_blank(reader) &&
               tddp_launch_read_int(reader, 0, last, &event->round);
    case TDDP_LAUNCH_EVENT_MASTER:
        return tddp_launch_read_blank(reader) &&
               tddp_launch_read_int(reader, 0, last, &event->round) &&
               tddp_launch_read_blank(reader) &&
               tddp_launch_read_name(reader, event->addr, sizeof event->addr) &&
               tddp_launch_read_blank(reader) &&
               tddp_launch_read_int(reader, 1, 65535, &event->port);
    case TDDP_LAUNCH_EVENT_FAILED:
        return tddp_launch_read_blank(reader) &&
               tddp_launch_read_int(reader, 0, last, &event->round) &&
               tddp_launch_read_line_end(reader) &&
               tddp_launch_read_rest(reader, event->text, sizeof event->text);
    case TDDP_LAUNCH_EVENT_LEAVE:
        return tddp_launch_read_line_end(reader) &&
               tddp_launch_read_rest(reader, event->text, sizeof event->text);
    case TDDP_LAUNCH_EVENT_BEAT:
    case TDDP_LAUNCH_EVENT_BYE:
        break;
    }
    return true;
}

tddp_status tddp_launch_event_decode(const char *data, size_t size, tddp_launch_event *out)
{
    tddp_launch_reader reader = {data, data + size, data};
    tddp_launch_event *event = tddp_alloc(sizeof *event);
    if (!event) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t kind = 0;
    while (kind < KINDS && !tddp_launch_read_literal(&reader, kinds[kind])) {
        kind++;
    }
    event->kind = (tddp_launch_event_kind)kind;
    bool good = kind < KINDS && tddp_launch_read_blank(&reader) &&
                tddp_launch_read_int(&reader, 1, INT32_MAX, &event->slot) &&
                read_body(&reader, event) && reader.at == reader.end;
    if (good) {
        *out = *event;
    }
    free(event);
    return good ? TDDP_OK : tddp_launch_read_failed(&reader, "event");
}
