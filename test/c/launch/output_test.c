#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "desk.h"
#include "launch/output/output.h"

/* --- prefixes -------------------------------------------------------------------------------- */

static void check_prefix(const char *template, const char *expected)
{
    static const tddp_launch_macro macros[] = {{"role_name", "trainer"},
                                               {"hostname", "node7"},
                                               {"rank", "11"},
                                               {"local_rank", "3"},
                                               {NULL, NULL}};
    char *made = tddp_launch_fill(template, macros);
    CHECK_TEXT(made, expected);
    free(made);
}

TEST(a_template_is_filled_in_as_python_does)
{
    check_prefix("[${role_name}${local_rank}]:", "[trainer3]:");
    check_prefix("", "");
    check_prefix("${hostname}/${rank}> ", "node7/11> ");
    check_prefix("$rank.$local_rank|", "11.3|");
    check_prefix("$$rank $$$rank", "$rank $11");
    check_prefix("${rank", "${rank");
    check_prefix("${ranks} $other $1 $", "${ranks} $other $1 $");
    check_prefix("$role_name_x ${role_name}_x", "$role_name_x trainer_x");
}

/* --- folders --------------------------------------------------------------------------------- */

static bool exists(const char *folder, const char *name)
{
    char path[4096];
    struct stat found;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &found) == 0;
}

static void put_file(const char *folder, const char *name)
{
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    fclose(file);
}

TEST(a_private_folder_goes_with_all_in_it)
{
    struct stat found;
    char *folder = tddp_launch_folder_name(NULL, "torchrun");
    CHECK_INT(stat(folder, &found), -1);
    CHECK_INT(mkdir(folder, 0700), 0);
    char *attempt = tddp_launch_folder_begin(folder, 0, 4);
    put_file(attempt, "3/error.json");
    put_file(folder, "other");
    tddp_launch_folder_remove(folder);
    CHECK_INT(stat(folder, &found), -1);
    free(attempt);
    free(folder);
    tddp_launch_folder_remove(NULL);
}

TEST(each_start_has_a_folder_of_its_own)
{
    char parent[] = "/tmp/layout-test-XXXXXX";
    char deeper[64];
    CHECK(mkdtemp(parent) != NULL);
    (void)snprintf(deeper, sizeof deeper, "%s/a/b", parent);
    char *run = tddp_launch_folder_name(deeper, "job/1");
    CHECK_INT(mkdir(run, 0700), 0);
    CHECK_INT(strncmp(run, deeper, strlen(deeper)), 0);
    CHECK_INT(strncmp(run + strlen(deeper), "/job_1_", 7), 0);
    CHECK_INT(strlen(run), strlen(deeper) + 7 + 16);
    char *attempts[] = {tddp_launch_folder_begin(run, 0, 2), tddp_launch_folder_begin(run, 1, 1),
                        tddp_launch_folder_begin(run, 1, 3), tddp_launch_folder_begin(run, 1, 1)};
    CHECK(exists(run, "attempt_0/1") && !exists(run, "attempt_0/2"));
    CHECK(exists(run, "attempt_1/0") && !exists(run, "attempt_1/1"));
    CHECK(exists(run, "attempt_1.1/2"));
    CHECK_CONTAINS(attempts[3], "/attempt_1.2");
    for (size_t i = 0; i < sizeof attempts / sizeof *attempts; i++) {
        free(attempts[i]);
    }
    tddp_launch_folder_remove(run);
    free(run);
    CHECK_INT(rmdir(deeper), 0);
    deeper[strlen(parent) + 2] = '\0';
    CHECK_INT(rmdir(deeper), 0);
    CHECK_INT(rmdir(parent), 0);
}

