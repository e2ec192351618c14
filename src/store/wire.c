/*
 * Reads and writes the protocol's bytes. A format string describes the fields of each kind
 * of request; a cursor follows it through the buffer and stops at the first byte that is missing or
 * wrong, so an excessive length is refused as soon as its eight bytes have arrived. Pure functions;
 * server/requests.c executes the requests.
 */
#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "store/wire.h"

enum { KEY_BYTES = 8 << 10, VALUE_BYTES = 8 << 20, KEYS = 131072, VALUES_PER_REQUEST = 16 };

/* k key, v value, i 64-bit number, n 32-bit number, f flag, a 32 bytes of authentication, K list of
 * keys, P list of keys and values. */
static const char *const fields_of[TDDP_WIRE_KINDS] = {
    [TDDP_WIRE_VALIDATE] = "n",      [TDDP_WIRE_SET] = "kv",
    [TDDP_WIRE_COMPARE_SET] = "kvv", [TDDP_WIRE_GET] = "k",
    [TDDP_WIRE_ADD] = "ki",          [TDDP_WIRE_CHECK] = "K",
    [TDDP_WIRE_WAIT] = "K",          [TDDP_WIRE_NUM_KEYS] = "",
    [TDDP_WIRE_DELETE_KEY] = "k",    [TDDP_WIRE_APPEND] = "kv",
    [TDDP_WIRE_MULTI_GET] = "K",     [TDDP_WIRE_MULTI_SET] = "P",
    [TDDP_WIRE_CANCEL_WAIT] = "",    [TDDP_WIRE_PING] = "n",
    [TDDP_WIRE_QUEUE_PUSH] = "kv",   [TDDP_WIRE_QUEUE_POP] = "k",
    [TDDP_WIRE_QUEUE_LEN] = "k",     [TDDP_WIRE_LIST_KEYS] = "",
    [TDDP_WIRE_BARRIER] = "ki",      [TDDP_WIRE_AUTH_BEGIN] = "a",
    [TDDP_WIRE_AUTH_PROVE] = "a",    [TDDP_WIRE_SET_EPHEMERAL] = "kvif",
    [TDDP_WIRE_WATCH] = "kf",
};

const tddp_wire_dialect tddp_wire_2x = {"2.x"};
const tddp_wire_dialect tddp_wire_1_13 = {"1.13"};

/* By opcode. Its WATCH_KEY (7), which later versions have not, is none. */
static const uint8_t kinds_1_13[] = {
    TDDP_WIRE_SET,  TDDP_WIRE_COMPARE_SET, TDDP_WIRE_GET,   TDDP_WIRE_ADD,        TDDP_WIRE_CHECK,
    TDDP_WIRE_WAIT, TDDP_WIRE_NUM_KEYS,    TDDP_WIRE_KINDS, TDDP_WIRE_DELETE_KEY,
};

static uint64_t limit_of(uint64_t wanted, uint64_t by_default)
{
    uint64_t limit = wanted ? wanted : by_default;
    return limit < TDDP_WIRE_MOST ? limit : TDDP_WIRE_MOST;
}

tddp_wire_limits tddp_wire_limits_of(uint64_t key_bytes, uint64_t value_bytes)
{
    tddp_wire_limits limits = {
        .key_bytes = limit_of(key_bytes, KEY_BYTES),
        .value_bytes = limit_of(value_bytes, VALUE_BYTES),
        .keys = KEYS,
    };
    uint64_t largest =
        limits.key_bytes > limits.value_bytes ? limits.key_bytes : limits.value_bytes;
    limits.request_bytes = VALUES_PER_REQUEST * (largest > VALUE_BYTES ? largest : VALUE_BYTES);
    return limits;
}

typedef struct cursor {
    const tddp_wire_limits *limits;
    const char *data;
    size_t size;
    size_t at;
    uint64_t owed; /* bytes that the fields after this one have at least */
    tddp_wire_result result;
    tddp_wire_progress *progress;
    tddp_wire_parse *out;
} cursor;

