#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "launch/output/layout.h"
#include "launch/output/output.h"
#include "launch/output/prefix.h"
#include "launch/output/route.h"
#include "launch/output/tail.h"

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

/* --- last lines ------------------------------------------------------------------------------ */

static void check_tail(tddp_launch_tail *tail, const char *data, const char *expected)
{
    char text[TDDP_LAUNCH_TAIL_BYTES];
    tddp_launch_tail_take(tail, data, strlen(data));
    CHECK_TEXT(tddp_launch_tail_show(tail, text), expected);
}

TEST(the_last_line_is_known_at_any_time)
{
    tddp_launch_tail tail = {0};
    check_tail(&tail, "", "");
    check_tail(&tail, "on", "on");
    check_tail(&tail, "e\n", "one");
    check_tail(&tail, "\n\n", "one");
    check_tail(&tail, "two\nthree", "three");
    check_tail(&tail, "\r\n", "three");
    check_tail(&tail, " 10%\r 20%\r", " 20%");
    check_tail(&tail, " 30%", " 30%");
}

TEST(a_last_line_is_bounded_and_harmless)
{
    static char data[100000];
    char text[TDDP_LAUNCH_TAIL_BYTES];
    tddp_launch_tail tail = {0};
    check_tail(&tail, "\033[1;31mred\033[0m\ttab\a", "red tab ");
    check_tail(&tail, "\n\033", "");
    check_tail(&tail, "\n\033[", "");
    memset(data, 'x', sizeof data);
    tddp_launch_tail_take(&tail, data, sizeof data);
    tddp_launch_tail_take(&tail, data, sizeof data);
    CHECK_INT(strlen(tddp_launch_tail_show(&tail, text)), TDDP_LAUNCH_TAIL_BYTES - 1);
    tddp_launch_tail_take(&tail, "\nnext\n", 6);
    CHECK_TEXT(tddp_launch_tail_show(&tail, text), "next");
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

/* --- routes ---------------------------------------------------------------------------------- */

/* A console of which nothing is written: what would be is in its queues. */
typedef struct desk {
    tddp_launch_console console;
    tddp_launch_route routes[2];
} desk;

static void open_desk(desk *made)
{
    *made = (desk){0};
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        made->console.sinks[i] = (tddp_launch_sink){.fd = -1, .at_line = true};
        made->console.streams[i] = &made->console.sinks[i];
        made->routes[i] = (tddp_launch_route){.console = &made->console,
                                              .stream = TDDP_LAUNCH_OUT,
                                              .shown = true,
                                              .file = {.fd = -1}};
    }
}

static void take(tddp_launch_route *route, const char *data)
{
    CHECK_OK(tddp_launch_route_take(route, data, strlen(data), false));
}

static void check_console(desk *made, int stream, const char *expected)
{
    tddp_bytes *queue = &made->console.sinks[stream].queue;
    CHECK_OK(tddp_bytes_append(queue, "", 1));
    CHECK_TEXT(queue->data, expected);
    tddp_bytes_free(queue);
}

static void close_desk(desk *made)
{
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_route_free(&made->routes[i]);
        tddp_bytes_free(&made->console.sinks[i].queue);
    }
}

TEST(lines_wait_for_their_end_and_have_prefixes)
{
    desk made;
    open_desk(&made);
    made.routes[0].prefix = "a:";
    made.routes[1].prefix = "b:";
    take(&made.routes[0], "one\ntw");
    take(&made.routes[1], "1\n\n2");
    take(&made.routes[0], "o\n");
    check_console(&made, TDDP_LAUNCH_OUT, "a:one\nb:1\nb:\na:two\n");
    CHECK_OK(tddp_launch_route_take(&made.routes[1], NULL, 0, true));
    CHECK_OK(tddp_launch_route_take(&made.routes[0], NULL, 0, true));
    check_console(&made, TDDP_LAUNCH_OUT, "b:2\n");
    close_desk(&made);
}

