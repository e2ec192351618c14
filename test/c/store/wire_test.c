/*
 * The request parser on every opcode: whole, byte by byte, cut at every place, and wrong.
 */
#include "store/wire.h"
#include "store_fixture.h"

/* A request that arrives as a whole, or does not. */
static tddp_wire_result read_whole(const tddp_wire_dialect *dialect, const tddp_wire_limits *limits,
                                   const char *data, size_t size, tddp_wire_parse *out)
{
    tddp_wire_progress none = {0};
    return tddp_wire_read_on(dialect, limits, data, size, &none, out);
}

typedef struct example {
    tddp_wire_kind kind;
    const char *hex;
    bool old; /* in the dialect of 1.13 */
} example;

static const example examples[] = {
    {TDDP_WIRE_VALIDATE, "00 cef7853c", false},
    {TDDP_WIRE_SET, "01 [2]2f6b [1]76", false},
    {TDDP_WIRE_SET, "01 [2]2f65 [0]", false},
    {TDDP_WIRE_COMPARE_SET, "02 [2]2f63 [3]626164 [1]7a", false},
    {TDDP_WIRE_GET, "03 [2]2f6b", false},
    {TDDP_WIRE_ADD, "04 [2]2f6e f9ffffffffffffff", false},
    {TDDP_WIRE_CHECK, "05 [2] [2]2f6b [5]2f6e6f7065", false},
    {TDDP_WIRE_WAIT, "06 [1] [2]2f6b", false},
    {TDDP_WIRE_WAIT, "06 [0]", false},
    {TDDP_WIRE_NUM_KEYS, "07", false},
    {TDDP_WIRE_DELETE_KEY, "08 [3]2f6b32", false},
    {TDDP_WIRE_APPEND, "09 [2]2f61 [2]3132", false},
    {TDDP_WIRE_MULTI_GET, "0a [2] [3]2f6d31 [3]2f6d32", false},
    {TDDP_WIRE_MULTI_SET, "0b [2] [3]2f6d31 [1]31 [3]2f6d32 [2]3232", false},
    {TDDP_WIRE_CANCEL_WAIT, "0c", false},
    {TDDP_WIRE_PING, "0d d5590000", false},
    {TDDP_WIRE_QUEUE_PUSH, "0e [2]2f71 [1]76", false},
    {TDDP_WIRE_QUEUE_POP, "0f [2]2f71", false},
    {TDDP_WIRE_QUEUE_LEN, "10 [2]2f71", false},
    {TDDP_WIRE_LIST_KEYS, "11", false},
    {TDDP_WIRE_BARRIER, "12 [2]2f62 [3]", false},
    {TDDP_WIRE_AUTH_BEGIN, "f0 00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
     false},
    {TDDP_WIRE_AUTH_PROVE, "f1 00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
     false},
    {TDDP_WIRE_SET_EPHEMERAL, "f2 [2]2f6b [1]76 [500] 01", false},
    {TDDP_WIRE_WATCH, "f3 [1]2f 00", false},
    {TDDP_WIRE_SET, "00 [2]2f6b [1]76", true},
    {TDDP_WIRE_COMPARE_SET, "01 [2]2f63 [3]626164 [1]7a", true},
    {TDDP_WIRE_GET, "02 [2]2f6b", true},
    {TDDP_WIRE_ADD, "03 [2]2f6e f9ffffffffffffff", true},
    {TDDP_WIRE_CHECK, "04 [2] [2]2f6b [5]2f6e6f7065", true},
    {TDDP_WIRE_WAIT, "05 [1] [2]2f6b", true},
    {TDDP_WIRE_NUM_KEYS, "06", true},
    {TDDP_WIRE_DELETE_KEY, "08 [3]2f6b32", true},
};
enum { EXAMPLES = sizeof examples / sizeof *examples };

/* Parses a copy of exactly `size` bytes, so that a sanitizer sees a step beyond. */
static tddp_wire_result read_as(const tddp_wire_dialect *dialect, const tddp_wire_limits *limits,
                                const char *data, size_t size, tddp_wire_parse *out)
{
    char *copy = malloc(size ? size : 1);
    memcpy(copy, data, size);
    tddp_wire_result result = read_whole(dialect, limits, copy, size, out);
    free(copy);
    return result;
}

static tddp_wire_result read_exactly(const tddp_wire_limits *limits, const char *data, size_t size,
                                     tddp_wire_parse *out)
{
    return read_as(&tddp_wire_2x, limits, data, size, out);
}

static const tddp_wire_dialect *dialect_of(const example *e)
{
    return e->old ? &tddp_wire_1_13 : &tddp_wire_2x;
}

