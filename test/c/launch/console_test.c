#include <pthread.h>
#include <stdio.h>

#include "desk.h"

enum { FULL_BYTES = 1 << 20 };

/* --- torchrun's own lines -------------------------------------------------------------------- */

TEST(texts_of_others_are_said_without_control_characters)
{
    desk made;
    open_desk(&made);
    tddp_launch_console_say(&made.console, "rank %d: %s", 3,
                            "a\x1b[2J\x07 b\tc\r\xc2\x9b"
                            "d");
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: rank 3: a?[2J? b\tc??d\n");
    tddp_launch_console_put(&made.console, "  message   : ", "\x1b[5mone\r\ntwo\n\nthree\n");
    check_console(&made, TDDP_LAUNCH_ERR,
                  "  message   : ?[5mone\n              two\n              \n"
                  "              three\n");
    close_desk(&made);
}

/* What another node reports must not pass for a line of this torchrun. */
TEST(further_lines_are_indented)
{
    desk made;
    open_desk(&made);
    tddp_launch_console_say(&made.console, "%s", "lost node 1\ntorchrun: all is well");
    check_console(&made, TDDP_LAUNCH_ERR,
                  "torchrun: lost node 1\n          torchrun: all is well\n");
    take(&made.routes[0], "x\n");
    made.routes[1].shown = &made.console.sinks[TDDP_LAUNCH_ERR];
    made.routes[1].raw = true;
    take(&made.routes[1], "unfinished");
    tddp_launch_console_say(&made.console, "hm");
    check_console(&made, TDDP_LAUNCH_ERR, "unfinished\ntorchrun: hm\n");
    close_desk(&made);
}

/* --- what nobody reads ----------------------------------------------------------------------- */

static void write_much(desk *made, size_t size)
{
    char *data = malloc(size);
    CHECK(data != NULL);
    memset(data, 'x', size);
    data[size - 1] = '\n';
    CHECK_OK(tddp_launch_sink_put(made->console.streams[TDDP_LAUNCH_ERR], NULL, NULL, data, size));
    free(data);
}

/* Somebody reads all that waits. */
static void empty(desk *made)
{
    tddp_launch_sink *sink = &made->console.sinks[TDDP_LAUNCH_ERR];
    sink->queue.size = sink->sent = sink->owed = 0;
}

TEST(lines_that_nobody_reads_are_bounded_and_counted)
{
    desk made;
    open_desk(&made);
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_ERR].queue;
    write_much(&made, 2 * FULL_BYTES - 1);
    tddp_launch_console_say(&made.console, "own"); /* which comes all the same */
    CHECK_INT(queue->size, 2 * FULL_BYTES - 1 + sizeof "torchrun: own\n" - 1);
    size_t most = queue->size;
    tddp_launch_console_say(&made.console, "lost");
    tddp_launch_console_put(&made.console, "", "lost");
    CHECK_INT(queue->size, most);
    empty(&made);
    tddp_launch_console_say(&made.console, "here again");
    check_console(&made, TDDP_LAUNCH_ERR,
                  "torchrun: 2 lines were lost: nobody read standard error\n"
                  "torchrun: here again\n");
    close_desk(&made);
}

/* --- lines of other threads ------------------------------------------------------------------ */

/* A console whose streams go nowhere, and whose loop takes what is logged. */
static void open_console(desk *made, tddp_launch_loop *loop)
{
    open_desk(made);
    CHECK_OK(tddp_launch_console_open(&made->console, loop));
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_sink *sink = &made->console.sinks[i];
        tddp_launch_loop_remove(loop, &sink->source);
        if (sink->own) {
            tddp_close(sink->fd);
        }
        *sink = (tddp_launch_sink){.fd = INT_MAX, .at_line = true};
        made->console.streams[i] = sink;
    }
}

static void close_console(desk *made, tddp_launch_loop *loop)
{
    tddp_launch_loop_remove(loop, &made->console.logs);
    tddp_launch_loop_free(loop);
    tddp_bytes_free(&made->console.logged);
    close_desk(made);
}

TEST(the_end_waits_for_all_but_logged_lines)
{
    desk made;
    tddp_launch_loop loop = {0};
    open_console(&made, &loop);
    CHECK(!tddp_launch_console_pending(&made.console));
    tddp_log(TDDP_LOG_WARN, "store", "client \x1b]0;x");
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK(!tddp_launch_console_pending(&made.console));
    tddp_launch_console_say(&made.console, "a report");
    CHECK(tddp_launch_console_pending(&made.console));
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: client ?]0;x\ntorchrun: a report\n");
    tddp_launch_sink *sink = &made.console.sinks[TDDP_LAUNCH_ERR];
    sink->sent = sink->owed = 0;
    tddp_log(TDDP_LOG_WARN, "store", "second");
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK(!tddp_launch_console_pending(&made.console));
    empty(&made);
    close_console(&made, &loop);
}

enum { LINES = 200 };

static void *log_lines(void *data)
{
    char filler[1001];
    (void)data;
    memset(filler, 'y', sizeof filler - 1);
    filler[sizeof filler - 1] = '\0';
    for (int i = 0; i < LINES; i++) {
        tddp_log(TDDP_LOG_WARN, "store", "%d %s", i, filler);
    }
    return NULL;
}

