/*
 * Keys in error texts, binary ones escaped and long ones shortened, and the texts of waits that
 * timed out. Any thread; no state.
 */
#include <stdio.h>

#include "store/store_impl.h"

enum { SHOWN_KEYS = 10, SHOWN_KEY_BYTES = 64 };

static size_t show_key(tddp_slice key, char *text, size_t room)
{
    size_t used = (size_t)snprintf(text, room, "\"");
    if (key.size && key.data[0] == '/') { /* as it is kept: the user did not write it */
        key = (tddp_slice){key.data + 1, key.size - 1};
    }
    for (size_t i = 0; i < key.size && i < SHOWN_KEY_BYTES; i++) {
        unsigned char byte = (unsigned char)key.data[i];
        bool plain = byte >= 32 && byte != 127 && byte != '"' && byte != '\\';
        used += (size_t)snprintf(text + used, room - used, plain ? "%c" : "\\x%02x", byte);
    }
    used += (size_t)snprintf(text + used, room - used, key.size > SHOWN_KEY_BYTES ? "...\"" : "\"");
    return used;
}

const char *tddp_store_keys_text(const tddp_slice *keys, size_t count,
                                 char text[TDDP_STORE_KEYS_TEXT_BYTES])
{
    enum { LONGEST = SHOWN_KEY_BYTES * 4 + 8, TAIL = 32 };
    size_t used = 0;
    size_t shown = 0;
    text[0] = '\0';
    while (shown < count && shown < SHOWN_KEYS &&
           used + LONGEST + TAIL < TDDP_STORE_KEYS_TEXT_BYTES) {
        used += (size_t)snprintf(text + used, 3, "%s", shown ? ", " : "");
        used += show_key(keys[shown], text + used, TDDP_STORE_KEYS_TEXT_BYTES - used);
        shown++;
    }
    if (shown < count) {
        snprintf(text + used, TDDP_STORE_KEYS_TEXT_BYTES - used, " and %zu more", count - shown);
    }
    return text;
}

tddp_status tddp_store_fail_wait(tddp_status status, const tddp_slice *keys, size_t count,
                                 const tddp_store_call *call, const char *store_name)
{
    char text[TDDP_STORE_KEYS_TEXT_BYTES];
    (void)tddp_store_keys_text(keys, count, text);
    const char *noun = count == 1 ? "key" : "keys";
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted while waiting for the %s %s (%s)", noun, text,
                         store_name);
    }
    return tddp_fail(status, "timed out after %lld ms waiting for the %s %s (%s)",
                     (long long)call->timeout_ms, noun, text, store_name);
}

tddp_status tddp_store_fail_barrier(tddp_status status, tddp_slice key, int64_t arrived,
                                    int world_size, const tddp_store_call *call,
                                    const char *store_name)
{
    char text[TDDP_STORE_KEYS_TEXT_BYTES];
    char count[64] = "how many arrived is not known";
    (void)tddp_store_keys_text(&key, 1, text);
    if (arrived >= 0) {
        snprintf(count, sizeof count, "%lld of %d arrived", (long long)arrived, world_size);
    }
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted at the barrier %s of %d (%s)", text, world_size,
                         store_name);
    }
    return tddp_fail(status, "timed out after %lld ms at the barrier %s: %s (%s)",
                     (long long)call->timeout_ms, text, count, store_name);
}
