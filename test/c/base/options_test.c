/* Options of callers that were compiled against older and newer headers; the version. */
#include <stdio.h>
#include <string.h>

#include <tddp/version.h>

#include "base/options.h"
#include "check.h"

/* As the first release had it, as the library has it, and as a later one does. */
typedef struct first_opts {
    size_t size;
    int a;
    int b;
} first_opts;

typedef struct opts {
    size_t size;
    int a;
    int b;
    const char *c;
    int d;
} opts;

typedef struct later_opts {
    opts known;
    int64_t e;
} later_opts;

#define OPTS_INIT                      \
    {                                  \
        sizeof(opts), 1, 2, "three", 4 \
    }

static tddp_status read_opts(const void *given, opts *out)
{
    *out = (opts)OPTS_INIT;
    return tddp_opts_read("OPTS_INIT", given, TDDP_OPTS_UNTIL(first_opts, b), out, sizeof *out);
}

TEST(what_an_older_caller_does_not_know_keeps_its_default)
{
    opts all;
    const first_opts first = {sizeof first, 10, 20};
    CHECK_OK(read_opts(&first, &all));
    CHECK_INT(all.size, sizeof all);
    CHECK_INT(all.a, 10);
    CHECK_INT(all.b, 20);
    CHECK_TEXT(all.c, "three");
    CHECK_INT(all.d, 4);
}

TEST(options_without_a_size_are_refused)
{
    opts all;
    first_opts first = {TDDP_OPTS_UNTIL(first_opts, b) - 1, 10, 20};
    CHECK_STATUS(read_opts(&first, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "OPTS_INIT, of 16 bytes or more");
    first.size = 0;
    CHECK_STATUS(read_opts(&first, &all), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(read_opts(NULL, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "NULL");
    CHECK_INT(all.a, 1);
}

TEST(a_newer_caller_may_leave_the_rest_zero)
{
    opts all;
    later_opts later = {OPTS_INIT, 0};
    later.known.size = sizeof later;
    later.known.d = 44;
    CHECK_OK(read_opts(&later, &all));
    CHECK_INT(all.size, sizeof all);
    CHECK_INT(all.d, 44);
    later.e = INT64_C(1) << 56;
    CHECK_STATUS(read_opts(&later, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "compiled for a newer libtddp");
}

TEST(options_of_all_sizes_are_filled)
{
    const opts defaults = OPTS_INIT;
    opts all;
    first_opts first[2];
    memset(first, 'x', sizeof first);
    tddp_opts_fill(&defaults, sizeof defaults, first, sizeof *first);
    CHECK_INT(first->size, sizeof *first);
    CHECK_INT(first->b, 2);
    CHECK_INT(((char *)&first[1])[0], 'x');
    CHECK_OK(read_opts(first, &all));
    CHECK_INT(all.d, 4);
    later_opts later;
    memset(&later, 'x', sizeof later);
    tddp_opts_fill(&defaults, sizeof defaults, &later, sizeof later);
    CHECK_INT(later.known.size, sizeof later);
    CHECK_INT(later.known.d, 4);
    CHECK_INT(later.e, 0);
    CHECK_OK(read_opts(&later, &all));
}

TEST(the_version_is_one)
{
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", TDDP_VERSION_MAJOR, TDDP_VERSION_MINOR,
             TDDP_VERSION_PATCH);
    CHECK_TEXT(TDDP_VERSION, text);
    CHECK_TEXT(tddp_version(), text);
}
