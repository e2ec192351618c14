/* Conversions between float16 and float32 by every set of loops, copies, and which set is chosen.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/arith/set.h"
#include "backend/half.h"
#include "check.h"

enum { HALVES = 65536 };

static const char *const names[] = {"avx512", "avx2", "neon", "baseline"};
enum { NAMES = sizeof names / sizeof *names };

static uint16_t halves[HALVES];
static uint16_t narrow[HALVES];
static float floats[HALVES];

TEST(every_set_widens_halves_to_the_same_floats)
{
    for (int i = 0; i < HALVES; i++) {
        halves[i] = (uint16_t)i;
    }
    for (int n = 0; n < NAMES; n++) {
        const tddp_arith_set *set = tddp_arith_find(names[n]);
        if (!set) {
            continue;
        }
        set->widen_float16(floats, halves, HALVES);
        for (int i = 0; i < HALVES; i++) {
            CHECK_INT(tddp_backend_float_to_bits(floats[i]),
                      tddp_backend_float_to_bits(tddp_backend_from_float16((uint16_t)i)));
        }
        set->widen_bfloat16(floats, halves, HALVES);
        for (int i = 0; i < HALVES; i++) {
            CHECK_INT(tddp_backend_float_to_bits(floats[i]), (uint32_t)i << 16);
        }
    }
}

TEST(halves_round_trip)
{
    for (int i = 0; i < HALVES; i++) {
        halves[i] = (uint16_t)i;
    }
    tddp_arith_widen(TDDP_FLOAT16, floats, halves, HALVES);
    CHECK_DOUBLE(floats[0x3c00], 1, 0);
    tddp_arith_narrow(TDDP_FLOAT16, narrow, floats, HALVES);
    for (int i = 0; i < HALVES; i++) {
        CHECK_INT(narrow[i], (i & 0x7fff) > 0x7c00 ? i | 0x0200 : i);
    }
    tddp_arith_widen(TDDP_BFLOAT16, floats, halves, HALVES);
    CHECK_DOUBLE(floats[0x3f80], 1, 0);
    tddp_arith_narrow(TDDP_BFLOAT16, narrow, floats, HALVES);
    for (int i = 0; i < HALVES; i++) {
        CHECK_INT(narrow[i], (i & 0x7fff) > 0x7f80 ? i | 0x0040 : i);
    }
}

/* Floats all over the range, and around every place where rounding turns. */
static void check_narrowing(const tddp_arith_set *set, uint32_t low_bits)
{
    for (uint32_t i = 0; i < HALVES; i++) {
        floats[i] = tddp_backend_bits_to_float(i << 16 | low_bits);
    }
    set->narrow_float16(narrow, floats, HALVES);
    for (uint32_t i = 0; i < HALVES; i++) {
        CHECK_INT(narrow[i], tddp_backend_to_float16(floats[i]));
    }
    set->narrow_bfloat16(narrow, floats, HALVES);
    for (uint32_t i = 0; i < HALVES; i++) {
        CHECK_INT(narrow[i], tddp_backend_to_bfloat16(floats[i]));
    }
}

TEST(every_set_rounds_the_same)
{
    static const uint32_t low_bits[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x2000,
                                        0x3000, 0x7fff, 0x8000, 0x8001, 0xf000, 0xffff};
    for (int n = 0; n < NAMES; n++) {
        const tddp_arith_set *set = tddp_arith_find(names[n]);
        for (size_t i = 0; set && i < sizeof low_bits / sizeof *low_bits; i++) {
            check_narrowing(set, low_bits[i]);
        }
        for (uint32_t bits = 0; set && bits < 0x10000; bits += 769) {
            check_narrowing(set, bits);
        }
    }
}

/* Two bfloat16 and nothing: their sum is the rounding of what lies between all neighbours. */
TEST(bfloat16_sums_round_to_nearest_even)
{
    static uint16_t small[HALVES];
    for (int n = 0; n < NAMES; n++) {
        const tddp_arith_set *set = tddp_arith_find(names[n]);
        for (int distance = 7; set && distance < 11; distance++) {
            for (int i = 0; i < HALVES; i++) {
                halves[i] = (uint16_t)i;
                small[i] = (uint16_t)(i - (distance << 7));
            }
            tddp_arith_reduce_by(set, &(tddp_arith_job){
                                          .op = TDDP_REDUCE_SUM,
                                          .dtype = TDDP_BFLOAT16,
                                          .count = HALVES,
                                          .sources = (const void *const[]){halves, small},
                                          .source_count = 2,
                                          .results = (void *const[]){narrow},
                                          .result_count = 1,
                                          .factor = 1,
                                      });
            for (int i = 0; i < HALVES; i++) {
                float sum =
                    tddp_backend_from_bfloat16(halves[i]) + tddp_backend_from_bfloat16(small[i]);
                if (sum == sum) {
                    CHECK_INT(narrow[i], tddp_backend_to_bfloat16(sum));
                } else {
                    CHECK((narrow[i] & 0x7fff) > 0x7f80);
                }
            }
        }
    }
}

TEST(copies_of_any_size_and_place)
{
    static unsigned char from[5000];
    static unsigned char into[5000];
    static unsigned char expected[5000];
    for (size_t i = 0; i < sizeof from; i++) {
        from[i] = (unsigned char)(i * 7 % 251);
    }
    for (int n = 0; n < NAMES; n++) {
        const tddp_arith_set *set = tddp_arith_find(names[n]);
        for (size_t bytes = 0; set && bytes < 4700; bytes = bytes < 300 ? bytes + 1 : bytes + 397) {
            for (int i = 0; i < 4; i++) {
                const size_t at = (bytes * 13 + (size_t)i * 29) % 130;
                memset(into, 0x5a, sizeof into);
                memset(expected, 0x5a, sizeof expected);
                memcpy(expected + at, from + i, bytes);
                tddp_arith_copy_by(set, into + at, from + i, bytes, i % 2);
                CHECK(memcmp(into, expected, sizeof into) == 0);
            }
        }
    }
    tddp_arith_copy(NULL, NULL, 0, true);
    tddp_arith_copy(NULL, NULL, 0, false);
}

static int lines;

static void count_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)data;
    CHECK_INT(level, TDDP_LOG_WARN);
    CHECK_TEXT(room, "arith");
    CHECK_CONTAINS(text, "TDDP_ARITH=abacus");
    lines++;
}

TEST(the_baseline_can_be_requested)
{
    const char *name = tddp_arith_find("neon") ? "neon" : "baseline";
    tddp_log_set_sink(count_line, NULL);
    setenv("TDDP_ARITH", name, 1);
    CHECK_TEXT(tddp_arith_name(), name);
    CHECK_INT(lines, 0);
}

TEST(an_unknown_set_is_ignored_and_logged_once)
{
    tddp_log_set_sink(count_line, NULL);
    setenv("TDDP_ARITH", "abacus", 1);
    CHECK_TEXT(tddp_arith_name(), tddp_arith_find(NULL)->name);
    CHECK_TEXT(tddp_arith_name(), tddp_arith_find(NULL)->name);
    CHECK_INT(lines, 1);
}
