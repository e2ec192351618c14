#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "launch/report/report.h"

TEST(json_has_its_commas_and_escapes)
{
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    tddp_launch_json_text(&json, "a", "x\"\n\xff\x7f\xc2\x9b\xc3\xa9");
    tddp_launch_json_text(&json, "b", NULL);
    tddp_launch_json_open(&json, "c", '[');
    tddp_launch_json_number(&json, NULL, -3);
    tddp_launch_json_open(&json, NULL, '[');
    tddp_launch_json_close(&json, '[');
    tddp_launch_json_bool(&json, NULL, true);
    tddp_launch_json_close(&json, '[');
    tddp_launch_json_bool(&json, "d", false);
    tddp_launch_json_close(&json, '{');
    CHECK(!json.failed);
    CHECK_OK(tddp_bytes_append(&json.text, "", 1));
    CHECK_TEXT(
        json.text.data,
        "{\n\"a\": \"x\\\"\\u000a\\ufffd\\u007f\\u009b\xc3\xa9\",\n\"b\": null,\n\"c\": [\n-3,\n[],"
        "\ntrue],\n\"d\": false}");
    tddp_bytes_free(&json.text);
}

TEST(json_knows_that_memory_was_short)
{
    tddp_launch_json json = {0};
    tddp_fail_allocation(1);
    tddp_launch_json_open(&json, NULL, '{');
    tddp_fail_allocation(0);
    tddp_launch_json_close(&json, '{');
    CHECK(json.failed);
    tddp_bytes_free(&json.text);
}

static void read_back(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t got = fread(text, 1, size - 1, file);
    text[got] = '\0';
    fclose(file);
}

TEST(files_are_replaced_whole)
{
    char folder[] = "/tmp/report-test-XXXXXX";
    char path[64];
    char link[64];
    char missing[64];
    char text[32];
    struct stat found;
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/a", folder);
    (void)snprintf(link, sizeof link, "%s/b", folder);
    (void)snprintf(missing, sizeof missing, "%s/c/d", folder);
    CHECK_OK(tddp_launch_write_file(path, "one, longer", 11));
    CHECK_INT(symlink(path, link), 0);
    CHECK_OK(tddp_launch_write_file(link, "two", 3));
    CHECK_INT(lstat(link, &found), 0);
    CHECK(S_ISLNK(found.st_mode));
    read_back(path, text, sizeof text);
    CHECK_TEXT(text, "two");
    CHECK(tddp_launch_write_file(missing, "x", 1) == TDDP_SYSTEM);
    CHECK(strstr(tddp_error_message(), missing) != NULL);
    CHECK_OK(tddp_launch_write_file("/dev/null", "x", 1));
    CHECK_INT(stat("/dev/null", &found), 0);
    CHECK(S_ISCHR(found.st_mode));
    CHECK_INT(unlink(path), 0);
    /* A pipe that nobody reads is not waited for. */
    CHECK_INT(mkfifo(path, 0600), 0);
    CHECK(tddp_launch_write_file(path, "x", 1) == TDDP_SYSTEM);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(unlink(link), 0);
    CHECK_INT(rmdir(folder), 0); /* no draft is left */
}

TEST(failures_come_in_the_order_of_their_times)
{
    tddp_launch_worker workers[5] = {
        {.pid = 1, .local_rank = 0, .wait_status = 1 << 8, .ended = {10, 9}},
        {.pid = 2, .local_rank = 1, .wait_status = 15, .ended_by_us = true, .ended = {1, 0}},
        {.pid = 3, .local_rank = 2, .wait_status = 9, .ended = {10, 3}},
        {.pid = 4, .local_rank = 3, .wait_status = 1 << 8, .ended = {20, 0}},
        {.pid = 5, .local_rank = 4, .wait_status = 1 << 8, .ended = {2, 0}},
    };
    workers[3].error.timestamp = 9;
    workers[4].error.consequence = true;
    static const int expected[] = {4, 3, 1, 5};
    const tddp_launch_worker *one = NULL;
    for (int i = 0; i < 4; i++) {
        one = tddp_launch_failure(workers, 5, one);
        CHECK(one != NULL);
        CHECK_INT(one->pid, expected[i]);
    }
    CHECK(tddp_launch_failure(workers, 5, one) == NULL);
    CHECK_INT(tddp_launch_exit_code(&workers[2]), -9);
}

TEST(the_summary_is_cut_in_its_middle)
{
    enum { LONG = 20000 };
    char message[] = "m\xc3\xb6";
    char *traceback = malloc(LONG + 1);
    char text[2048];
    char whole[LONG * 2];
    for (int i = 0; i < LONG; i++) {
        traceback[i] = i % 2 ? '\xb6' : '\xc3';
    }
    traceback[LONG] = '\0';
    tddp_launch_worker worker = {.pid = 7, .rank = 3, .wait_status = 5 << 8, .ended = {1, 0}};
    CHECK_TEXT(tddp_launch_report_summary(&worker, 0, 2, text, sizeof text), "");
    worker.error.message = message;
    worker.error.traceback = traceback;
    (void)tddp_launch_report_summary(&worker, 1, 2, text, sizeof text);
    CHECK(strncmp(text, "rank 3 on node 2: exit code 5 (pid 7 on ", 40) == 0);
    CHECK(strstr(text, ")\nm\xc3\xb6\n\xc3\xb6") != NULL);
    const char *gap = strstr(text, "\n[...]\n");
    CHECK(gap != NULL && gap[-1] == '\xb6' && gap[7] == '\xc3');
    CHECK(strlen(text) > sizeof text - 16);
    (void)tddp_launch_report_summary(&worker, 1, 2, whole, sizeof whole);
    CHECK(strstr(whole, "[...]") == NULL);
    for (size_t size = 1; size < 300; size++) {
        CHECK(strlen(tddp_launch_report_summary(&worker, 1, 2, text, size)) < size);
    }
    free(traceback);
}

/* Whatever stands where the error file should: an answer at once. */
TEST(error_files_of_any_kind)
{
    char folder[] = "/tmp/report-test-XXXXXX";
    char path[64];
    tddp_launch_error error = {.missing = "none"};
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/error.json", folder);
    tddp_launch_error_read(path, &error);
    CHECK_TEXT(error.missing, "none");
    CHECK_INT(mkfifo(path, 0600), 0);
    tddp_launch_error_read(path, &error);
    CHECK_CONTAINS(error.missing, "not read: it is no ordinary file");
    CHECK_INT(unlink(path), 0);
    CHECK_INT(symlink("/dev/zero", path), 0);
    tddp_launch_error_read(path, &error);
    CHECK_CONTAINS(error.missing, "not read: it is no ordinary file");
    CHECK_INT(unlink(path), 0);
    CHECK_INT(mkdir(path, 0700), 0);
    tddp_launch_error_read(path, &error);
    CHECK_CONTAINS(error.missing, "not read: it is no ordinary file");
    CHECK_INT(rmdir(path), 0);
    CHECK_OK(tddp_launch_write_file(path, "garbage \x01\xff", 10));
    tddp_launch_error_read(path, &error);
    CHECK_CONTAINS(error.missing, "not understood");
    tddp_launch_error_free(&error);
    int fd = open(path, O_WRONLY);
    CHECK_INT(ftruncate(fd, (off_t)1 << 40), 0);
    close(fd);
    tddp_launch_error_read(path, &error);
    CHECK_CONTAINS(error.missing, "not read: it is no ordinary file");
    CHECK_INT(unlink(path), 0);
    CHECK_INT(rmdir(folder), 0);
}
