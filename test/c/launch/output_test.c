#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "desk.h"
#include "launch/output/layout.h"
#include "launch/output/output.h"
#include "launch/output/prefix.h"

/* --- prefixes -------------------------------------------------------------------------------- */

static void check_prefix(const char *template, const char *expected)
{
    tddp_launch_prefix_values values = {"trainer", "node7", 11, 3};
    char *made = tddp_launch_prefix_fill(template, &values);
    CHECK_TEXT(made, expected);
    free(made);
}

TEST(a_template_is_filled_in_as_python_does)
{
    check_prefix(NULL, "[trainer3]:");
    check_prefix("", "");
    check_prefix("${hostname}/${rank}> ", "node7/11> ");
    check_prefix("$rank.$local_rank|", "11.3|");
    check_prefix("$$rank $$$rank", "$rank $11");
    check_prefix("${rank", "${rank");
    check_prefix("${ranks} $other $1 $", "${ranks} $other $1 $");
    check_prefix("$role_name_x ${role_name}_x", "$role_name_x trainer_x");
}

TEST(colors_differ_between_neighbours_and_are_reset)
{
    char *first = tddp_launch_prefix_color("a:", 0);
    char *second = tddp_launch_prefix_color("a:", 1);
    char *later = tddp_launch_prefix_color("a:", 4000);
    CHECK_TEXT(first, "\033[36ma:\033[0m");
    CHECK_TEXT(second, "\033[33ma:\033[0m");
    CHECK_TEXT(later, first);
    free(first);
    free(second);
    free(later);
}

TEST(people_can_do_without_colors)
{
    unsetenv("NO_COLOR");
    setenv("TERM", "xterm", 1);
    CHECK_INT(tddp_launch_prefix_colors(), true);
    setenv("NO_COLOR", "", 1);
    CHECK_INT(tddp_launch_prefix_colors(), true);
    setenv("NO_COLOR", "1", 1);
    CHECK_INT(tddp_launch_prefix_colors(), false);
    unsetenv("NO_COLOR");
    setenv("TERM", "dumb", 1);
    CHECK_INT(tddp_launch_prefix_colors(), false);
}

/* --- folders --------------------------------------------------------------------------------- */

static bool exists(const char *folder, const char *name)
{
    char path[4096];
    struct stat found;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &found) == 0;
}

TEST(a_private_folder_goes_with_all_in_it)
{
    tddp_launch_layout layout = {0};
    struct stat found;
    CHECK_OK(tddp_launch_layout_make_private(NULL, &layout));
    CHECK_OK(tddp_launch_layout_begin(&layout, 0, 4));
    char *path = tddp_launch_layout_path(&layout, 3, "error.json");
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    fclose(file);
    char *copy = strdup(layout.run);
    CHECK_INT(stat(copy, &found), 0);
    CHECK_INT(found.st_mode & 0777, 0700);
    tddp_launch_layout_free(&layout);
    CHECK_INT(stat(copy, &found), -1);
    CHECK(layout.run == NULL && layout.attempt == NULL);
    free(copy);
    free(path);
}

TEST(each_start_has_a_folder_of_its_own)
{
    char parent[] = "/tmp/layout-test-XXXXXX";
    char deeper[64];
    tddp_launch_layout layout = {0};
    CHECK(mkdtemp(parent) != NULL);
    (void)snprintf(deeper, sizeof deeper, "%s/a/b", parent);
    CHECK_OK(tddp_launch_layout_make(deeper, "job/1", &layout));
    CHECK_INT(strncmp(layout.run, deeper, strlen(deeper)), 0);
    CHECK_INT(strncmp(layout.run + strlen(deeper), "/job_1_", 7), 0);
    CHECK_INT(strlen(layout.run), strlen(deeper) + 7 + 8);
    CHECK(tddp_launch_layout_path(&layout, 0, "x") == NULL);
    CHECK_OK(tddp_launch_layout_begin(&layout, 0, 2));
    CHECK_OK(tddp_launch_layout_begin(&layout, 1, 1));
    CHECK_OK(tddp_launch_layout_begin(&layout, 1, 3));
    CHECK(exists(layout.run, "attempt_0/1") && !exists(layout.run, "attempt_0/2"));
    CHECK(exists(layout.run, "attempt_1/0") && !exists(layout.run, "attempt_1/1"));
    CHECK(exists(layout.run, "attempt_1.1/2"));
    char *path = tddp_launch_layout_path(&layout, -1, "all.log");
    CHECK_CONTAINS(path, "/attempt_1.1/all.log");
    free(path);
    layout.kept = false;
    tddp_launch_layout_free(&layout);
    CHECK_INT(rmdir(deeper), 0);
    deeper[strlen(parent) + 2] = '\0';
    CHECK_INT(rmdir(deeper), 0);
    CHECK_INT(rmdir(parent), 0);
}

TEST(a_log_folder_that_cannot_be_made)
{
    tddp_launch_layout layout = {0};
    CHECK_STATUS(tddp_launch_layout_make("/dev/null/logs", "x", &layout), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "cannot make the log folder /dev/null/logs");
    CHECK_STATUS(tddp_launch_layout_make("/dev/zero", "x", &layout), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "a file has that name");
    CHECK(layout.run == NULL);
}

/* --- a run's output --------------------------------------------------------------------------- */

static const tddp_launch_world two_workers = {
    .nodes = 2, .node_rank = 1, .base_rank = 2, .size = 4, .local_size = 2};