/* `setting` is the variable that sets the limit, without its TDDP_STORE_MAX_. */
static const char *refuse(cursor *c, const char *what, uint64_t got, uint64_t most,
                          const char *setting)
{
    c->result = TDDP_WIRE_MALFORMED;
    snprintf(c->out->fault, sizeof c->out->fault,
             "%s %llu, at most %llu allowed (TDDP_STORE_MAX_%s)", what, (unsigned long long)got,
             (unsigned long long)most, setting);
    return NULL;
}

/* The next `size` bytes, or NULL with the result set. */
static const char *take(cursor *c, uint64_t size)
{
    uint64_t total = c->at + size + c->owed;
    if (total > c->limits->request_bytes) {
        return refuse(c, "request of bytes", total, c->limits->request_bytes, "REQUEST_BYTES");
    }
    if (c->size - c->at < size) {
        c->result = TDDP_WIRE_MORE;
        c->out->needed = (size_t)total;
        return NULL;
    }
    const char *bytes = c->data + c->at;
    c->at += (size_t)size;
    return bytes;
}

/* Of 4 or 8 bytes. */
static bool take_number(cursor *c, size_t bytes, uint64_t *out)
{
    char whole[8] = {0};
    const char *at = take(c, bytes);
    if (at) {
        memcpy(whole, at, bytes);
        *out = tddp_wire_u64(whole);
    }
    return at;
}

static bool take_string(cursor *c, const char *what, uint64_t most, const char *setting,
                        tddp_slice *out)
{
    uint64_t size;
    if (!take_number(c, 8, &size)) {
        return false;
    }
    if (size > most) {
        refuse(c, what, size, most, setting);
        return false;
    }
    const char *bytes = take(c, size);
    *out = (tddp_slice){bytes, (size_t)size};
    return bytes;
}

static bool take_key(cursor *c, tddp_slice *out)
{
    return take_string(c, "key of bytes", c->limits->key_bytes, "KEY_BYTES", out);
}

static bool take_value(cursor *c, tddp_slice *out)
{
    return take_string(c, "value of bytes", c->limits->value_bytes, "VALUE_BYTES", out);
}

static bool take_list(cursor *c, bool with_values, tddp_wire_request *request)
{
    uint64_t count;
    if (!take_number(c, 8, &count)) {
        return false;
    }
    if (count > c->limits->keys) {
        refuse(c, "keys in one request:", count, c->limits->keys, "KEYS");
        return false;
    }
    size_t start = c->at;
    uint64_t each = with_values ? 16 : 8;
    if (c->progress->at) {
        c->at = c->progress->at;
    }
    c->owed = (count - c->progress->done) * each;
    for (uint64_t i = c->progress->done; i < count; i++) {
        tddp_slice skipped;
        c->owed -= 8;
        if (!take_key(c, &skipped)) {
            return false;
        }
        if (with_values) {
            c->owed -= 8;
            if (!take_value(c, &skipped)) {
                return false;
            }
        }
        *c->progress = (tddp_wire_progress){c->at, i + 1};
    }
    request->count = count;
    request->list = (tddp_slice){c->data + start, c->at - start};
    return true;
}

static bool take_flag(cursor *c, bool *out)
{
    const char *at = take(c, 1);
    *out = at && *at;
    return at;
}

static bool take_field(cursor *c, char field, unsigned *values, tddp_wire_request *request)
{
    switch (field) {
    case 'k':
        return take_key(c, &request->key);
    case 'v':
        return take_value(c, &request->values[(*values)++]);
    case 'i':
    case 'n':
        return take_number(c, field == 'i' ? 8 : 4, (uint64_t *)&request->number);
    case 'f':
        return take_flag(c, &request->flag);
    case 'a':
        request->values[0] = (tddp_slice){take(c, TDDP_WIRE_AUTH_BYTES), TDDP_WIRE_AUTH_BYTES};
        return request->values[0].data;
    default:
        return take_list(c, field == 'P', request);
    }
}

