/*
 * Reads etcd's answers. All kinds have one form here, since a field has the same meaning wherever
 * it stands; fields that are 0, empty or false are left out by the gateway, and 64-bit numbers are
 * strings. Pure.
 */
#include <stdlib.h>
#include <string.h>

#include "base/json_read.h"
#include "launch/etcd/base64.h"
#include "launch/etcd/etcd.h"
#include "store/store_impl.h"

typedef struct reading {
    tddp_etcd_answer *answer;
    bool is_object; /* it is an object, as all answers are */
    bool is_delete; /* the event's type, which comes before its pair */
    bool failed;    /* short memory or damaged base64 */
} reading;

/* --- items ----------------------------------------------------------------------------------- */

/* The pair of a range ("kvs") or an event ("kv") begins. */
static void begin_object(void *context, const char *key)
{
    reading *r = context;
    tddp_etcd_answer *answer = r->answer;
    r->is_object = true;
    if (strcmp(key, "events") == 0) {
        r->is_delete = false;
    }
    if (strcmp(key, "kvs") != 0 && strcmp(key, "kv") != 0) {
        return;
    }
    if (answer->count == answer->capacity) {
        size_t capacity = answer->capacity ? answer->capacity * 2 : 4;
        tddp_etcd_pair *more = tddp_resize(answer->pairs, capacity * sizeof *more);
        if (!more) {
            r->failed = true;
            return;
        }
        answer->pairs = more;
        answer->capacity = capacity;
    }
    answer->pairs[answer->count++] = (tddp_etcd_pair){.deleted = r->is_delete};
}

static void take_pair_item(reading *r, const char *key, const char *text)
{
    tddp_etcd_pair *pair = &r->answer->pairs[r->answer->count - 1];
    if (strcmp(key, "key") == 0) {
        r->failed |= !tddp_base64_decode(text, &pair->key);
    } else if (strcmp(key, "value") == 0) {
        r->failed |= !tddp_base64_decode(text, &pair->value);
    } else if (strcmp(key, "create_revision") == 0) {
        pair->create_revision = atoll(text);
    } else if (strcmp(key, "mod_revision") == 0) {
        pair->mod_revision = atoll(text);
    } else if (strcmp(key, "lease") == 0) {
        pair->lease = atoll(text);
    }
}

static void keep_text(reading *r, char **field, const char *text)
{
    char *copy = tddp_copy_string(text);
    r->failed |= !copy;
    free(*field);
    *field = copy;
}

static void take_item(void *context, const char *key, const char *text)
{
    reading *r = context;
    tddp_etcd_answer *answer = r->answer;
    bool is_true = strcmp(text, "true") == 0;
    if (r->failed) {
        return;
    }
    if (strcmp(key, "type") == 0) {
        r->is_delete = strcmp(text, "DELETE") == 0;
    } else if (strcmp(key, "revision") == 0) {
        answer->revision = atoll(text);
    } else if (strcmp(key, "compact_revision") == 0) {
        answer->compact_revision = atoll(text);
    } else if (strcmp(key, "ID") == 0) {
        answer->id = atoll(text);
    } else if (strcmp(key, "TTL") == 0) {
        answer->ttl = atoll(text);
    } else if (strcmp(key, "succeeded") == 0) {
        answer->succeeded = is_true;
    } else if (strcmp(key, "canceled") == 0) {
        answer->canceled = is_true;
    } else if (strcmp(key, "token") == 0) {
        keep_text(r, &answer->token, text);
    } else if (strcmp(key, "code") == 0 || strcmp(key, "grpc_code") == 0) {
        answer->code = atoi(text);
    } else if (strcmp(key, "message") == 0 || strcmp(key, "error") == 0) {
        keep_text(r, &answer->error, text);
    } else if (answer->count > 0) {
        take_pair_item(r, key, text);
    }
}

/* --- the whole ------------------------------------------------------------------------------- */

tddp_status tddp_etcd_answer_read(const char *text, size_t size, tddp_etcd_answer *out)
{
    reading r = {.answer = out};
    const tddp_json_visitor visitor = {&r, begin_object, take_item};
    if (!tddp_json_read(text, size, &visitor) || !r.is_object || r.failed) {
        return tddp_fail(TDDP_PROTOCOL, "not an answer of etcd's v3 gateway: %.*s",
                         (int)(size < 200 ? size : 200), text);
    }
    for (size_t i = 0; i < out->count; i++) {
        tddp_blob *value = &out->pairs[i].value;
        if (!value->data && tddp_blob_copy((tddp_slice){"", 0}, value) != TDDP_OK) {
            return TDDP_OUT_OF_MEMORY;
        }
    }
    return TDDP_OK;
}

void tddp_etcd_pair_free(tddp_etcd_pair *pair)
{
    tddp_blob_free(&pair->key);
    tddp_blob_free(&pair->value);
    *pair = (tddp_etcd_pair){0};
}

void tddp_etcd_answer_free(tddp_etcd_answer *answer)
{
    for (size_t i = 0; i < answer->count; i++) {
        tddp_etcd_pair_free(&answer->pairs[i]);
    }
    free(answer->pairs);
    free(answer->token);
    free(answer->error);
    *answer = (tddp_etcd_answer){0};
}
