#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp/trace.h>

#include "base/base.h"
#include "events.h"

enum { PATH_BYTES = 300, US = 1000 };

static char folder[64];

static const char *fresh_folder(void)
{
    strcpy(folder, "/tmp/tddp_trace_XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    return folder;
}

static void path_of(const char *dir, int rank, char *path)
{
    snprintf(path, PATH_BYTES, "%s/trace_rank_%d.json", dir, rank);
}

/* The whole file; to be freed. */
static char *contents(const char *dir, int rank)
{
    char path[PATH_BYTES];
    struct stat entry;
    path_of(dir, rank, path);
    FILE *file = fopen(path, "r");
    CHECK(file && fstat(fileno(file), &entry) == 0);
    char *text = calloc(1, (size_t)entry.st_size + 1);
    CHECK(fread(text, 1, (size_t)entry.st_size, file) == (size_t)entry.st_size);
    fclose(file);
    return text;
}

static void clear(const char *dir)
{
    char command[PATH_BYTES];
    snprintf(command, sizeof command, "rm -r '%s'", dir);
    CHECK_INT(system(command), 0);
}

/* That it is a JSON array of objects, one a line, in the simple form in which they are written. */
static void check_whole(const char *text)
{
    size_t length = strlen(text);
    CHECK(strncmp(text, "[\n{", 3) == 0);
    CHECK(length > 5 && strcmp(text + length - 4, "}\n]\n") == 0);
    int depth = 0;
    bool quoted = false;
    for (const char *at = text; *at; at++) {
        if (quoted) {
            at += *at == '\\';
            quoted = *at != '"';
        } else if (*at == '"') {
            quoted = true;
        } else {
            depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        }
        CHECK(depth > 0 || strcmp(at, "]\n") == 0 || strcmp(at, "\n") == 0);
        if (strncmp(at, "\n{", 2) == 0 && at > text + 1) {
            CHECK(at[-1] == ',');
        }
    }
    CHECK_INT(depth, 0);
}

static int count(const char *text, const char *part)
{
    int found = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part)) {
        found++;
    }
    return found;
}

TEST(spans_lie_in_their_lanes)
{
    const char *dir = fresh_folder();
    CHECK(!tddp_trace_enabled());
    tddp_trace_span("training", "before", 1, 2, NULL);
    CHECK_OK(tddp_trace_open(dir, 3));
    CHECK(tddp_trace_enabled());
    tddp_trace_span("training", "forward", 1000 * US, 1500 * US + 7, NULL);
    tddp_trace_span("communication", "all_reduce", 1200 * US, 1300 * US, "{\"bytes\": 4}");
    tddp_trace_span("mine", "a \"name\"\n", 5 * US, 4 * US, NULL);
    tddp_trace_close();
    CHECK(!tddp_trace_enabled());
    tddp_trace_span("training", "after", 1, 2, NULL);
    tddp_trace_close();
    char *text = contents(dir, 3);
    check_whole(text);
    CHECK_CONTAINS(text, "\"name\": \"tddp\", \"args\": {\"rank\": 3, \"version\": \"");
    CHECK_CONTAINS(text, "\"name\": \"process_name\", \"args\": {\"name\": \"rank 3\"}");
    CHECK_CONTAINS(text, "\"pid\": 3, \"tid\": 1, \"ts\": 1000.000, \"dur\": 500.007, \"cat\": "
                         "\"training\", \"name\": \"forward\"}");
    CHECK_CONTAINS(text, "\"tid\": 9, \"ts\": 1200.000, \"dur\": 100.000, \"cat\": "
                         "\"communication\", \"name\": \"all_reduce\", \"args\": {\"bytes\": 4}}");
    CHECK_CONTAINS(text, "\"ts\": 5.000, \"dur\": 0.000, \"cat\": \"mine\", \"name\": "
                         "\"a \\\"name\\\"\\u000a\"}");
    CHECK_INT(count(text, "thread_name"), 3);
    CHECK_INT(count(text, "\"X\""), 3);
    free(text);
    clear(dir);
}

