#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "launch/timers/timers.h"

enum { TEXT_BYTES = 512 };

static double wall_s(void)
{
    struct timespec now;
    CHECK_INT(clock_gettime(CLOCK_REALTIME, &now), 0);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static bool parses(const char *text, tddp_launch_timer *timer)
{
    return tddp_launch_timer_parse(text, strlen(text), timer);
}

TEST(requests_are_parsed)
{
    tddp_launch_timer timer;
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text,
                   "{\"version\": 1, \"pid\": 17, \"scope_id\": \"a \\\"b\\\"\", "
                   "\"expiration_time\": %.6f, \"signal\": 15}",
                   wall_s() + 100);
    CHECK_INT(parses(text, &timer), true);
    CHECK_INT(timer.pid, 17);
    CHECK_INT(timer.signal, SIGTERM);
    CHECK_TEXT(timer.scope, "a \"b\"");
    int64_t left_s = (timer.deadline - tddp_now_ns()) / TDDP_NS_PER_S;
    CHECK_INT(left_s > 90 && left_s <= 100, true);
    CHECK_INT(parses("{\"pid\": 17, \"scope_id\": \"a\", \"expiration_time\": -1, \"signal\": 0}",
                     &timer),
              true);
    CHECK_INT(timer.deadline, INT64_MIN);
    CHECK_INT(timer.signal, SIGKILL);
    CHECK_INT(parses("{\"pid\": 1, \"scope_id\": \"a\", \"expiration_time\": 1e300}", &timer),
              true);
    CHECK_INT(timer.deadline > tddp_now_ns(), true);
}

TEST(what_is_no_request_is_ignored)
{
    static const char *const texts[] = {
        "",
        "GET / HTTP/1.1",
        "{}",
        "{\"pid\": 17, \"scope_id\": \"a\"}",
        "{\"pid\": 17, \"expiration_time\": 5}",
        "{\"scope_id\": \"a\", \"expiration_time\": 5}",
        "{\"pid\": 17, \"scope_id\": \"\", \"expiration_time\": 5}",
        "{\"pid\": -17, \"scope_id\": \"a\", \"expiration_time\": 5}",
        "{\"pid\": 0, \"scope_id\": \"a\", \"expiration_time\": 5}",
        "{\"pid\": 17, \"scope_id\": \"a\", \"expiration_time\": \"nan\"}",
        "{\"pid\": 17, \"scope_id\": \"a\", \"expiration_time\": \"inf\"}",
        "{\"pid\": 17, \"scope_id\": \"a\", \"expiration_time\": 5",
    };
    tddp_launch_timer timer;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK_INT(parses(texts[i], &timer), false);
    }
}

/* The pipe in a folder of this test's own. */
static tddp_launch_timers *open_timers(char folder[64])
{
    tddp_launch_timers *timers;
    (void)snprintf(folder, 64, "/tmp/timers_test_XXXXXX");
    CHECK(mkdtemp(folder));
    CHECK_OK(tddp_launch_timers_open(folder, &timers));
    return timers;
}

/* With the pipe, and nothing else. */
static void remove_folder(const char *folder)
{
    char pipe[80];
    (void)snprintf(pipe, sizeof pipe, "%s/timers", folder);
    CHECK_INT(unlink(pipe), 0);
    CHECK_INT(rmdir(folder), 0);
}

static int open_client(const tddp_launch_timers *timers)
{
    int fd = open(timers->path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    CHECK_INT(fd >= 0, true);
    return fd;
}

static void put(int fd, int pid, const char *scope, double time)
{
    char text[TEXT_BYTES];
    int length = snprintf(text, sizeof text,
                          "{\"pid\": %d, \"scope_id\": \"%s\", \"expiration_time\": %.3f}\n", pid,
                          scope, time);
    CHECK_INT(write(fd, text, (size_t)length), length);
}

TEST(timers_run_stop_and_expire)
{
    char folder[64];
    tddp_launch_timers *timers = open_timers(folder);
    tddp_launch_timer expired;
    int fd = open_client(timers);
    CHECK_INT(tddp_launch_timers_deadline(timers), INT64_MAX);
    put(fd, 1, "later", wall_s() + 100);
    put(fd, 1, "over", 5);
    put(fd, 2, "over", 5);
    put(fd, 3, "stopped", 5);
    put(fd, 3, "stopped", -1);
    put(fd, 4, "again", 5);
    put(fd, 4, "again", wall_s() + 100);
    tddp_launch_timers_read(timers);
    CHECK_INT(tddp_launch_timers_expired(timers, &expired), true);
    CHECK_INT(tddp_launch_timers_expired(timers, &expired), true);
    CHECK_TEXT(expired.scope, "over");
    CHECK_INT(tddp_launch_timers_expired(timers, &expired), false);
    CHECK_INT(tddp_launch_timers_deadline(timers) < INT64_MAX, true);
    (void)close(fd);
    tddp_launch_timers_read(timers); /* there is no end of the pipe */
    tddp_launch_timers_close(timers);
    remove_folder(folder);
}

static void count_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level, (void)room, (void)text;
    ++*(int *)data;
}

/* A request in pieces, and a line that is too long, with more than the limit of timers after it. */
TEST(input_is_bounded)
{
    enum { MOST_TIMERS = 4096 };
    char folder[64];
    char scope[16];
    char junk[5000];
    tddp_launch_timers *timers = open_timers(folder);
    tddp_launch_timer expired;
    int lines = 0;
    int fd = open_client(timers);
    memset(junk, 'x', sizeof junk);
    CHECK_INT(write(fd, junk, sizeof junk), sizeof junk);
    tddp_launch_timers_read(timers);
    CHECK_INT(write(fd, "\n{\"pid\": 1, \"scope_id\":", 23), 23);
    tddp_launch_timers_read(timers);
    CHECK_INT(write(fd, "\"a\", \"expiration_time\": 5}\n", 27), 27);
    tddp_launch_timers_read(timers);
    CHECK_INT(tddp_launch_timers_expired(timers, &expired), true);
    CHECK_TEXT(expired.scope, "a");
    for (int i = 0; i < MOST_TIMERS; i++) {
        (void)snprintf(scope, sizeof scope, "%d", i);
        put(fd, 1, scope, 5);
        tddp_launch_timers_read(timers);
    }
    tddp_log_set_sink(count_line, &lines);
    for (int i = 0; i < 2; i++) {
        put(fd, 1, "one more", 5);
        tddp_launch_timers_read(timers);
        CHECK_INT(lines, 1);
    }
    tddp_log_set_sink(NULL, NULL);
    (void)close(fd);
    tddp_launch_timers_close(timers);
    remove_folder(folder);
}
