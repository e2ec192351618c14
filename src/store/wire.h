/*
 * The wire protocol of stores: parses requests from a buffer, and serialises messages into one.
 * Pure: no I/O, no allocation while parsing; any input is valid input.
 *
 *     +--------+----------------------------------------------------------+
 *     | opcode | fields: string = u64 length, bytes; numbers little-endian |
 *     +--------+----------------------------------------------------------+
 *
 * A dialect maps opcodes to kinds of request; the first bytes of a connection decide its dialect. A
 * kind has the same fields in every dialect.
 */
#ifndef TDDP_STORE_WIRE_H
#define TDDP_STORE_WIRE_H

#include "base/base.h"
#include <tddp/store.h>

/* The values are the opcodes of PyTorch 2.x, but for the last ones. */
typedef enum tddp_wire_kind {
    TDDP_WIRE_VALIDATE = 0x00,
    TDDP_WIRE_SET = 0x01,
    TDDP_WIRE_COMPARE_SET = 0x02,
    TDDP_WIRE_GET = 0x03,
    TDDP_WIRE_ADD = 0x04,
    TDDP_WIRE_CHECK = 0x05,
    TDDP_WIRE_WAIT = 0x06,
    TDDP_WIRE_NUM_KEYS = 0x07,
    TDDP_WIRE_DELETE_KEY = 0x08,
    TDDP_WIRE_APPEND = 0x09,
    TDDP_WIRE_MULTI_GET = 0x0a,
    TDDP_WIRE_MULTI_SET = 0x0b,
    TDDP_WIRE_CANCEL_WAIT = 0x0c,
    TDDP_WIRE_PING = 0x0d,
    TDDP_WIRE_QUEUE_PUSH = 0x0e,
    TDDP_WIRE_QUEUE_POP = 0x0f,
    TDDP_WIRE_QUEUE_LEN = 0x10,
    TDDP_WIRE_LIST_KEYS = 0x11,
    TDDP_WIRE_BARRIER = 0x12,
    TDDP_WIRE_AUTH_BEGIN, /* ours, from here on: see auth.h */
    TDDP_WIRE_AUTH_PROVE,
    TDDP_WIRE_SET_EPHEMERAL, /* key, value, limit, only if absent: answer WON, value then */
    TDDP_WIRE_WATCH,         /* prefix, at once: answer STOP_WAITING, count, keys and values */
    TDDP_WIRE_KINDS,
} tddp_wire_kind;

#define TDDP_WIRE_MAGIC UINT32_C(0x3C85F7CE)

/* The first of the opcodes that PyTorch has not, far from those it may still take; the bytes that
 * follow those of authentication. */
enum { TDDP_WIRE_OWN_OPCODES = 0xf0, TDDP_WIRE_AUTH_BYTES = 32 };

/* Single-byte answers. */
enum {
    TDDP_WIRE_READY = 0,
    TDDP_WIRE_NOT_READY = 1,
    TDDP_WIRE_STOP_WAITING = 0,
    TDDP_WIRE_WAIT_CANCELED = 1,
    TDDP_WIRE_LOST = 0, /* SET_EPHEMERAL: another has the key */
    TDDP_WIRE_WON = 1,
};

typedef struct tddp_wire_dialect {
    const char *name; /* of PyTorch */
} tddp_wire_dialect;

extern const tddp_wire_dialect tddp_wire_2x;
extern const tddp_wire_dialect tddp_wire_1_13;

/* TDDP_WIRE_KINDS if the dialect has no such opcode. */
tddp_wire_kind tddp_wire_kind_of(const tddp_wire_dialect *dialect, unsigned char opcode);

typedef struct tddp_wire_limits {
    uint64_t key_bytes;
    uint64_t value_bytes;
    uint64_t keys;          /* in one request */
    uint64_t request_bytes; /* of one complete request */
} tddp_wire_limits;

/* Limits from an option's bytes of key and value; 0 means the default, 8 KiB and 8 MiB. */
tddp_wire_limits tddp_wire_limits_of(uint64_t key_bytes, uint64_t value_bytes);

/* Above this no limit has a meaning: sums of a few cannot overflow below it. */
#define TDDP_WIRE_MOST (UINT64_C(1) << 48)

typedef enum tddp_wire_result {
    TDDP_WIRE_COMPLETE,
    TDDP_WIRE_MORE,      /* bytes are missing */
    TDDP_WIRE_MALFORMED, /* nothing after this can be understood */
} tddp_wire_result;

/* One request. Slices point into the parsed bytes. */
typedef struct tddp_wire_request {
    tddp_wire_kind kind;
    size_t size;          /* bytes of the complete request */
    tddp_slice key;       /* of requests with one key */
    tddp_slice values[2]; /* value; or expected and desired; AUTH_*: the 32 bytes */
    int64_t number;       /* ADD: delta; BARRIER: world size; SET_EPHEMERAL: ms; VALIDATE, PING */
    bool flag;            /* SET_EPHEMERAL: only if absent; WATCH: at once */
    uint64_t count;       /* of requests with a list */
    tddp_slice list;      /* its strings, for tddp_wire_next() */
} tddp_wire_request;

typedef struct tddp_wire_parse {
    tddp_wire_request request; /* if complete */
    size_t needed;             /* if more: the request has at least so many bytes */
    char fault[160];           /* if malformed: what was wrong */
} tddp_wire_parse;

/* Detects the dialect of a connection from its first bytes: PyTorch 2.x sends a hello, 1.13 starts
 * with a request. At most five bytes are wanted, and only while they may still become the hello. */
tddp_wire_result tddp_wire_choose(const char *data, size_t size, const tddp_wire_dialect **dialect,
                                  tddp_wire_parse *out);

/* How far a request was read whose end is missing. All zero at its start. */
typedef struct tddp_wire_progress {
    size_t at;     /* bytes, into its list; 0: nothing is known */
    uint64_t done; /* elements of the list */
} tddp_wire_progress;

/* Reads a request, which may arrive in pieces: does not parse again what was parsed before. `data`
 * is the request from its start each time. */
tddp_wire_result tddp_wire_read_on(const tddp_wire_dialect *dialect, const tddp_wire_limits *limits,
                                   const char *data, size_t size, tddp_wire_progress *progress,
                                   tddp_wire_parse *out);

/* Takes the next string off the list of a complete request. */
tddp_slice tddp_wire_next(tddp_slice *list);

/* Writing; little-endian. */
TDDP_NODISCARD tddp_status tddp_wire_put_byte(tddp_bytes *to, unsigned char byte);
TDDP_NODISCARD tddp_status tddp_wire_put_u32(tddp_bytes *to, uint32_t number);
TDDP_NODISCARD tddp_status tddp_wire_put_u64(tddp_bytes *to, uint64_t number);
TDDP_NODISCARD tddp_status tddp_wire_put_string(tddp_bytes *to, tddp_slice string);

uint64_t tddp_wire_u64(const char bytes[8]);

#endif