tddp_wire_kind tddp_wire_kind_of(const tddp_wire_dialect *dialect, unsigned char opcode)
{
    unsigned kind = opcode; /* in the 2.x dialect PyTorch's opcodes are the kinds themselves */
    if (dialect == &tddp_wire_1_13) {
        kind = opcode < sizeof kinds_1_13 ? kinds_1_13[opcode] : TDDP_WIRE_KINDS;
    } else if (opcode > TDDP_WIRE_BARRIER) {
        kind = opcode < TDDP_WIRE_OWN_OPCODES
                   ? TDDP_WIRE_KINDS
                   : opcode - TDDP_WIRE_OWN_OPCODES + (unsigned)TDDP_WIRE_AUTH_BEGIN;
    }
    return kind < TDDP_WIRE_KINDS ? (tddp_wire_kind)kind : TDDP_WIRE_KINDS;
}

tddp_wire_result tddp_wire_read_on(const tddp_wire_dialect *dialect, const tddp_wire_limits *limits,
                                   const char *data, size_t size, tddp_wire_progress *progress,
                                   tddp_wire_parse *out)
{
    cursor c = {limits, data, size, 0, 0, TDDP_WIRE_COMPLETE, progress, out};
    const char *opcode = take(&c, 1);
    if (!opcode) {
        return c.result;
    }
    unsigned char byte = (unsigned char)*opcode;
    tddp_wire_request request = {.kind = tddp_wire_kind_of(dialect, byte)};
    if (request.kind == TDDP_WIRE_KINDS) {
        snprintf(out->fault, sizeof out->fault, "unknown opcode 0x%02x", byte);
        return TDDP_WIRE_MALFORMED;
    }
    unsigned values = 0;
    for (const char *field = fields_of[request.kind]; *field; field++) {
        if (!take_field(&c, *field, &values, &request)) {
            return c.result;
        }
    }
    request.size = c.at;
    out->request = request;
    *progress = (tddp_wire_progress){0};
    return TDDP_WIRE_COMPLETE;
}

tddp_wire_result tddp_wire_choose(const char *data, size_t size, const tddp_wire_dialect **dialect,
                                  tddp_wire_parse *out)
{
    static const unsigned char hello_2x[] = {TDDP_WIRE_VALIDATE, 0xce, 0xf7, 0x85, 0x3c};
    size_t same = 0;
    while (same < sizeof hello_2x && same < size && (unsigned char)data[same] == hello_2x[same]) {
        same++;
    }
    if (same == size && size < sizeof hello_2x) {
        out->needed = sizeof hello_2x;
        return TDDP_WIRE_MORE;
    }
    /* A SET of 1.13 begins with the same byte; its length then distinguishes the two. */
    if (same < sizeof hello_2x && (unsigned char)*data >= sizeof kinds_1_13) {
        snprintf(out->fault, sizeof out->fault,
                 "it uses the store protocol of neither PyTorch 2.x nor 1.13");
        return TDDP_WIRE_MALFORMED;
    }
    *dialect = same < sizeof hello_2x ? &tddp_wire_1_13 : &tddp_wire_2x;
    return TDDP_WIRE_COMPLETE;
}

tddp_slice tddp_wire_next(tddp_slice *list)
{
    tddp_slice string = {list->data + 8, (size_t)tddp_wire_u64(list->data)};
    list->data += 8 + string.size;
    list->size -= 8 + string.size;
    return string;
}

tddp_status tddp_wire_put_byte(tddp_bytes *to, unsigned char byte)
{
    return tddp_bytes_append(to, &byte, 1);
}

tddp_status tddp_wire_put_u32(tddp_bytes *to, uint32_t number)
{
    uint32_t bytes = htole32(number);
    return tddp_bytes_append(to, &bytes, sizeof bytes);
}

tddp_status tddp_wire_put_u64(tddp_bytes *to, uint64_t number)
{
    uint64_t bytes = htole64(number);
    return tddp_bytes_append(to, &bytes, sizeof bytes);
}

tddp_status tddp_wire_put_string(tddp_bytes *to, tddp_slice string)
{
    tddp_status status = tddp_wire_put_u64(to, string.size);
    return status ? status : tddp_bytes_append(to, string.data, string.size);
}

uint64_t tddp_wire_u64(const char bytes[8])
{
    uint64_t number;
    memcpy(&number, bytes, sizeof number);
    return le64toh(number);
}
