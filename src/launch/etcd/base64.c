/*
 * Standard base64 with its padding, as etcd's gateway has keys and values. Pure.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/etcd/base64.h"

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

tddp_status tddp_base64_append(tddp_bytes *to, tddp_slice bytes)
{
    tddp_status status = tddp_bytes_reserve(to, (bytes.size + 2) / 3 * 4);
    for (size_t i = 0; status == TDDP_OK && i < bytes.size; i += 3) {
        unsigned word = 0;
        size_t left = bytes.size - i < 3 ? bytes.size - i : 3;
        for (size_t k = 0; k < 3; k++) {
            word = word << 8 | (k < left ? (unsigned char)bytes.data[i + k] : 0u);
        }
        for (size_t k = 0; k < 4; k++) {
            to->data[to->size++] = k <= left ? digits[word >> (18 - 6 * k) & 63] : '=';
        }
    }
    return status;
}

static int digit_of(char character)
{
    const char *found = character ? strchr(digits, character) : NULL;
    return found ? (int)(found - digits) : -1;
}

bool tddp_base64_decode(const char *text, tddp_blob *out)
{
    size_t length = strlen(text);
    char *data = length % 4 == 0 ? tddp_alloc(length / 4 * 3 + 1) : NULL;
    size_t size = 0;
    bool sound = data != NULL;
    for (size_t i = 0; sound && i < length; i += 4) {
        size_t pads = i + 4 < length ? 0 : (size_t)(text[i + 2] == '=') + (text[i + 3] == '=');
        unsigned word = 0;
        for (size_t k = 0; k < 4; k++) {
            int digit = k < 4 - pads ? digit_of(text[i + k]) : 0;
            sound = sound && digit >= 0;
            word = word << 6 | (unsigned)(digit & 63);
        }
        for (size_t k = 0; sound && k < 3 - pads; k++) {
            data[size++] = (char)(word >> (16 - 8 * k) & 0xFF);
        }
    }
    if (!sound) {
        free(data);
        return false;
    }
    free(out->data);
    *out = (tddp_blob){data, size};
    return true;
}
