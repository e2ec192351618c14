#include <string.h>

#include "check.h"
#include "launch/output/lines.h"

/* Adds bytes; returns how many may go out. */
static size_t add(tddp_launch_lines *lines, const char *data, size_t size)
{
    CHECK_OK(tddp_bytes_append(&lines->pending, data, size));
    return tddp_launch_lines_ready(lines);
}

TEST(only_whole_lines_are_ready)
{
    tddp_launch_lines lines = {0};
    CHECK_INT(tddp_launch_lines_ready(&lines), 0);
    CHECK_INT(add(&lines, "one", 3), 0);
    CHECK_INT(add(&lines, " line\ntwo", 9), 9);
    tddp_launch_lines_consume(&lines, 9);
    CHECK_INT(lines.pending.size, 3);
    CHECK(memcmp(lines.pending.data, "two", 3) == 0);
    CHECK_INT(add(&lines, "\n\n\n", 3), 6);
    tddp_launch_lines_consume(&lines, 6);
    CHECK_INT(lines.pending.size, 0);
    tddp_launch_lines_free(&lines);
}

TEST(bytes_are_bytes)
{
    tddp_launch_lines lines = {0};
    CHECK_INT(add(&lines, "a\0\xff\r", 4), 0);
    CHECK_INT(add(&lines, "\nb", 2), 5);
    tddp_launch_lines_free(&lines);
}

TEST(a_newline_may_come_alone)
{
    tddp_launch_lines lines = {0};
    CHECK_INT(add(&lines, "a", 1), 0);
    CHECK_INT(add(&lines, "\n", 1), 2);
    tddp_launch_lines_consume(&lines, 2);
    CHECK_INT(add(&lines, "\n", 1), 1);
    tddp_launch_lines_free(&lines);
}

TEST(a_line_of_megabytes_is_whole_and_an_endless_one_goes_out_in_pieces)
{
    tddp_launch_lines lines = {0};
    static char piece[64 * 1024];
    memset(piece, 'x', sizeof piece);
    size_t pieces = TDDP_LAUNCH_LONGEST_LINE / sizeof piece;
    for (size_t i = 0; i + 1 < pieces; i++) {
        CHECK_INT(add(&lines, piece, sizeof piece), 0);
    }
    CHECK_INT(add(&lines, piece, sizeof piece), TDDP_LAUNCH_LONGEST_LINE);
    tddp_launch_lines_consume(&lines, TDDP_LAUNCH_LONGEST_LINE);
    CHECK_INT(lines.pending.capacity, 0);
    CHECK_INT(add(&lines, "end\n", 4), 4);
    tddp_launch_lines_free(&lines);
}

/* Any way to cut a text into two reads gives the same lines. */
TEST(cuts_do_not_matter)
{
    static const char text[] = "a\n\nbc\r\nd";
    size_t whole = 7;
    for (size_t cut = 0; cut < sizeof text; cut++) {
        tddp_launch_lines lines = {0};
        size_t first = add(&lines, text, cut);
        tddp_launch_lines_consume(&lines, first);
        size_t second = add(&lines, text + cut, sizeof text - 1 - cut);
        CHECK_INT(first + second, whole);
        tddp_launch_lines_free(&lines);
    }
}
