#include <stdio.h>

#include "desk.h"

/* --- routes ---------------------------------------------------------------------------------- */

static void mark(tddp_launch_route *route, const char *prefix)
{
    route->marked = true;
    route->prefix = tddp_copy_string(prefix);
}

TEST(lines_wait_for_their_end_and_have_prefixes)
{
    desk made;
    open_desk(&made);
    mark(&made.routes[0], "a:");
    mark(&made.routes[1], "b:");
    take(&made.routes[0], "one\ntw");
    take(&made.routes[1], "1\n\n2");
    take(&made.routes[0], "o\n");
    check_console(&made, TDDP_LAUNCH_OUT, "a:one\nb:1\nb:\na:two\n");
    CHECK_OK(tddp_launch_route_take(&made.routes[1], NULL, 0, true));
    CHECK_OK(tddp_launch_route_take(&made.routes[0], NULL, 0, true));
    check_console(&made, TDDP_LAUNCH_OUT, "b:2\n");
    close_desk(&made);
}

TEST(bytes_are_bytes)
{
    desk made;
    open_desk(&made);
    CHECK_OK(tddp_launch_route_take(&made.routes[0], "a\0\xff\r", 4, false));
    CHECK_INT(made.console.sinks[TDDP_LAUNCH_OUT].queue.size, 0);
    CHECK_OK(tddp_launch_route_take(&made.routes[0], "\nb", 2, false));
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_OUT].queue;
    CHECK_INT(queue->size, 5);
    CHECK_INT(memcmp(queue->data, "a\0\xff\r\n", 5), 0);
    close_desk(&made);
}

/* Any way to cut a text into two reads gives the same lines. */
TEST(cuts_do_not_matter)
{
    static const char text[] = "a\n\nbc\r\nd";
    for (size_t cut = 0; cut < sizeof text; cut++) {
        desk made;
        open_desk(&made);
        CHECK_OK(tddp_launch_route_take(&made.routes[0], text, cut, false));
        CHECK_OK(tddp_launch_route_take(&made.routes[0], text + cut, sizeof text - 1 - cut, false));
        check_console(&made, TDDP_LAUNCH_OUT, "a\n\nbc\r\n");
        CHECK_OK(tddp_launch_route_take(&made.routes[0], NULL, 0, true));
        check_console(&made, TDDP_LAUNCH_OUT, "d\n");
        close_desk(&made);
    }
}

TEST(a_line_of_megabytes_is_whole)
{
    desk made;
    static char piece[64 * 1024];
    open_desk(&made);
    memset(piece, 'x', sizeof piece);
    size_t pieces = TDDP_LAUNCH_LONGEST_LINE / sizeof piece - 1;
    const tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_OUT].queue;
    for (size_t i = 0; i < pieces; i++) {
        CHECK_OK(tddp_launch_route_take(&made.routes[0], piece, sizeof piece, false));
    }
    CHECK_INT(queue->size, 0);
    take(&made.routes[0], "\n");
    CHECK_INT(queue->size, pieces * sizeof piece + 1);
    CHECK_INT(made.routes[0].pending.capacity, 0);
    close_desk(&made);
}

/* Too long to wait for its end, it goes out in pieces: others' lines must not run into it. */
TEST(pieces_of_an_endless_line_are_never_continued_by_others)
{
    desk made;
    open_desk(&made);
    mark(&made.routes[0], "a:");
    size_t size = TDDP_LAUNCH_LONGEST_LINE;
    char *data = malloc(size);
    CHECK(data != NULL);
    memset(data, 'x', size);
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_OUT].queue;
    CHECK_OK(tddp_launch_route_take(&made.routes[0], data, size, false));
    CHECK_INT(queue->size, size + 2);
    CHECK_INT(made.routes[0].pending.capacity, 0);
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