static void log_on_a_thread(void)
{
    pthread_t thread;
    CHECK_OK(tddp_thread_start(&thread, "logs", log_lines, NULL));
    CHECK_INT(pthread_join(thread, NULL), 0);
}

/* Checks that lines came in order from the first on; returns how many, and how many were lost. */
static int count_lines(const tddp_bytes *queue, unsigned long long *lost)
{
    int seen = 0;
    for (char *at = queue->data, *end; (end = strchr(at, '\n')); at = end + 1) {
        char expected[32];
        unsigned long long count;
        char after;
        (void)snprintf(expected, sizeof expected, "torchrun: %d yyy", seen);
        if (sscanf(at, "torchrun: %llu lines were los%c", &count, &after) == 2) {
            *lost = count;
        } else {
            CHECK_INT(strncmp(at, expected, strlen(expected)), 0);
            seen++;
        }
    }
    return seen;
}

/* While nobody takes them there is an end to them, and no thread waits. */
TEST(lines_of_other_threads_reach_the_console_or_are_counted)
{
    desk made;
    tddp_launch_loop loop = {0};
    unsigned long long lost = 0;
    open_console(&made, &loop);
    log_on_a_thread();
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_ERR].queue;
    CHECK_INT(queue->size, 0);
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK_OK(tddp_bytes_append(queue, "", 1));
    int seen = count_lines(queue, &lost);
    CHECK(seen > 1 && lost > 0);
    CHECK_INT(seen + (int)lost, LINES);
    empty(&made);
    tddp_log(TDDP_LOG_WARN, "store", "the last");
    CHECK_OK(tddp_launch_loop_turn(&loop));
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: the last\n");
    close_console(&made, &loop);
    tddp_log(TDDP_LOG_WARN, "store", "nobody is there");
    open_console(&made, &loop); /* the next console finds it, so that tests don't share lines */
    CHECK_OK(tddp_launch_loop_turn(&loop));
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: nobody is there\n");
    close_console(&made, &loop);
}

/* A reader that doesn't read costs lines of the pipe's, not memory. */
TEST(logged_lines_are_not_taken_while_too_much_waits)
{
    desk made;
    tddp_launch_loop loop = {0};
    open_console(&made, &loop);
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_ERR].queue;
    write_much(&made, FULL_BYTES);
    tddp_log(TDDP_LOG_WARN, "store", "waits");
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK_INT(queue->size, FULL_BYTES);
    empty(&made);
    CHECK_OK(tddp_launch_loop_turn(&loop));
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: waits\n");
    close_console(&made, &loop);
}

/* --- writing --------------------------------------------------------------------------------- */

/* A console whose standard error is a pipe; returns the end that is read. */
static int open_with_pipe(desk *made, tddp_launch_loop *loop)
{
    int ends[2];
    int before = dup(STDERR_FILENO);
    *made = (desk){0};
    CHECK(before >= 0 && pipe(ends) == 0);
    CHECK(dup2(ends[1], STDERR_FILENO) >= 0);
    CHECK_OK(tddp_launch_console_open(&made->console, loop));
    CHECK(dup2(before, STDERR_FILENO) >= 0);
    CHECK(made->console.sinks[TDDP_LAUNCH_ERR].own);
    close(before);
    close(ends[1]);
    return ends[0];
}

TEST(what_is_queued_is_written_once_there_is_room)
{
    desk made;
    char text[64] = "";
    tddp_launch_loop loop = {0};
    int reader = open_with_pipe(&made, &loop);
    tddp_launch_sink *sink = &made.console.sinks[TDDP_LAUNCH_ERR];
    CHECK_INT(sink->source.events, 0); /* nothing waits, so there is nothing to wake for */
    tddp_launch_console_say(&made.console, "hello");
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK_INT(read(reader, text, sizeof text - 1), 16);
    CHECK_TEXT(text, "torchrun: hello\n");
    CHECK_INT(sink->source.events, 0);
    tddp_log(TDDP_LOG_WARN, "store", "the last");
    tddp_launch_console_close(&made.console);
    memset(text, 0, sizeof text);
    CHECK_INT(read(reader, text, sizeof text - 1), 19);
    CHECK_TEXT(text, "torchrun: the last\n");
    tddp_launch_loop_free(&loop);
    close(reader);
}

TEST(a_descriptor_that_may_block_takes_small_pieces)
{
    desk made;
    char text[1024];
    int ends[2];
    open_desk(&made);
    CHECK_INT(pipe(ends), 0);
    tddp_launch_sink *sink = &made.console.sinks[TDDP_LAUNCH_ERR];
    sink->fd = ends[1];
    sink->careful = true;
    write_much(&made, FULL_BYTES);
    tddp_launch_sink_flush(sink, &made.console); /* which would block */
    size_t sent = FULL_BYTES - (sink->queue.size - sink->sent);
    CHECK(sent > 0 && sent < FULL_BYTES);
    for (size_t got = 0; got < FULL_BYTES;) {
        ssize_t piece = read(ends[0], text, sizeof text);
        CHECK(piece > 0);
        got += (size_t)piece;
        tddp_launch_sink_flush(sink, &made.console);
    }
    CHECK(!tddp_launch_console_pending(&made.console));
    close_desk(&made);
    close(ends[0]);
    close(ends[1]);
}