static tddp_status start_output(desk *made, const tddp_launch_options *options,
                                tddp_launch_output **out)
{
    tddp_launch_output *output = NULL;
    tddp_status status = tddp_launch_output_create(options, "job", &made->console, &output);
    if (status == TDDP_OK) {
        status = tddp_launch_output_begin(output, &two_workers);
        if (status == TDDP_OK) {
            *out = output;
        } else {
            tddp_launch_output_free(output);
        }
    }
    return status;
}

static void remove_folder(const char *folder)
{
    char command[256];
    (void)snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_INT(system(command), 0);
}

TEST(without_flags_all_comes_through_pipes)
{
    desk made;
    tddp_launch_output *output = NULL;
    tddp_launch_options options = {.role = "default"};
    open_desk(&made);
    CHECK_OK(start_output(&made, &options, &output));
    for (int i = 0; i < 4; i++) {
        CHECK_INT(tddp_launch_output_fd(output, i / 2, i % 2), -1);
        CHECK(tddp_launch_output_log_file(output, i / 2, i % 2) == NULL);
    }
    CHECK(tddp_launch_output_folder(output) == NULL);
    char *path = tddp_launch_output_error_file(output, 1);
    CHECK_CONTAINS(path, "/attempt_0/1/error.json");
    CHECK_OK(tddp_launch_output_take(output, 1, TDDP_LAUNCH_OUT, "a\nb", 3, false));
    CHECK_OK(tddp_launch_output_take(output, 0, TDDP_LAUNCH_OUT, "c\n", 2, true));
    CHECK_OK(tddp_launch_output_take(output, 1, TDDP_LAUNCH_OUT, NULL, 0, true));
    check_console(&made, TDDP_LAUNCH_OUT, "a\nc\nb\n");
    tddp_launch_output_free(output);
    CHECK_INT(access(path, F_OK), -1);
    free(path);
    close_desk(&made);
}

TEST(a_stream_that_goes_to_a_file_alone_is_the_workers_own)
{
    desk made;
    tddp_launch_output *output = NULL;
    char folder[] = "/tmp/output-test-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    tddp_launch_options options = {
        .role = "trainer",
        .log_dir = folder,
        .redirects = {.given = true,
                      .of = {TDDP_LAUNCH_STDOUT | TDDP_LAUNCH_STDERR,
                             TDDP_LAUNCH_STDOUT | TDDP_LAUNCH_STDERR}},
        .tee = {.given = true, .highest = 1, .of = {0, TDDP_LAUNCH_STDOUT}},
    };
    open_desk(&made);
    CHECK_OK(start_output(&made, &options, &output));
    CHECK_INT(tddp_launch_output_fd(output, 1, TDDP_LAUNCH_OUT), -1);
    int fd = tddp_launch_output_fd(output, 0, TDDP_LAUNCH_OUT);
    CHECK(fd >= 0);
    CHECK_INT(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND), O_WRONLY | O_APPEND);
    CHECK_INT(fcntl(fd, F_GETFD), FD_CLOEXEC);
    CHECK_OK(tddp_launch_output_take(output, 1, TDDP_LAUNCH_OUT, "four\n", 5, false));
    check_console(&made, TDDP_LAUNCH_OUT, "[trainer1]:four\n");
    char *path = tddp_launch_output_log_file(output, 1, TDDP_LAUNCH_OUT);
    check_file(path, "four\n");
    CHECK_INT(strncmp(path, tddp_launch_output_folder(output), strlen(folder) + 5), 0);
    free(path);
    CHECK_OK(tddp_launch_output_begin(output, &two_workers));
    path = tddp_launch_output_log_file(output, 0, TDDP_LAUNCH_OUT);
    CHECK_CONTAINS(path, "/attempt_0.1/0/stdout.log");
    check_file(path, "");
    free(path);
    tddp_launch_output_free(output);
    remove_folder(folder);
    close_desk(&made);
}

TEST(short_memory_is_survived)
{
    desk made;
    char folder[] = "/tmp/output-test-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    tddp_launch_options options = {
        .role = "trainer",
        .log_dir = folder,
        .tee = {.given = true, .of = {TDDP_LAUNCH_STDOUT, TDDP_LAUNCH_STDOUT}},
        .redirects = {.given = true, .of = {TDDP_LAUNCH_STDERR, TDDP_LAUNCH_STDERR}},
        .out_filters = {.count = 1, .texts = "a"},
    };
    bool whole = false;
    for (long nth = 1; nth < 200 && !whole; nth++) {
        tddp_launch_output *output;
        open_desk(&made);
        tddp_fail_allocation(nth);
        tddp_status status = start_output(&made, &options, &output);
        if (status == TDDP_OK) {
            status = tddp_launch_output_take(output, 0, TDDP_LAUNCH_OUT, "a\nb", 3, false);
            tddp_status next = tddp_launch_output_take(output, 0, TDDP_LAUNCH_OUT, NULL, 0, true);
            status = status == TDDP_OK ? next : status;
            tddp_launch_output_free(output);
        }
        /* Were it still to come, this would be the allocation that fails. */
        void *probe = tddp_alloc(1);
        whole = status == TDDP_OK && probe == NULL;
        free(probe);
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY || status == TDDP_SYSTEM);
        close_desk(&made);
    }
    CHECK(whole);
    remove_folder(folder);
}