/* A bar is one line, written over and over: the prefix comes again where the cursor returns. */
TEST(a_progress_bar_is_drawn_in_place_on_a_terminal)
{
    desk made;
    open_desk(&made);
    made.console.sinks[TDDP_LAUNCH_OUT].terminal = true;
    mark(&made.routes[0], "a:");
    mark(&made.routes[1], "b:");
    take(&made.routes[0], "wor");
    check_console(&made, TDDP_LAUNCH_OUT, "");
    take(&made.routes[0], "king\r1");
    check_console(&made, TDDP_LAUNCH_OUT, "a:working\ra:1");
    take(&made.routes[0], "0%\r20%\r");
    check_console(&made, TDDP_LAUNCH_OUT, "0%\ra:20%\r");
    take(&made.routes[1], "\r5%");
    check_console(&made, TDDP_LAUNCH_OUT, "");
    take(&made.routes[0], "30%\ndone\n");
    check_console(&made, TDDP_LAUNCH_OUT, "a:30%\na:done\n");
    take(&made.routes[1], "\r6%");
    check_console(&made, TDDP_LAUNCH_OUT, "b:\rb:5%\rb:6%");
    take(&made.routes[0], "line\r\n");
    check_console(&made, TDDP_LAUNCH_OUT, "\na:line\r\n");
    take(&made.routes[0], "cut\r");
    take(&made.routes[0], "\nnext\n");
    check_console(&made, TDDP_LAUNCH_OUT, "a:cut\r\na:next\n");
    take(&made.routes[1], "\r7%");
    CHECK_OK(tddp_launch_route_take(&made.routes[1], NULL, 0, true));
    check_console(&made, TDDP_LAUNCH_OUT, "b:\rb:7%\n");
    close_desk(&made);
}

/* No terminal: carriage returns are bytes like others. */
TEST(a_progress_bar_waits_for_its_end_elsewhere)
{
    desk made;
    open_desk(&made);
    take(&made.routes[0], "\r1%\r2%");
    check_console(&made, TDDP_LAUNCH_OUT, "");
    take(&made.routes[0], "\r3%\n");
    check_console(&made, TDDP_LAUNCH_OUT, "\r1%\r2%\r3%\n");
    close_desk(&made);
}

TEST(a_raw_stream_passes_as_it_comes)
{
    desk made;
    open_desk(&made);
    made.routes[0].raw = true;
    take(&made.routes[0], "promp");
    check_console(&made, TDDP_LAUNCH_OUT, "promp");
    tddp_launch_console_log(&made.console, "hm");
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: hm\n");
    CHECK_OK(tddp_launch_route_take(&made.routes[0], "t", 1, true));
    check_console(&made, TDDP_LAUNCH_OUT, "t");
    close_desk(&made);
}

TEST(files_get_bytes_at_once_and_filtered_logs_whole_lines)
{
    desk made;
    char folder[] = "/tmp/route-test-XXXXXX";
    static const tddp_launch_filters filters = {.count = 2, .texts = "loss\0acc"};
    tddp_launch_sink filtered;
    CHECK(mkdtemp(folder) != NULL);
    open_desk(&made);
    char *log = tddp_format("%s/log", folder);
    char *other = tddp_format("%s/filtered", folder);
    CHECK_OK(tddp_launch_sink_create(&made.routes[0].file, tddp_copy_string(log)));
    CHECK_OK(tddp_launch_sink_create(&filtered, tddp_copy_string(other)));
    for (int i = 0; i < 2; i++) {
        made.routes[i].shown = NULL;
        made.routes[i].filters = &filters;
        made.routes[i].filtered = &filtered;
        made.routes[i].prefix = tddp_copy_string(i == 0 ? "a:" : "b:");
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
    tddp_launch_sink_close(&filtered);
    CHECK_INT(unlink(log), 0);
    CHECK_INT(unlink(other), 0);
    CHECK_INT(rmdir(folder), 0);
    free(log);
    free(other);
}

/* --- log files ------------------------------------------------------------------------------- */

static void write_text(tddp_launch_sink *file, const char *text, desk *made)
{
    CHECK_OK(tddp_launch_sink_put(file, NULL, NULL, text, strlen(text)));
    tddp_launch_sink_flush(file, &made->console);
}

TEST(a_full_disk_is_said_once_and_the_log_goes_on_with_a_whole_line)
{
    desk made;
    char path[] = "/tmp/log-file-test-XXXXXX";
    tddp_launch_sink file;
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    open_desk(&made);
    CHECK_OK(tddp_launch_sink_create(&file, tddp_copy_string(path)));
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
    tddp_launch_sink_close(&file);
    close(fd);
    CHECK_INT(unlink(path), 0);
}
