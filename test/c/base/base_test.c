#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "check.h"

TEST(statuses_have_names_and_texts)
{
    CHECK_TEXT(tddp_status_name(TDDP_TIMEOUT), "TDDP_TIMEOUT");
    CHECK_TEXT(tddp_status_text(TDDP_TIMEOUT), "timed out");
    CHECK_TEXT(tddp_status_name((tddp_status)999), "TDDP_UNKNOWN");
}

TEST(a_failure_may_quote_the_failure_before)
{
    CHECK_TEXT(tddp_error_message(), "");
    CHECK_STATUS(tddp_fail(TDDP_NETWORK, "connection refused"), TDDP_NETWORK);
    CHECK_STATUS(tddp_fail(TDDP_STORE, "store: %s", tddp_error_message()), TDDP_STORE);
    CHECK_TEXT(tddp_error_message(), "store: connection refused");
}

TEST(a_long_text_is_cut)
{
    char *text = malloc(10001);
    memset(text, 'x', 10000);
    text[10000] = '\0';
    tddp_fail(TDDP_INTERNAL, "%s", text);
    CHECK_INT(strlen(tddp_error_message()), 4095);
    free(text);
}

static void *other_thread(void *data)
{
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    *(int *)data = sigismember(&mask, SIGINT) && sigismember(&mask, SIGTERM) &&
                   strcmp(tddp_error_message(), "") == 0;
    tddp_fail(TDDP_INTERNAL, "the other's");
    return NULL;
}

/* What others have written must not act on a terminal; what is text stays. */
TEST(texts_are_shown_without_control_characters)
{
    static const char *const shown[][2] = {
        {"plain, \"quoted\"\n\ttext", "plain, \"quoted\"\n\ttext"},
        {"\x1b]0;owned\a\x1b[2J", "?]0;owned??[2J"},
        {"a\r\nb\rc\bd\x7f", "a\nb?c?d?"},
        {"\xc2\x9b"
         "31m \x9b"
         "31m",
         "?31m ?31m"},
        {"\xc3\x9b\xe4\xbd\x95\xf0\x9f\x98\x80\xc2\xa0",
         "\xc3\x9b\xe4\xbd\x95\xf0\x9f\x98\x80\xc2\xa0"},
        {"cut \xf0\x9f\x98", "cut \xf0??"},
        {"latin \xe9t\xe9", "latin \xe9t\xe9"},
    };
    for (size_t i = 0; i < sizeof shown / sizeof shown[0]; i++) {
        char text[64];
        (void)snprintf(text, sizeof text, "%s", shown[i][0]);
        CHECK_TEXT(tddp_mask_controls(text), shown[i][1]);
    }
    (void)!tddp_fail(TDDP_STORE, "they said %s", "\x1b[31m");
    CHECK_TEXT(tddp_error_message(), "they said ?[31m");
}

TEST(threads_have_texts_of_their_own_and_take_no_signals)
{
    pthread_t thread;
    int as_expected = 0;
    tddp_fail(TDDP_INTERNAL, "mine");
    CHECK_OK(tddp_thread_start(&thread, "tddp-test", other_thread, &as_expected));
    pthread_join(thread, NULL);
    CHECK(as_expected);
    CHECK_TEXT(tddp_error_message(), "mine");
}

TEST(dtypes_have_sizes_and_names)
{
    CHECK_INT(tddp_dtype_size(TDDP_BFLOAT16), 2);
    CHECK_INT(tddp_dtype_size(TDDP_COMPLEX128), 16);
    CHECK_TEXT(tddp_dtype_name(TDDP_FLOAT32), "float32");
    CHECK_INT(tddp_dtype_size((tddp_dtype)99), 0);
    CHECK_TEXT(tddp_dtype_name((tddp_dtype)99), "unknown");
    CHECK_TEXT(tddp_device_type_name(TDDP_CUDA), "cuda");
}

TEST(deadlines_pass_and_do_not_overflow)
{
    CHECK_INT(tddp_deadline_poll_ms(tddp_now_ns() - 1), 0);
    CHECK_INT(tddp_deadline_poll_ms(tddp_now_ns() + TDDP_NS_PER_S), 1000);
    CHECK(tddp_deadline_after_ms(INT64_MAX) == INT64_MAX);
    CHECK_INT(tddp_deadline_poll_ms(INT64_MAX), INT32_MAX);
    tddp_wait wait = TDDP_WAIT_INIT;
    int64_t far = tddp_wait_deadline(&wait, 5000) - tddp_now_ns();
    CHECK(far > 4 * TDDP_NS_PER_S && far <= 5 * TDDP_NS_PER_S);
    wait.timeout_ms = 0;
    CHECK(tddp_wait_deadline(&wait, 5000) <= tddp_now_ns());
}