TEST(spans_that_overlap_get_rows_of_their_own)
{
    const char *dir = fresh_folder();
    CHECK_OK(tddp_trace_open(dir, 0));
    tddp_trace_span("training", "inner", 20 * US, 30 * US, NULL);
    tddp_trace_span("training", "outer", 10 * US, 50 * US, NULL);
    tddp_trace_span("training", "within", 35 * US, 40 * US, NULL);
    tddp_trace_span("training", "next", 50 * US, 60 * US, NULL);
    tddp_trace_span("training", "across", 45 * US, 55 * US, NULL);
    tddp_trace_close();
    char *text = contents(dir, 0);
    CHECK_INT(count(text, "\"tid\": 1, \"ts\""), 4);
    CHECK_CONTAINS(text, "\"tid\": 2, \"ts\": 45.000");
    CHECK_CONTAINS(text, "\"name\": \"training (2)\"");
    free(text);
    clear(dir);
}

TEST(lanes_may_be_many)
{
    const char *dir = fresh_folder();
    CHECK_OK(tddp_trace_open(dir, 0));
    for (int i = 0; i < 40; i++) {
        char name[100];
        snprintf(name, sizeof name,
                 "lane %d of a name that is longer than anybody needs to tell "
                 "lanes apart",
                 i);
        tddp_trace_span(name, "span", i * US, (i + 1) * US, NULL);
    }
    tddp_trace_close();
    char *text = contents(dir, 0);
    check_whole(text);
    CHECK_INT(count(text, "\"X\""), 40);
    CHECK_INT(count(text, "thread_name"), 14);
    CHECK_CONTAINS(text, "\"cat\": \"other lanes\"");
    free(text);
    clear(dir);
}

enum { THREADS = 4, SPANS = 2000 };

static void *add_many(void *data)
{
    for (int i = 0; i < SPANS; i++) {
        int64_t now = tddp_trace_now();
        tddp_trace_span(data, "span", now, now + 1, "{\"text\": \"twenty bytes or so\"}");
    }
    return NULL;
}

TEST(threads_write_together)
{
    const char *dir = fresh_folder();
    static const char *const lanes[THREADS] = {"training", "communication", "a", "b"};
    pthread_t threads[THREADS];
    CHECK_OK(tddp_trace_open(dir, 0));
    for (int i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, add_many, (void *)lanes[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    tddp_trace_close();
    char *text = contents(dir, 0);
    check_whole(text);
    CHECK_INT(count(text, "\"X\""), THREADS * SPANS);
    free(text);
    clear(dir);
}

TEST(folders_are_made_and_a_trace_goes_on)
{
    char dir[100];
    snprintf(dir, sizeof dir, "%s/deep/down/", fresh_folder());
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tddp_trace_open(dir, 1));
        tddp_trace_span("training", "step", 1, 2, NULL);
        tddp_trace_close();
    }
    char *text = contents(dir, 1);
    check_whole(text);
    CHECK_INT(count(text, "\"step\""), 2);
    CHECK_INT(count(text, "\"tddp\""), 1);
    free(text);
    /* Another's file is replaced. */
    char path[PATH_BYTES];
    path_of(dir, 1, path);
    CHECK_INT(truncate(path, 10), 0);
    CHECK_OK(tddp_trace_open(dir, 1));
    tddp_trace_close();
    text = contents(dir, 1);
    check_whole(text);
    CHECK_INT(count(text, "\"step\""), 0);
    free(text);
    clear(folder);
}

TEST(what_is_wrong_is_said)
{
    const char *dir = fresh_folder();
    CHECK_STATUS(tddp_trace_open(NULL, 0), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_trace_open("", 0), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_trace_open(dir, -1), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "rank -1: expected 0 or more");
    CHECK_STATUS(tddp_trace_open("/proc/self/nowhere", 0), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "cannot make the folder /proc/self/nowhere: ");
    CHECK_OK(tddp_trace_open(dir, 0));
    CHECK_STATUS(tddp_trace_open(dir, 1), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "trace_rank_0.json already");
    tddp_trace_close();
    for (long nth = 1; nth < 12; nth++) {
        tddp_fail_allocation(nth);
        tddp_status status = tddp_trace_open(dir, 2);
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
        tddp_trace_close();
    }
    clear(dir);
}

static char logged[2048];

static void keep_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level;
    (void)data;
    snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s: %s\n", room, text);
}