TEST(every_opcode_is_read_whole)
{
    tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
    bool seen[TDDP_WIRE_KINDS] = {false};
    for (int i = 0; i < EXAMPLES; i++) {
        char bytes[256];
        size_t size = from_hex(examples[i].hex, bytes);
        tddp_wire_parse parse;
        const tddp_wire_dialect *dialect = dialect_of(&examples[i]);
        CHECK_INT(read_as(dialect, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
        CHECK_INT(parse.request.kind, examples[i].kind);
        CHECK_INT(parse.request.size, size);
        seen[examples[i].kind] = true;
        /* What follows is left alone. */
        memset(bytes + size, 0xff, 16);
        CHECK_INT(read_as(dialect, &limits, bytes, size + 16, &parse), TDDP_WIRE_COMPLETE);
        CHECK_INT(parse.request.size, size);
    }
    for (int kind = 0; kind < TDDP_WIRE_KINDS; kind++) {
        CHECK(seen[kind]);
    }
}

TEST(every_truncation_wants_more_and_never_too_much)
{
    tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
    for (int i = 0; i < EXAMPLES; i++) {
        char bytes[256];
        size_t size = from_hex(examples[i].hex, bytes);
        for (size_t cut = 0; cut < size; cut++) {
            tddp_wire_parse parse = {.needed = 0};
            CHECK_INT(read_as(dialect_of(&examples[i]), &limits, bytes, cut, &parse),
                      TDDP_WIRE_MORE);
            CHECK(parse.needed > cut);
            CHECK(parse.needed <= size);
        }
    }
}

TEST(fields_are_where_they_belong)
{
    tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
    tddp_wire_parse parse;
    char bytes[256];
    size_t size = from_hex("02 [2]2f63 [3]626164 [1]7a", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
    CHECK(parse.request.key.size == 2 && memcmp(parse.request.key.data, "/c", 2) == 0);
    CHECK(parse.request.values[0].size == 3 && memcmp(parse.request.values[0].data, "bad", 3) == 0);
    CHECK(parse.request.values[1].size == 1 && parse.request.values[1].data[0] == 'z');
    size = from_hex("04 [2]2f6e f9ffffffffffffff", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
    CHECK_INT(parse.request.number, -7);
    size = from_hex("0d ffffffff", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
    CHECK_INT(parse.request.number, UINT32_MAX);
    size = from_hex("f2 [2]2f6b [1]76 [500] 01", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
    CHECK(parse.request.key.size == 2 && parse.request.values[0].size == 1);
    CHECK_INT(parse.request.number, 500);
    CHECK(parse.request.flag);
    size = from_hex("f3 [1]2f 00", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
    CHECK(parse.request.key.size == 1 && !parse.request.flag);
    size = from_hex("0b [2] [3]2f6d31 [1]31 [3]2f6d32 [2]3232", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_COMPLETE);
    CHECK_INT(parse.request.count, 2);
    static const char *const strings[] = {"/m1", "1", "/m2", "22"};
    for (int i = 0; i < 4; i++) {
        tddp_slice string = tddp_wire_next(&parse.request.list);
        CHECK_INT(string.size, strlen(strings[i]));
        CHECK_INT(memcmp(string.data, strings[i], string.size), 0);
    }
    CHECK_INT(parse.request.list.size, 0);
}

static void check_malformed(const tddp_wire_limits *limits, const char *hex, const char *fault)
{
    char bytes[256];
    tddp_wire_parse parse;
    CHECK_INT(read_exactly(limits, bytes, from_hex(hex, bytes), &parse), TDDP_WIRE_MALFORMED);
    CHECK_CONTAINS(parse.fault, fault);
}

TEST(gigantic_lengths_are_refused_at_once)
{
    tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
    check_malformed(&limits, "01 [8193]",
                    "key of bytes 8193, at most 8192 allowed (TDDP_STORE_MAX_KEY_BYTES)");
    check_malformed(&limits, "01 ffffffffffffffff", "key of bytes 18446744073709551615");
    check_malformed(&limits, "01 [1]6b [8388609]", "value of bytes 8388609, at most 8388608");
    check_malformed(&limits, "06 [131073]", "keys in one request: 131073, at most 131072");
    check_malformed(&limits, "06 ffffffffffffffff", "keys in one request");
    check_malformed(&limits, "0b [1] [1]6b ffffffffffffffff", "value of bytes");
    check_malformed(&limits, "02 [1]6b [1]76 [8388609]", "value of bytes");
    check_malformed(&limits, "13", "unknown opcode 0x13");
    check_malformed(&limits, "ff", "unknown opcode 0xff");
    check_malformed(&limits, "f4", "unknown opcode 0xf4");
    check_malformed(&limits, "f3 [8193]", "key of bytes 8193, at most 8192");
    check_malformed(&limits, "f2 [1]6b [8388609]", "value of bytes");
    check_malformed(&limits, "47455420", "unknown opcode 0x47");
}

TEST(limits_can_be_chosen)
{
    tddp_wire_limits limits = tddp_wire_limits_of(3, 2);
    check_malformed(&limits, "01 [4]",
                    "key of bytes 4, at most 3 allowed (TDDP_STORE_MAX_KEY_BYTES)");
    check_malformed(&limits, "01 [1]6b [3]",
                    "value of bytes 3, at most 2 allowed (TDDP_STORE_MAX_VALUE_BYTES)");
    limits = tddp_wire_limits_of(SIZE_MAX, SIZE_MAX);
    check_malformed(&limits, "01 ffffffffffffffff", "key of bytes");
    tddp_wire_parse parse;
    char bytes[64];
    size_t size = from_hex("01 [1099511627776]", bytes);
    CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &parse), TDDP_WIRE_MORE);
    CHECK(parse.needed == (size_t)9 + (UINT64_C(1) << 40) + (size_t)0);
}

TEST(a_request_has_a_limit_as_a_whole)
{
    tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
    limits.request_bytes = 64;
    check_malformed(&limits, "0b [4]",
                    "request of bytes 73, at most 64 allowed (TDDP_STORE_MAX_REQUEST_BYTES)");
    check_malformed(&limits, "01 [60]", "request of bytes 69");
}

TEST(the_first_five_bytes_tell_the_dialect)
{
    static const char hello[] = "\x00\xce\xf7\x85\x3c\x0d";
    const tddp_wire_dialect *dialect = NULL;
    tddp_wire_parse parse;
    for (size_t size = 0; size < 5; size++) {
        CHECK_INT(tddp_wire_choose(hello, size, &dialect, &parse), TDDP_WIRE_MORE);
        CHECK_INT(parse.needed, 5);
    }
    CHECK(!dialect);
    CHECK_INT(tddp_wire_choose(hello, 6, &dialect, &parse), TDDP_WIRE_COMPLETE);
    CHECK_TEXT(dialect->name, "2.x");
    CHECK_INT(tddp_wire_choose("GET / HTTP/1.1", 14, &dialect, &parse), TDDP_WIRE_MALFORMED);
    CHECK_INT(tddp_wire_choose("\x0d", 1, &dialect, &parse), TDDP_WIRE_MALFORMED);
    CHECK_INT(tddp_wire_choose("\x09", 1, &dialect, &parse), TDDP_WIRE_MALFORMED);
    CHECK_CONTAINS(parse.fault, "neither PyTorch 2.x nor 1.13");
    CHECK_TEXT(dialect->name, "2.x");
}

TEST(anything_but_the_hello_is_the_older_dialect)
{
    tddp_wire_parse parse;
    for (char opcode = 1; opcode <= 8; opcode++) {
        const tddp_wire_dialect *dialect = NULL;
        CHECK_INT(tddp_wire_choose(&opcode, 1, &dialect, &parse), TDDP_WIRE_COMPLETE);
        CHECK_TEXT(dialect->name, "1.13");
    }
    /* A SET parts from the hello at its second byte or, with a long key, later. */
    static const char *const sets[] = {"00 02", "00 ce00", "00 cef700", "00 cef78500",
                                       "00 cef7853d"};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        char bytes[16];
        size_t size = from_hex(sets[i], bytes);
        const tddp_wire_dialect *dialect = NULL;
        CHECK_INT(tddp_wire_choose(bytes, size - 1, &dialect, &parse), TDDP_WIRE_MORE);
        CHECK_INT(tddp_wire_choose(bytes, size, &dialect, &parse), TDDP_WIRE_COMPLETE);
        CHECK_TEXT(dialect->name, "1.13");
        tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
        CHECK_INT(read_whole(dialect, &limits, bytes, size, &parse), TDDP_WIRE_MORE);
    }
}

TEST(a_list_in_pieces_is_not_read_again)
{
    static const char *const lists[] = {"06 [3] [2]2f6b [0] [4]2f6b6b6b",
                                        "0b [2] [3]2f6d31 [1]31 [3]2f6d32 [2]3232"};
    tddp_wire_limits limits = tddp_wire_limits_of(0, 0);
    for (int i = 0; i < 2; i++) {
        char bytes[256];
        size_t size = from_hex(lists[i], bytes);
        tddp_wire_progress progress = {0};
        tddp_wire_parse parse;
        tddp_wire_parse whole;
        uint64_t seen = 0;
        for (size_t part = 0; part < size; part++) {
            CHECK_INT(tddp_wire_read_on(&tddp_wire_2x, &limits, bytes, part, &progress, &parse),
                      TDDP_WIRE_MORE);
            CHECK(parse.needed > part && parse.needed <= size);
            CHECK(progress.done >= seen && progress.at <= part);
            seen = progress.done;
        }
        CHECK_INT(seen, i ? 1 : 2);
        CHECK_INT(tddp_wire_read_on(&tddp_wire_2x, &limits, bytes, size, &progress, &parse),
                  TDDP_WIRE_COMPLETE);
        CHECK_INT(read_whole(&tddp_wire_2x, &limits, bytes, size, &whole), TDDP_WIRE_COMPLETE);
        CHECK_INT(parse.request.size, whole.request.size);
        CHECK_INT(parse.request.count, whole.request.count);
        CHECK_INT(parse.request.list.size, whole.request.list.size);
        CHECK(parse.request.list.data == whole.request.list.data);
        CHECK_INT(progress.at, 0);
        CHECK_INT(progress.done, 0);
    }
}