/* Too long to wait for its end, it goes out in pieces: others' lines must not run into it. */
TEST(pieces_of_an_endless_line_are_never_continued_by_others)
{
    desk made;
    open_desk(&made);
    made.routes[0].prefix = "a:";
    size_t size = TDDP_LAUNCH_LONGEST_LINE;
    char *data = malloc(size);
    CHECK(data != NULL);
    memset(data, 'x', size);
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_OUT].queue;
    CHECK_OK(tddp_launch_route_take(&made.routes[0], data, size, false));
    CHECK_INT(queue->size, size + 2);
    CHECK_INT(made.routes[0].lines.pending.capacity, 0);
    queue->size = 0;
    CHECK_OK(tddp_launch_route_take(&made.routes[0], data, size, false));
    CHECK_INT(queue->size, size);
    queue->size = 0;
    take(&made.routes[1], "other\n");
    take(&made.routes[0], "end\n");
    check_console(&made, TDDP_LAUNCH_OUT, "\nother\na:end\n");
    free(data);
    close_desk(&made);
}

TEST(a_raw_stream_passes_as_it_comes)
{
    desk made;
    open_desk(&made);
    made.routes[0].raw = true;
    take(&made.routes[0], "promp");
    check_console(&made, TDDP_LAUNCH_OUT, "promp");
    tddp_launch_console_say(&made.console, "hm");
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: hm\n");
    CHECK_OK(tddp_launch_route_take(&made.routes[0], "t", 1, true));
    check_console(&made, TDDP_LAUNCH_OUT, "t");
    close_desk(&made);
}

static void check_file(const char *path, const char *expected)
{
    char text[4096] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    ssize_t got = read(fd, text, sizeof text - 1);
    CHECK(got >= 0);
    text[got] = '\0';
    CHECK_TEXT(text, expected);
    close(fd);
}

TEST(files_get_bytes_at_once_and_filtered_logs_whole_lines)
{
    desk made;
    char folder[] = "/tmp/route-test-XXXXXX";
    static const tddp_launch_filters filters = {.count = 2, .texts = "loss\0acc"};
    tddp_launch_log_file filtered;
    CHECK(mkdtemp(folder) != NULL);
    open_desk(&made);
    char *log = tddp_format("%s/log", folder);
    char *other = tddp_format("%s/filtered", folder);
    CHECK_OK(tddp_launch_log_file_open(&made.routes[0].file, tddp_copy_string(log)));
    CHECK_OK(tddp_launch_log_file_open(&filtered, tddp_copy_string(other)));
    for (int i = 0; i < 2; i++) {
        made.routes[i].shown = false;
        made.routes[i].filters = &filters;
        made.routes[i].filtered = &filtered;
        made.routes[i].mark = i == 0 ? "a:" : "b:";
    }
    take(&made.routes[0], "step 1\nlo");
    check_file(log, "step 1\nlo");
    check_file(other, "");
    take(&made.routes[1], "acc 5\nrest with acc");
    take(&made.routes[0], "ss 2\n");
    CHECK_OK(tddp_launch_route_take(&made.routes[1], NULL, 0, true));
    check_file(log, "step 1\nloss 2\n");
    check_file(other, "b:acc 5\na:loss 2\nb:rest with acc\n");
    check_console(&made, TDDP_LAUNCH_OUT, "");
    close_desk(&made);
    tddp_launch_log_file_close(&filtered);
    CHECK_INT(unlink(log), 0);
    CHECK_INT(unlink(other), 0);
    CHECK_INT(rmdir(folder), 0);
    free(log);
    free(other);
}

/* --- a run's output --------------------------------------------------------------------------- */

static const tddp_launch_world two_workers = {
    .nodes = 2, .node_rank = 1, .base_rank = 2, .size = 4, .local_size = 2};

