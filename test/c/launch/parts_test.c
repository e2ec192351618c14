#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "launch/workers/environment.h"
#include "launch/report/error_file.h"
#include "launch/command/program.h"
#include "launch/report/report.h"
#include "launch/workers/resources.h"

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
    char *text = tddp_launch_substitute("a${local_rank}b${local_rank}", 12);
    CHECK_TEXT(text, "a12b12");
    free(text);
    text = tddp_launch_substitute("${local_ran} $local_rank ${", 1);
    CHECK_TEXT(text, "${local_ran} $local_rank ${");
    free(text);
}

TEST(visible_devices_are_counted_as_cuda_does)
{
    CHECK_INT(tddp_launch_visible_devices(""), 0);
    CHECK_INT(tddp_launch_visible_devices("0"), 1);
    CHECK_INT(tddp_launch_visible_devices("2,0, 1"), 3);
    CHECK_INT(tddp_launch_visible_devices("0,-1,2"), 1);
    CHECK_INT(tddp_launch_visible_devices("GPU-8932f937,MIG-1"), 2);
    CHECK_INT(tddp_launch_visible_devices("none"), 0);
}

TEST(cores_are_at_least_one_and_at_most_the_machines)
{
    CHECK(tddp_launch_cores() >= 1);
    CHECK(tddp_launch_cores() <= sysconf(_SC_NPROCESSORS_ONLN));
}

TEST(the_environment_replaces_what_is_there)
{
    setenv("RANK", "77", 1);
    setenv("OMP_NUM_THREADS", "5", 1);
    unsetenv("OPENBLAS_NUM_THREADS");
    tddp_launch_world world = {.node_rank = 1,
                               .nodes = 2,
                               .base_rank = 4,
                               .size = 8,
                               .local_size = 4,
                               .role_size = 8,
                               .role_base_rank = 4,
                               .master_port = 99,
                               .master_addr = "host0"};
    tddp_launch_job job = {"id", "role", 3};
    char **list = tddp_launch_environment(&world, &job, 2, "/x/error.json");
    CHECK(list != NULL);
    int ranks = 0;
    int threads = 0;
    for (char **at = list; *at; at++) {
        ranks += strncmp(*at, "RANK=", 5) == 0 ? (strcmp(*at, "RANK=6") == 0 ? 1 : 100) : 0;
        threads += strcmp(*at, "OMP_NUM_THREADS=5") == 0;
        threads += strcmp(*at, "OPENBLAS_NUM_THREADS=3") == 0;
    }
    CHECK_INT(ranks, 1);
    CHECK_INT(threads, 2);
    tddp_launch_list_free(list);
}

TEST(the_root_cause_is_the_first_that_failed_by_itself)
{
    tddp_launch_worker workers[3] = {
        {.pid = 1, .rank = 0, .wait_status = 15, .ended_by_us = true, .ended = {5, 0}},
        {.pid = 2, .rank = 1, .wait_status = 1 << 8, .ended = {10, 9}},
        {.pid = 3, .rank = 2, .wait_status = 9, .ended = {10, 3}},
    };
    char text[TDDP_LAUNCH_ENDING_BYTES];
    const tddp_launch_worker *root = tddp_launch_root_cause(workers, 3);
    CHECK(root == &workers[2]);
    CHECK_TEXT(tddp_launch_ending(root, text), "killed by SIGKILL");
    CHECK_TEXT(tddp_launch_ending(&workers[1], text), "exit code 1");
    workers[1].wait_status = workers[2].wait_status = 0;
    CHECK(tddp_launch_root_cause(workers, 3) == NULL);
}

/* With every allocation failing in turn, the makers of lists return NULL and leak nothing. */
TEST(short_memory_is_survived)
{
    tddp_launch_world world = {.nodes = 1, .size = 1, .local_size = 1};
    tddp_launch_job job = {"id", "role", 3};
    for (long nth = 1;; nth++) {
        tddp_fail_allocation(nth);
        char **list = tddp_launch_environment(&world, &job, 0, NULL);
        tddp_fail_allocation(0);
        if (list) {
            tddp_launch_list_free(list);
            CHECK(nth > 10);
            return;
        }
    }
}
