/*
 * Reads etcd's answers. All kinds have one form here, since a field has the same meaning wherever
 * it stands; fields that are 0, empty or false are left out by the gateway, 64-bit numbers are
 * strings, and keys and values are standard base64 with its padding. Pure.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/json_read.h"
#include "launch/etcd/etcd.h"

/* --- base64 ---------------------------------------------------------------------------------- */

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

char *tddp_base64(tddp_slice bytes, char *to)
{
    char *at = to;
    for (size_t i = 0; i < bytes.size; i += 3) {
        unsigned word = 0;
        size_t left = bytes.size - i;
        for (size_t k = 0; k < 3; k++) {
            word = word << 8 | (k < left ? (unsigned char)bytes.data[i + k] : 0u);
        }
        for (size_t k = 0; k < 4; k++) {
            *at++ = k <= left ? digits[word >> (18 - 6 * k) & 63] : '=';
        }
    }
    *at = '\0';
    return to;
}

/* Replaces `out` with the bytes of a text, followed by a NUL; false if it is damaged or memory is
 * short. */
static bool decode(const char *text, tddp_blob *out)
{
    size_t length = strspn(text, digits);
    size_t pads = strspn(text + length, "=");
    bool sound = pads <= 2 && !text[length + pads] && (length + pads) % 4 == 0;
    char *data = sound ? tddp_alloc(length / 4 * 3 + 3) : NULL;
    unsigned word = 0;
    size_t size = 0;
    for (size_t i = 0; data && i < length; i++) {
        word = word << 6 | (unsigned)(strchr(digits, text[i]) - digits);
        if (i % 4 > 0) {
            data[size++] = (char)(word >> (6 - 2 * (i % 4)) & 0xFF);
        }
    }
    if (data) {
        data[size] = '\0';
        free(out->data);
        *out = (tddp_blob){data, size};
    }
    return data != NULL;
}

/* --- fields ---------------------------------------------------------------------------------- */

static const struct {
    const char *key;
    enum { NUMBER, TEXT, BASE64 } kind; /* BASE64: of the last pair that has begun */
    size_t offset;
} fields[] = {
    {"revision", NUMBER, offsetof(tddp_etcd_answer, revision)},
    {"create_revision", NUMBER, offsetof(tddp_etcd_answer, create_revision)},
    {"mod_revision", NUMBER, offsetof(tddp_etcd_answer, mod_revision)},
    {"ID", NUMBER, offsetof(tddp_etcd_answer, id)},
    {"TTL", NUMBER, offsetof(tddp_etcd_answer, ttl)},
    {"succeeded", NUMBER, offsetof(tddp_etcd_answer, succeeded)},
    {"canceled", NUMBER, offsetof(tddp_etcd_answer, canceled)},
    {"code", NUMBER, offsetof(tddp_etcd_answer, code)},
    {"grpc_code", NUMBER, offsetof(tddp_etcd_answer, code)},
    {"error", TEXT, offsetof(tddp_etcd_answer, error)},
    {"message", TEXT, offsetof(tddp_etcd_answer, error)},
    {"token", TEXT, offsetof(tddp_etcd_answer, token)},
    {"key", BASE64, offsetof(tddp_etcd_pair, key)},
    {"value", BASE64, offsetof(tddp_etcd_pair, value)},
};

typedef struct reading {
    tddp_etcd_answer *answer;
    bool has_header; /* as all answers do that are no errors */
    bool failed;     /* short memory or damaged base64 */
} reading;

/* The pair of a range ("kvs") or an event ("kv") begins. */
static void begin_object(void *context, const char *key)
{
    reading *r = context;
    tddp_etcd_answer *answer = r->answer;
    size_t count = answer->count;
    r->has_header |= strcmp(key, "header") == 0;
    if (strcmp(key, "kvs") != 0 && strcmp(key, "kv") != 0) {
        return;
    }
    tddp_etcd_pair *more = tddp_grow(answer->pairs, count, sizeof *more);
    if (!more) {
        r->failed = true;
        return;
    }
    answer->pairs = more;
    answer->count++;
    r->failed |= !decode("", &more[count].key) || !decode("", &more[count].value);
}

static void take_scalar(void *context, const char *key, const char *text)
{
    reading *r = context;
    tddp_etcd_answer *answer = r->answer;
    size_t i = 0;
    while (i < sizeof fields / sizeof fields[0] && strcmp(fields[i].key, key) != 0) {
        i++;
    }
    if (r->failed || i == sizeof fields / sizeof fields[0]) {
        return;
    }
    void *to = (char *)answer + fields[i].offset;
    if (fields[i].kind == NUMBER) {
        *(int64_t *)to = strcmp(text, "true") == 0 ? 1 : strtoll(text, NULL, 10);
    } else if (fields[i].kind == TEXT) {
        free(*(char **)to);
        *(char **)to = tddp_copy_string(text);
        r->failed |= !*(char **)to;
    } else if (answer->count > 0) {
        char *pair = (char *)&answer->pairs[answer->count - 1];
        r->failed |= !decode(text, (tddp_blob *)(void *)(pair + fields[i].offset));
    }
}

/* --- the whole ------------------------------------------------------------------------------- */

tddp_status tddp_etcd_answer_read(const char *text, size_t size, tddp_etcd_answer *out)
{
    reading r = {.answer = out};
    const tddp_json_visitor visitor = {&r, begin_object, take_scalar};
    if (!tddp_json_read(text, size, &visitor) || r.failed || (!r.has_header && out->code == 0)) {
        return tddp_fail(TDDP_PROTOCOL, "not an answer of etcd's v3 gateway: %.*s",
                         (int)(size < 200 ? size : 200), text);
    }
    return TDDP_OK;
}

void tddp_etcd_answer_free(tddp_etcd_answer *answer)
{
    for (size_t i = 0; i < answer->count; i++) {
        tddp_blob_free(&answer->pairs[i].key);
        tddp_blob_free(&answer->pairs[i].value);
    }
    free(answer->pairs);
    free(answer->error);
    free(answer->token);
    *answer = (tddp_etcd_answer){0};
}
