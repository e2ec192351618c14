#include <pthread.h>
#include <stdio.h>

#include "desk.h"
#include "launch/output/log_queue.h"

enum { FULL_BYTES = 1 << 20 };

/* --- what torchrun says ---------------------------------------------------------------------- */

TEST(texts_of_others_are_said_without_control_characters)
{
    desk made;
    open_desk(&made);
    tddp_launch_console_say(&made.console, "rank %d: %s", 3,
                            "a\x1b[2J\x07 b\tc\r\xc2\x9b"
                            "d");
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: rank 3: a?[2J? b\tc??d\n");
    char logged[] = "client \x1b]0;x";
    tddp_launch_console_log(&made.console, logged);
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: client ?]0;x\n");
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
    made.routes[1].stream = TDDP_LAUNCH_ERR;
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
    CHECK_OK(tddp_launch_console_write(&made->console, TDDP_LAUNCH_ERR, data, size));
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
    char line[] = "a line";
    open_desk(&made);
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_ERR].queue;
    write_much(&made, FULL_BYTES);
    tddp_launch_console_log(&made.console, line);
    tddp_launch_console_log(&made.console, line);
    CHECK_INT(queue->size, FULL_BYTES);
    tddp_launch_console_say(&made.console, "own");
    static const char own[] = "torchrun: 2 lines were lost: nobody read standard error\n"
                              "torchrun: own\n"; /* which come all the same */
    CHECK_INT(queue->size, FULL_BYTES + sizeof own - 1);
    CHECK_INT(memcmp(queue->data + FULL_BYTES, own, sizeof own - 1), 0);
    write_much(&made, FULL_BYTES);
    size_t most = queue->size;
    tddp_launch_console_say(&made.console, "lost");
    tddp_launch_console_put(&made.console, "", "lost");
    tddp_launch_console_lose(&made.console, 10);
    CHECK_INT(queue->size, most);
    empty(&made);
    tddp_launch_console_say(&made.console, "here again");
    check_console(&made, TDDP_LAUNCH_ERR,
                  "torchrun: 12 lines were lost: nobody read standard error\n"
                  "torchrun: here again\n");
    close_desk(&made);
}

TEST(the_end_waits_for_all_but_logged_lines)
{
    desk made;
    char first[] = "first";
    char second[] = "second";
    open_desk(&made);
    CHECK(!tddp_launch_console_pending(&made.console));
    tddp_launch_console_log(&made.console, first);
    CHECK(!tddp_launch_console_pending(&made.console));
    tddp_launch_console_say(&made.console, "a report");
    CHECK(tddp_launch_console_pending(&made.console));
    tddp_launch_sink *sink = &made.console.sinks[TDDP_LAUNCH_ERR];
    sink->sent = sink->queue.size;
    tddp_launch_console_log(&made.console, second);
    CHECK(!tddp_launch_console_pending(&made.console));
    empty(&made);
    close_desk(&made);
}

/* --- what other threads log ------------------------------------------------------------------- */

enum { LINES = 100 };

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

/* While nobody takes them there is an end to them, and no thread waits. */
TEST(lines_of_other_threads_reach_the_console_or_are_counted)
{
    desk made;
    tddp_launch_loop loop = {0};
    open_desk(&made);
    CHECK_OK(tddp_launch_log_queue_open(&loop, &made.console));
    log_on_a_thread();
    tddp_bytes *queue = &made.console.sinks[TDDP_LAUNCH_ERR].queue;
    CHECK_INT(queue->size, 0);
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK_OK(tddp_bytes_append(queue, "", 1));
    int seen = 0;
    unsigned long long lost = 0;
    for (char *at = queue->data, *end; (end = strchr(at, '\n')); at = end + 1) {
        char expected[32];
        (void)snprintf(expected, sizeof expected, "torchrun: %d yyy", seen);
        unsigned long long count;
        char after;
        if (sscanf(at, "torchrun: %llu lines were los%c", &count, &after) == 2) {
            lost = count;
        } else {
            CHECK_INT(strncmp(at, expected, strlen(expected)), 0);
            seen++;
        }
    }
    CHECK(seen > 1);
    CHECK_INT(seen + (int)lost, LINES);
    empty(&made);
    tddp_log(TDDP_LOG_WARN, "store", "last words");
    tddp_launch_log_queue_close();
    check_console(&made, TDDP_LAUNCH_ERR, "torchrun: last words\n");
    tddp_log(TDDP_LOG_WARN, "store", "nobody is there");
    check_console(&made, TDDP_LAUNCH_ERR, "");
    tddp_launch_loop_free(&loop);
    close_desk(&made);
}

/* --- the loop writes ------------------------------------------------------------------------- */

TEST(what_is_queued_is_written_once_there_is_room)
{
    desk made;
    int ends[2];
    char text[64] = "";
    tddp_launch_loop loop = {0};
    open_desk(&made);
    CHECK_INT(pipe(ends), 0);
    tddp_launch_sink *sink = &made.console.sinks[TDDP_LAUNCH_ERR];
    sink->fd = ends[1];
    sink->kind = TDDP_LAUNCH_SINK_REOPENED;
    CHECK_OK(tddp_launch_console_watch(&made.console, &loop));
    CHECK_INT(sink->source.events, 0); /* nothing waits, so there is nothing to wake for */
    tddp_launch_console_say(&made.console, "hello");
    CHECK_OK(tddp_launch_loop_turn(&loop));
    CHECK_INT(read(ends[0], text, sizeof text - 1), 16);
    CHECK_TEXT(text, "torchrun: hello\n");
    CHECK_INT(sink->source.events, 0);
    tddp_launch_loop_free(&loop);
    close_desk(&made);
    close(ends[0]);
    close(ends[1]);
}