TEST(a_full_disk_ends_the_trace_not_the_program)
{
    const char *dir = fresh_folder();
    tddp_log_set_sink(keep_line, NULL);
    CHECK_OK(tddp_trace_open(dir, 0));
    tddp_trace_span("training", "kept", 1, 2, NULL);
    char path[PATH_BYTES];
    struct stat entry;
    path_of(dir, 0, path);
    CHECK(stat(path, &entry) == 0);
    off_t before = entry.st_size;
    CHECK_UNTIL(stat(path, &entry) == 0 && entry.st_size > before);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit = {(rlim_t)entry.st_size + 100, RLIM_INFINITY};
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    tddp_trace_span("training",
                    "too much, as this has a name that needs more room than there is "
                    "left in a file of that size",
                    3, 4, NULL);
    CHECK_UNTIL(!tddp_trace_enabled());
    tddp_trace_span("training", "later", 5, 6, NULL);
    tddp_trace_close();
    CHECK_CONTAINS(logged, "trace: trace: cannot write ");
    CHECK_CONTAINS(logged, "File too large; tracing stops");
    CHECK_INT(count(logged, "\n"), 1);
    char *text = contents(dir, 0);
    check_whole(text);
    CHECK_INT(count(text, "\"kept\""), 1);
    CHECK_INT(count(text, "\"X\""), 1);
    free(text);
    clear(dir);
}

TEST(a_trace_ends_at_its_limit_and_is_whole)
{
    const char *dir = fresh_folder();
    logged[0] = '\0';
    tddp_log_set_sink(keep_line, NULL);
    setenv("TDDP_TRACE_MAX_BYTES", "much", 1);
    CHECK_STATUS(tddp_trace_open(dir, 0), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(),
                   "TDDP_TRACE_MAX_BYTES=\"much\": expected a number of bytes, 4096 or more");
    setenv("TDDP_TRACE_MAX_BYTES", "5000", 1);
    CHECK_OK(tddp_trace_open(dir, 0));
    unsetenv("TDDP_TRACE_MAX_BYTES");
    char path[PATH_BYTES];
    struct stat entry;
    path_of(dir, 0, path);
    for (int64_t i = 0; tddp_trace_enabled(); i++) {
        off_t before = stat(path, &entry) == 0 ? entry.st_size : 0;
        for (int64_t j = 0; j < 20; j++) {
            tddp_trace_span("training", "step", (20 * i + j) * US, (20 * i + j + 1) * US, NULL);
        }
        CHECK_UNTIL(!tddp_trace_enabled() || (stat(path, &entry) == 0 && entry.st_size > before));
    }
    tddp_trace_pause(0); /* nor does it go on */
    CHECK_INT(tddp_trace_enabled(), 0);
    tddp_trace_close();
    CHECK_CONTAINS(logged, "has reached its limit of 5000 bytes (TDDP_TRACE_MAX_BYTES); tracing");
    char *text = contents(dir, 0);
    check_whole(text);
    CHECK(strlen(text) <= 5000 && count(text, "\"step\"") >= 20);
    free(text);
    clear(dir);
}

TEST(spans_of_a_pause_are_left_out)
{
    const char *dir = fresh_folder();
    tddp_trace_pause(0); /* of no trace */
    CHECK_INT(tddp_trace_enabled(), 0);
    CHECK_OK(tddp_trace_open(dir, 0));
    tddp_trace_span("training", "before", 1, 2, NULL);
    tddp_trace_pause(1);
    CHECK_INT(tddp_trace_enabled(), 0);
    tddp_trace_span("training", "meanwhile", 3, 4, NULL);
    tddp_trace_pause(0);
    CHECK_INT(tddp_trace_enabled(), 1);
    tddp_trace_span("training", "after", 5, 6, NULL);
    tddp_trace_pause(1);
    tddp_trace_close();
    char *text = contents(dir, 0);
    check_whole(text);
    CHECK_INT(count(text, "\"before\""), 1);
    CHECK_INT(count(text, "\"meanwhile\""), 0);
    CHECK_INT(count(text, "\"after\""), 1);
    free(text);
    clear(dir);
}

/* A process that traces so many steps and then waits. */
static pid_t start_steps(const char *dir, int64_t steps)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_OK(tddp_trace_open(dir, 0));
        for (int64_t i = 0; i < steps; i++) {
            tddp_trace_span("training", "step", i * US, (i + 1) * US, NULL);
        }
        for (;;) {
            (void)pause();
        }
    }
    return child;
}