TEST(a_folder_that_cannot_be_made)
{
    CHECK(tddp_launch_folder_name("/dev/null/logs", "x") == NULL);
    CHECK_CONTAINS(tddp_error_message(), "cannot make a folder in /dev/null/logs: Not a directory");
    CHECK(tddp_launch_folder_name("/proc/logs", "x") == NULL);
    CHECK_CONTAINS(tddp_error_message(), "No such file");
    CHECK(tddp_launch_folder_begin("/dev/null", 0, 1) == NULL);
    CHECK_CONTAINS(tddp_error_message(), "/dev/null/attempt_0: Not a directory");
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

/* What a worker writes to its pipe; the loop is not needed for what is drained. */
static tddp_status write_output(tddp_launch_output *output, int local_rank, const char *text,
                                bool at_end)
{
    static tddp_launch_loop loop;
    static int writers[2] = {-1, -1};
    tddp_status status = TDDP_OK;
    if (writers[local_rank] < 0) {
        int ends[2];
        CHECK_INT(pipe(ends), 0);
        writers[local_rank] = ends[1];
        int fds[] = {ends[0], -1};
        status = tddp_launch_output_watch(output, &loop, local_rank, fds);
    }
    CHECK_INT(write(writers[local_rank], text, strlen(text)), (long long)strlen(text));
    if (status == TDDP_OK && text[0] != '\0') {
        status = tddp_launch_loop_turn(&loop);
    }
    if (at_end) {
        close(writers[local_rank]);
        writers[local_rank] = -1;
        status = status == TDDP_OK ? tddp_launch_loop_turn(&loop) : status;
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
    char *private = tddp_launch_folder_name(NULL, "torchrun");
    CHECK_INT(mkdir(private, 0700), 0);
    tddp_launch_options options = {.role = "default", .private_folder = private};
    open_desk(&made);
    CHECK_OK(start_output(&made, &options, &output));
    for (int i = 0; i < 4; i++) {
        CHECK_INT(tddp_launch_output_fd(output, i / 2, i % 2), -1);
        CHECK(tddp_launch_output_log_file(output, i / 2, i % 2) == NULL);
    }
    CHECK(tddp_launch_output_folder(output) == NULL);
    char *path = tddp_launch_output_error_file(output, 1);
    CHECK_INT(strncmp(path, private, strlen(private)), 0);
    CHECK_TEXT(path + strlen(private), "/attempt_0/1/error.json");
    CHECK_OK(write_output(output, 1, "a\nb", false));
    CHECK_OK(write_output(output, 0, "c\n", true));
    CHECK_OK(write_output(output, 1, "", true));
    check_console(&made, TDDP_LAUNCH_OUT, "a\nc\nb\n");
    tddp_launch_output_free(output);
    free(path);
    tddp_launch_folder_remove(private);
    free(private);
    close_desk(&made);
}

TEST(without_a_folder_workers_have_no_error_file)
{
    desk made;
    tddp_launch_output *output = NULL;
    tddp_launch_options options = {.role = "default"};
    open_desk(&made);
    CHECK_OK(start_output(&made, &options, &output));
    CHECK(tddp_launch_output_error_file(output, 0) == NULL);
    check_console(&made, TDDP_LAUNCH_ERR,
                  "torchrun: no temporary folder: workers have no error file (set TMPDIR)\n");
    tddp_launch_output_free(output);
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
                      .of = {(1 << TDDP_LAUNCH_OUT) | (1 << TDDP_LAUNCH_ERR),
                             (1 << TDDP_LAUNCH_OUT) | (1 << TDDP_LAUNCH_ERR)}},
        .tee = {.given = true, .highest = 1, .of = {0, (1 << TDDP_LAUNCH_OUT)}},
    };
    open_desk(&made);
    CHECK_OK(start_output(&made, &options, &output));
    CHECK_INT(tddp_launch_output_fd(output, 1, TDDP_LAUNCH_OUT), -1);
    int fd = tddp_launch_output_fd(output, 0, TDDP_LAUNCH_OUT);
    CHECK(fd >= 0);
    CHECK_INT(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND), O_WRONLY | O_APPEND);
    CHECK_INT(fcntl(fd, F_GETFD), FD_CLOEXEC);
    CHECK_OK(write_output(output, 1, "four\n", true));
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
        .tee = {.given = true, .of = {(1 << TDDP_LAUNCH_OUT), (1 << TDDP_LAUNCH_OUT)}},
        .redirects = {.given = true, .of = {(1 << TDDP_LAUNCH_ERR), (1 << TDDP_LAUNCH_ERR)}},
        .out_filters = {.count = 1, .texts = "a"},
    };
    bool whole = false;
    for (long nth = 1; nth < 200 && !whole; nth++) {
        tddp_launch_output *output;
        tddp_launch_loop loop = {0};
        open_desk(&made);
        tddp_fail_allocation(nth);
        tddp_status status = start_output(&made, &options, &output);
        if (status == TDDP_OK) {
            int ends[2];
            CHECK_INT(pipe(ends), 0);
            CHECK_INT(write(ends[1], "a\nb", 3), 3);
            close(ends[1]);
            int fds[] = {ends[0], -1};
            status = tddp_launch_output_watch(output, &loop, 0, fds);
            tddp_launch_output_drain(output);
            tddp_launch_output_free(output);
            tddp_launch_loop_free(&loop);
        }
        /* Were it still to come, this would be the allocation that fails. */
        void *probe = tddp_alloc(1);
        whole = status == TDDP_OK && probe == NULL;
        free(probe);
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY || status == TDDP_SYSTEM);
        close_desk(&made);
        remove_folder(folder); /* with the run's, whose name is the process's */
    }
    CHECK(whole);
}