TEST(a_cancel_token_stays_triggered_until_reset)
{
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    CHECK_INT(tddp_cancel_triggered(cancel), 0);
    tddp_cancel_trigger(cancel);
    tddp_cancel_trigger(cancel);
    CHECK_INT(tddp_cancel_triggered(cancel), 1);
    CHECK_INT(tddp_cancel_triggered(cancel), 1);
    tddp_cancel_reset(cancel);
    CHECK_INT(tddp_cancel_triggered(cancel), 0);
    tddp_cancel_free(cancel);
    tddp_cancel_free(NULL);
    CHECK_INT(tddp_cancel_fd(NULL), -1);
}

static void *trigger_often(void *cancel)
{
    for (int i = 0; i < 20000; i++) {
        tddp_cancel_trigger(cancel);
    }
    return NULL;
}

/* Whatever a trigger beside a reset becomes, asking and polling agree once both are over, and one
 * more reset settles it. */
TEST(a_cancel_token_bears_triggers_beside_resets)
{
    tddp_cancel *cancel;
    pthread_t thread;
    CHECK_OK(tddp_cancel_create(&cancel));
    CHECK_INT(pthread_create(&thread, NULL, trigger_often, cancel), 0);
    for (int i = 0; i < 20000; i++) {
        tddp_cancel_reset(cancel);
    }
    CHECK_INT(pthread_join(thread, NULL), 0);
    struct pollfd entry = {.fd = tddp_cancel_fd(cancel), .events = POLLIN};
    CHECK(poll(&entry, 1, 0) <= tddp_cancel_triggered(cancel));
    tddp_cancel_reset(cancel);
    CHECK_INT(poll(&entry, 1, 0), 0);
    CHECK_INT(tddp_cancel_triggered(cancel), 0);
    tddp_cancel_trigger(cancel);
    CHECK_INT(poll(&entry, 1, 0), 1);
    CHECK_INT(tddp_cancel_triggered(cancel), 1);
    tddp_cancel_free(cancel);
}

TEST(a_cancel_token_made_of_another_ends_at_its_own_time_too)
{
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel later = {
        .fd = tddp_cancel_fd(cancel), .also = cancel, .deadline = tddp_deadline_after_ms(60000)};
    tddp_cancel now = {.fd = -1, .deadline = tddp_now_ns()};
    CHECK_INT(tddp_cancel_triggered(&later), 0);
    CHECK_INT(tddp_cancel_deadline(&later), later.deadline);
    CHECK_INT(tddp_cancel_deadline(cancel), INT64_MAX);
    CHECK_INT(tddp_cancel_deadline(NULL), INT64_MAX);
    CHECK_INT(tddp_cancel_triggered(&now), 1);
    tddp_cancel_trigger(cancel);
    CHECK_INT(tddp_cancel_triggered(&later), 1);
    tddp_cancel_free(cancel);
}

