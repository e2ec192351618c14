/*
 * Keeps the start of the last line out of a stream that passes by, at a cost that does not depend
 * on how much passes: only its end is looked at. Pure.
 */
#include <string.h>

#include "launch/output/tail.h"

/* Of what came at once, this much is searched for the start of its last line. */
enum { LOOKED_AT = 4096 };

static bool ends_line(char letter)
{
    return letter == '\n' || letter == '\r';
}

void tddp_launch_tail_take(tddp_launch_tail *tail, const char *data, size_t size)
{
    size_t end = size;
    size_t limit = size > LOOKED_AT ? size - LOOKED_AT : 0;
    while (end > limit && ends_line(data[end - 1])) {
        end--;
    }
    size_t start = end;
    while (start > limit && !ends_line(data[start - 1])) {
        start--;
    }
    if (start == end) {
        tail->over |= size > 0;
        return;
    }
    if (start > 0 || tail->over) {
        tail->size = 0;
    }
    size_t room = sizeof tail->text - 1 - tail->size;
    size_t length = end - start < room ? end - start : room;
    memcpy(tail->text + tail->size, data + start, length);
    tail->size += length;
    tail->over = end < size;
}

/* How long the escape sequence at `text` is, as far as it can be told. */
static size_t escape_length(const char *text, size_t size)
{
    size_t at = 1;
    if (at < size && text[at] == '[') {
        at++;
        while (at < size && (unsigned char)text[at] < 0x40) {
            at++;
        }
    }
    return at < size ? at + 1 : size;
}

const char *tddp_launch_tail_show(const tddp_launch_tail *tail, char text[TDDP_LAUNCH_TAIL_BYTES])
{
    size_t shown = 0;
    for (size_t at = 0; at < tail->size;) {
        unsigned char letter = (unsigned char)tail->text[at];
        if (letter == 0x1b) {
            at += escape_length(tail->text + at, tail->size - at);
            continue;
        }
        text[shown++] = letter < 0x20 || letter == 0x7f ? ' ' : (char)letter;
        at++;
    }
    text[shown] = '\0';
    return text;
}
