#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "launch/command/program.h"
#include "launch/report/report.h"

static tddp_launch_error parsed(const char *text)
{
    tddp_launch_error error;
    tddp_launch_error_parse(text, strlen(text), &error);
    return error;
}

TEST(an_error_file_in_pytorchs_form)
{
    tddp_launch_error error =
        parsed("{\"message\": {\"message\": \"ValueError: \\\"b\\u00f6\\ud83d\\ude00m\\\"\\n\", "
               "\"extraInfo\": {\"py_callstack\": \"a\\tb\", \"timestamp\": \"1795276170\"}}, "
               "\"errorCode\": 3}");
    CHECK_TEXT(error.message, "ValueError: \"b\xc3\xb6\xf0\x9f\x98\x80m\"\n");
    CHECK_TEXT(error.traceback, "a\tb");
    CHECK(error.missing == NULL);
    CHECK_INT(error.timestamp, 1795276170);
    tddp_launch_error_free(&error);
}

TEST(an_error_file_with_a_plain_message)
{
    tddp_launch_error error =
        parsed(" {\"timestamp\": 12, \"message\": \"plain\", \"x\": [1, {}]}");
    CHECK_TEXT(error.message, "plain");
    CHECK_INT(error.timestamp, 12);
    CHECK(error.traceback == NULL);
    tddp_launch_error_free(&error);
}

TEST(a_broken_error_file_gives_what_there_is)
{
    static const char whole[] =
        "{\"message\": {\"message\": \"m\\u00e4\", \"extraInfo\": {\"py_callstack\": \"t\"}}}";
    for (size_t size = 0; size < sizeof whole; size++) {
        tddp_launch_error error;
        tddp_launch_error_parse(whole, size, &error);
        CHECK(!error.message || strcmp(error.message, "m\xc3\xa4") == 0);
        tddp_launch_error_free(&error);
    }
    static char deep[1000];
    memset(deep, '[', sizeof deep);
    tddp_launch_error error;
    tddp_launch_error_parse(deep, sizeof deep, &error);
    CHECK(error.message == NULL);
}

TEST(macros_in_arguments)
{
    const char *arguments[] = {"a${local_rank}b${local_rank}", "", "${local_ran} $local_rank ${",
                               "${local_rank}", NULL};
    const tddp_launch_program program = {.arguments = arguments};
    char **list = tddp_launch_program_argv(&program, 12);
    CHECK(list != NULL);
    CHECK_TEXT(list[0], "a12b12");
    CHECK_TEXT(list[1], "");
    CHECK_TEXT(list[2], "${local_ran} $local_rank ${");
    CHECK_TEXT(list[3], "12");
    CHECK(list[4] == NULL);
    free(list);
    bool whole = false;
    for (long nth = 1; nth < 20 && !whole; nth++) {
        tddp_fail_allocation(nth);
        list = tddp_launch_program_argv(&program, 0);
        whole = !tddp_fail_allocation(0);
        CHECK(whole == (list != NULL));
        free(list);
    }
    CHECK(whole);
}

TEST(the_root_cause_is_the_first_that_failed_by_itself)
{
    tddp_launch_worker workers[3] = {
        {.pid = 1, .rank = 0, .wait_status = 15, .ended_by_us = true, .ended = {5, 0}},
        {.pid = 2, .rank = 1, .wait_status = 1 << 8, .ended = {10, 9}},
        {.pid = 3, .rank = 2, .wait_status = 9, .ended = {10, 3}},
    };
    char text[TDDP_LAUNCH_ENDING_BYTES];
    const tddp_launch_worker *root = tddp_launch_failure(workers, 3, NULL);
    CHECK(root == &workers[2]);
    CHECK_TEXT(tddp_launch_ending(root, text), "killed by SIGKILL");
    CHECK_TEXT(tddp_launch_ending(&workers[1], text), "exit code 1");
    workers[1].wait_status = workers[2].wait_status = 0;
    CHECK(tddp_launch_failure(workers, 3, NULL) == NULL);
}