TEST(a_child_knows_its_own_number)
{
    CHECK_INT(tddp_process_id(), getpid());
    pid_t child = fork();
    if (child == 0) {
        _exit(tddp_process_id() == getpid() ? 0 : 1);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(tddp_process_id(), getpid());
}

TEST(bytes_grow_and_are_consumed)
{
    tddp_bytes bytes = {0};
    for (int i = 0; i < 1000; i++) {
        CHECK_OK(tddp_bytes_append(&bytes, "abcdefg", 7));
    }
    CHECK_INT(bytes.size, 7000);
    tddp_bytes_consume(&bytes, 6993);
    CHECK_INT(memcmp(bytes.data, "abcdefg", 7), 0);
    CHECK_INT(bytes.size, 7);
    CHECK_STATUS(tddp_bytes_reserve(&bytes, SIZE_MAX - 100), TDDP_OUT_OF_MEMORY);
    tddp_bytes_free(&bytes);
    CHECK_INT(bytes.capacity, 0);
}

TEST(the_nth_allocation_can_be_made_to_fail)
{
    tddp_fail_allocation(2);
    void *first = tddp_alloc(1);
    CHECK(first);
    CHECK(!tddp_alloc(1));
    CHECK_TEXT(tddp_error_message(), "out of memory: 1 bytes");
    void *third = tddp_alloc_array(3, 4);
    CHECK(third);
    free(first);
    free(third);
}

TEST(numbers_are_parsed_whole)
{
    int64_t value = 7;
    CHECK(tddp_parse_int("29500", 0, 65535, &value));
    CHECK_INT(value, 29500);
    CHECK(tddp_parse_int("-3", -5, 5, &value));
    CHECK(!tddp_parse_int("65536", 0, 65535, &value));
    CHECK(!tddp_parse_int("12x", 0, 100, &value));
    CHECK(!tddp_parse_int("", 0, 100, &value));
    CHECK(!tddp_parse_int(" 1", 0, 100, &value));
    CHECK(!tddp_parse_int("+1", 0, 100, &value));
    CHECK(!tddp_parse_int("-", -5, 5, &value));
    CHECK(!tddp_parse_int("99999999999999999999", 0, INT64_MAX, &value));
    CHECK(!tddp_parse_int(NULL, 0, 1, &value));
    CHECK_INT(value, -3);
}

static char logged[256];

static void keep(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level;
    (void)data;
    snprintf(logged, sizeof logged, "%s|%s", room, text);
}

TEST(log_lines_reach_the_sink_from_their_level_on)
{
    tddp_log_set_sink(keep, NULL);
    tddp_log_set_level(TDDP_LOG_INFO);
    errno = EPIPE;
    tddp_log(TDDP_LOG_INFO, "store", "%d clients", 3);
    CHECK_INT(errno, EPIPE);
    CHECK_TEXT(logged, "store|3 clients");
    tddp_log(TDDP_LOG_DEBUG, "store", "hidden");
    CHECK_TEXT(logged, "store|3 clients");
}

/* Takes what a pipe holds; counts its lines, and adds up those that it says were lost. */
static void take_lines(int fd, int *lines, int *lost)
{
    char text[4096];
    size_t held = 0;
    struct pollfd there = {.fd = fd, .events = POLLIN};
    while (poll(&there, 1, 0) > 0) {
        ssize_t size = read(fd, text + held, sizeof text - 1 - held);
        CHECK(size > 0);
        held += (size_t)size;
        text[held] = '\0';
        char *start = text;
        for (char *end; (end = strchr(start, '\n')); start = end + 1) {
            int count;
            if (sscanf(start, "[tddp] warn log: %d lines were lost", &count) == 1) {
                *lost += count;
            } else {
                CHECK(strncmp(start, "[tddp] warn store: a line ", 26) == 0);
                (*lines)++;
            }
        }
        held -= (size_t)(start - text);
        memmove(text, start, held);
    }
    CHECK_INT(held, 0);
}

/* No thread of a server may hang because nobody reads what it logs. */
MULTI_TEST(lines_that_nobody_reads_are_lost_and_counted, 1, 30)
{
    enum { LINES = 3000 };
    int ends[2];
    int lines = 0;
    int lost = 0;
    (void)rank, (void)world_size, (void)port;
    CHECK_INT(pipe(ends), 0);
    int before = dup(STDERR_FILENO);
    CHECK(before >= 0 && dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
    tddp_log_set_level(TDDP_LOG_WARN);
    for (int i = 0; i < LINES; i++) {
        errno = EPIPE;
        tddp_log(TDDP_LOG_WARN, "store", "a line of some length, the %dth of many such", i);
        CHECK_INT(errno, EPIPE);
    }
    take_lines(ends[0], &lines, &lost);
    CHECK(lines > 0 && lines < LINES && lost == 0);
    tddp_log(TDDP_LOG_WARN, "store", "a line for which there is room again");
    tddp_log(TDDP_LOG_WARN, "store", "a line behind it");
    take_lines(ends[0], &lines, &lost);
    CHECK(dup2(before, STDERR_FILENO) == STDERR_FILENO);
    CHECK_INT(lines + lost, LINES + 2);
    CHECK(lost > 0);
    close(before);
    close(ends[0]);
    close(ends[1]);
}

/* It is read once in a process, so each rank has another value. */
MULTI_TEST(the_environment_sets_the_level, 6, 10)
{
    static const char *const values[] = {NULL, "error", "warn", "info", "debug", "loud"};
    static const tddp_log_level least[] = {TDDP_LOG_WARN, TDDP_LOG_ERROR, TDDP_LOG_WARN,
                                           TDDP_LOG_INFO, TDDP_LOG_DEBUG, TDDP_LOG_WARN};
    (void)port;
    CHECK_INT(world_size, 6);
    (void)unsetenv("TDDP_LOG");
    if (values[rank]) {
        CHECK_INT(setenv("TDDP_LOG", values[rank], 1), 0);
    }
    for (tddp_log_level level = TDDP_LOG_ERROR; level <= TDDP_LOG_DEBUG; level++) {
        CHECK_INT(tddp_log_enabled(level), level <= least[rank]);
    }
}

MULTI_TEST(ranks_run_as_processes, 3, 10)
{
    CHECK_INT(world_size, 3);
    CHECK(rank >= 0 && rank < 3);
    CHECK(port > 0);
}
