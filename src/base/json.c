/*
 * Texts as JSON strings, for what people and tools read later: the flight recorder's files, traces.
 * Pure functions, any thread. The rest of JSON is written by format strings.
 */
#include <stdio.h>

#include "base/base.h"

size_t tddp_utf8_length(const unsigned char *at)
{
    size_t length = at[0] < 0x80                    ? 1
                    : at[0] >= 0xc2 && at[0] < 0xe0 ? 2
                    : at[0] >= 0xe0 && at[0] < 0xf0 ? 3
                    : at[0] >= 0xf0 && at[0] < 0xf5 ? 4
                                                    : 0;
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool overlong = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xf0 && at[1] < 0x90);
    bool beyond = (at[0] == 0xed && at[1] > 0x9f) || (at[0] == 0xf4 && at[1] > 0x8f);
    return overlong || beyond ? 0 : length;
}

tddp_status tddp_bytes_append_json(tddp_bytes *bytes, const char *text)
{
    tddp_status status = tddp_bytes_append(bytes, "\"", 1);
    const unsigned char *at = (const unsigned char *)text;
    while (*at && status == TDDP_OK) {
        char escaped[8];
        size_t length = tddp_utf8_length(at);
        if (length == 0) {
            /* Texts may be cut in the middle of a character, and names may be anything. */
            status = tddp_bytes_append(bytes, "\\ufffd", 6);
            length = 1;
        } else if (*at == '"' || *at == '\\') {
            escaped[0] = '\\';
            escaped[1] = (char)*at;
            status = tddp_bytes_append(bytes, escaped, 2);
        } else if (*at < 0x20 || *at == 0x7f || (*at == 0xc2 && at[1] < 0xa0)) {
            /* The second byte of U+0080 to U+009F, which terminals act on, is the code itself. */
            (void)snprintf(escaped, sizeof escaped, "\\u%04x", at[length - 1]);
            status = tddp_bytes_append(bytes, escaped, 6);
        } else {
            status = tddp_bytes_append(bytes, at, length);
        }
        at += length;
    }
    return status ? status : tddp_bytes_append(bytes, "\"", 1);
}