static off_t size_of(const char *dir)
{
    char path[PATH_BYTES];
    struct stat entry;
    path_of(dir, 0, path);
    return stat(path, &entry) == 0 ? entry.st_size : 0;
}

/* What a kill leaves; to be freed. */
static char *kill_steps(pid_t child, const char *dir)
{
    CHECK_INT(kill(child, SIGKILL), 0);
    CHECK_INT(waitpid(child, NULL, 0), child);
    return contents(dir, 0);
}

static bool has_written(const char *dir, int steps)
{
    char *text = size_of(dir) > 0 ? contents(dir, 0) : NULL;
    size_t length = text ? strlen(text) : 0;
    bool written =
        length > 4 && strcmp(text + length - 4, "}\n]\n") == 0 && count(text, "\"step\"") == steps;
    free(text);
    return written;
}

TEST(a_killed_process_leaves_a_whole_file)
{
    const char *dir = fresh_folder();
    pid_t child = start_steps(dir, 1000);
    CHECK_UNTIL(has_written(dir, 1000));
    char *text = kill_steps(child, dir);
    check_whole(text);
    CHECK_INT(count(text, "\"step\""), 1000);
    free(text);
    clear(dir);
}

/* The file grows while some MB are written to it at once. */
TEST(a_kill_within_a_write_cuts_the_last_line_at_most)
{
    static const char closing[] = "\n]\n";
    const char *dir = fresh_folder();
    pid_t child = start_steps(dir, 50000);
    CHECK_UNTIL(size_of(dir) > 20000);
    char *left = kill_steps(child, dir);
    size_t length = strlen(left);
    char *text = calloc(1, length + sizeof closing);
    CHECK(text != NULL);
    memcpy(text, left, length);
    if (length < 4 || strcmp(text + length - 4, "}\n]\n") != 0) {
        char *line = text;
        for (char *next = strstr(text, ",\n{"); next; next = strstr(next + 1, ",\n{")) {
            line = next;
        }
        strcpy(line, closing);
    }
    check_whole(text);
    CHECK(count(text, "\"step\"") > 100);
    free(text);
    free(left);
    clear(dir);
}

TEST(exit_writes_what_is_left)
{
    const char *dir = fresh_folder();
    pid_t child = fork();
    if (child == 0) {
        CHECK_OK(tddp_trace_open(dir, 0));
        tddp_trace_span("training", "last", 1, 2, NULL);
        exit(0);
    }
    CHECK_INT(waitpid(child, NULL, 0), child);
    char *text = contents(dir, 0);
    check_whole(text);
    CHECK_INT(count(text, "\"last\""), 1);
    free(text);
    clear(dir);
}

static void trace_in_child(const char *dir)
{
    CHECK(!tddp_trace_enabled());
    tddp_trace_span("training", "child's", 1, 2, NULL);
    CHECK_STATUS(tddp_trace_open(dir, 0), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "another process is writing ");
#ifndef __SANITIZE_THREAD__ /* which allows no threads after a fork beside others */
    CHECK_OK(tddp_trace_open(dir, 1));
    tddp_trace_span("training", "child's", 1, 2, NULL);
#endif
    exit(0);
}

TEST(a_forked_child_has_a_trace_of_its_own)
{
    const char *dir = fresh_folder();
    CHECK_OK(tddp_trace_open(dir, 0));
    tddp_trace_span("training", "parent's", 1, 2, NULL);
    pid_t child = CHECK_FORK();
    if (child == 0) {
        trace_in_child(dir);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    tddp_trace_span("training", "parent's", 3, 4, NULL);
    tddp_trace_close();
    char *own = contents(dir, 0);
    check_whole(own);
    CHECK_INT(count(own, "\"parent's\""), 2);
    CHECK_INT(count(own, "\"X\""), 2);
    free(own);
#ifndef __SANITIZE_THREAD__
    char *its = contents(dir, 1);
    check_whole(its);
    CHECK_INT(count(its, "\"child's\""), 1);
    CHECK_INT(count(its, "\"X\""), 1);
    free(its);
#endif
    clear(dir);
}