static tddp_status start_output(desk *made, const tddp_launch_options *options,
                                tddp_launch_output **out)
{
    tddp_launch_output *output;
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
    tddp_launch_output *output;
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
    tddp_launch_output *output;
    char folder[] = "/tmp/output-test-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    tddp_launch_options options = {
        .role = "trainer",
        .log_dir = folder,
        .monitor = true,
        .redirects = {.all = TDDP_LAUNCH_STDOUT | TDDP_LAUNCH_STDERR},
        .tee = {.count = 1, .listed = {{.local_rank = 1, .streams = TDDP_LAUNCH_STDOUT}}},
    };
    open_desk(&made);
    CHECK_OK(start_output(&made, &options, &output));
    CHECK_INT(tddp_launch_output_fd(output, 1, TDDP_LAUNCH_OUT), -1);
    int fd = tddp_launch_output_fd(output, 0, TDDP_LAUNCH_OUT);
    CHECK(fd >= 0);
    CHECK_INT(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND), O_WRONLY | O_APPEND);
    CHECK_INT(fcntl(fd, F_GETFD), FD_CLOEXEC);
    CHECK_TEXT(tddp_launch_output_last_line(output, 0), "");
    CHECK_INT(write(fd, "one\ntwo", 7), 7);
    CHECK_TEXT(tddp_launch_output_last_line(output, 0), "two");
    CHECK_INT(write(fd, "!\n", 2), 2);
    CHECK_TEXT(tddp_launch_output_last_line(output, 0), "two!");
    static char filler[10000];
    memset(filler, '.', sizeof filler);
    filler[0] = filler[sizeof filler - 1] = '\n';
    CHECK_INT(write(fd, filler, sizeof filler), sizeof filler);
    CHECK_INT(write(tddp_launch_output_fd(output, 0, TDDP_LAUNCH_ERR), "three\n", 6), 6);
    CHECK_TEXT(tddp_launch_output_last_line(output, 0), "three");
    CHECK_OK(tddp_launch_output_take(output, 1, TDDP_LAUNCH_OUT, "four\n", 5, false));
    CHECK_TEXT(tddp_launch_output_last_line(output, 1), "four");
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
        .tee = {.all = TDDP_LAUNCH_STDOUT},
        .redirects = {.all = TDDP_LAUNCH_STDERR},
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

/* --- log files ------------------------------------------------------------------------------- */

static void write_text(tddp_launch_log_file *file, const char *text, desk *made)
{
    tddp_launch_log_file_write(file, text, strlen(text), &made->console);
}

TEST(a_full_disk_is_said_once_and_the_log_goes_on_with_a_whole_line)
{
    desk made;
    char path[] = "/tmp/log-file-test-XXXXXX";
    tddp_launch_log_file file;
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    open_desk(&made);
    CHECK_OK(tddp_launch_log_file_open(&file, tddp_copy_string(path)));
    write_text(&file, "one\ntw", &made);
    int good = file.fd;
    file.fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
    write_text(&file, "o\nthr", &made);
    write_text(&file, "ee\n", &made);
    write_text(&file, "fo", &made);
    close(file.fd);
    file.fd = good;
    write_text(&file, "ur", &made);
    write_text(&file, "\n", &made);
    write_text(&file, "five\n", &made);
    check_file(path, "one\ntw\nfive\n");
    char *said = tddp_format("torchrun: %s: No space left on device; what cannot be written there "
                             "is lost\n",
                             path);
    check_console(&made, TDDP_LAUNCH_ERR, said);
    free(said);
    tddp_launch_log_file_close(&file);
    close(fd);
    CHECK_INT(unlink(path), 0);
}

/* --- what stands below the output ------------------------------------------------------------ */

static int hidden;
static int shown;

static void hide(void *data)
{
    hidden++;
    CHECK_TEXT(data, "monitor");
}

static void show(void *data)
{
    shown++;
    CHECK_TEXT(data, "monitor");
}

TEST(what_stands_below_the_output_makes_way_and_comes_back)
{
    desk made;
    char name[] = "monitor";
    int ends[2];
    open_desk(&made);
    CHECK_INT(pipe(ends), 0);
    made.console.hook = (tddp_launch_console_hook){hide, show, name};
    made.console.streams[TDDP_LAUNCH_OUT] = &made.console.sinks[TDDP_LAUNCH_ERR];
    tddp_launch_sink *sink = &made.console.sinks[TDDP_LAUNCH_ERR];
    sink->terminal = true;
    sink->fd = ends[1];
    CHECK_INT(tddp_launch_console_terminal(&made.console), ends[1]);
    tddp_launch_console_flush(&made.console);
    CHECK_INT(hidden, 0);
    CHECK_OK(tddp_launch_console_write(&made.console, TDDP_LAUNCH_OUT, "prompt", 6));
    tddp_launch_console_flush(&made.console);
    CHECK_INT(hidden, 1);
    CHECK_INT(shown, 0);
    CHECK_OK(tddp_launch_console_write(&made.console, TDDP_LAUNCH_ERR, "\n", 1));
    tddp_launch_console_flush(&made.console);
    CHECK_INT(hidden, 1);
    CHECK_INT(shown, 1);
    tddp_launch_console_flush(&made.console);
    CHECK_INT(shown, 1);
    close_desk(&made);
    close(ends[0]);
    close(ends[1]);
}
