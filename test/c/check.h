/*
 * The C tests' own small frame.
 *
 *     TEST(adds_up) { CHECK_INT(1 + 1, 2); }
 *
 *     MULTI_TEST(everyone_sums, 3, 20)        // 3 processes, at most 20 seconds
 *     {
 *         CHECK_INT(rank < world_size, 1);    // rank, world_size and port are given
 *     }
 *
 * Each test runs in processes of its own, is killed with all of them at its time limit, and its
 * output is shown only if it fails. `PROGRAM name` runs the tests whose names contain `name`, in
 * this process with output shown if there is a second argument `-n`.
 */
#ifndef TDDP_CHECK_H
#define TDDP_CHECK_H

#include <stdint.h>
#include <stdlib.h>

#include <tddp/status.h>

#ifdef __cplusplus
#define CHECK_NORETURN [[noreturn]]
extern "C" {
#else
#define CHECK_NORETURN _Noreturn
#endif

typedef struct check_case {
    const char *name;
    const char *file;
    void (*body)(int rank, int world_size, int port);
    int processes;
    int seconds;
    struct check_case *next;
} check_case;

void check_register(check_case *test);

/* Ends the test as failed, with the place and a text. */
CHECK_NORETURN void check_failed(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Ends the test as skipped, saying why. */
CHECK_NORETURN void check_skip(const char *reason);

void check_int(const char *file, int line, const char *text, int64_t got, int64_t expected);
void check_double(const char *file, int line, const char *text, double got, double expected,
                  double tolerance);
void check_text(const char *file, int line, const char *text, const char *got,
                const char *expected);
void check_contains(const char *file, int line, const char *text, const char *got,
                    const char *part);
void check_status(const char *file, int line, const char *text, tddp_status got,
                  tddp_status expected);

/* A port of the loopback address on which nobody listens. It is held (bound, as
 * SO_REUSEADDR lets others bind it too that ask for this very port) until this process ends. */
int check_free_port(void);

/* A service that the parent of a test's ranks runs on the test's port, so that no rank's end takes
 * it away: started once the ranks are, stopped when all have ended. Without one nobody listens on
 * the test's port, which is held for the test. */
typedef struct check_service {
    void *(*start)(int listener); /* takes the socket over */
    void (*stop)(void *started);
} check_service;
void check_serve(const check_service *service);

/* What time limits of tests are multiplied by: TDDP_TEST_TIMEOUT_MULTIPLIER, for slow or busy
 * machines, times what the build asks for. */
double check_timeout_multiplier(void);

#ifdef __cplusplus
}
#endif

#define MULTI_TEST(test_name, process_count, time_limit)                       \
    static void test_name(int rank, int world_size, int port);                 \
    __attribute__((constructor)) static void register_##test_name(void)        \
    {                                                                          \
        static check_case test = {                                             \
            #test_name, __FILE__, test_name, process_count, time_limit, NULL}; \
        check_register(&test);                                                 \
    }                                                                          \
    static void test_name(__attribute__((unused)) int rank,                    \
                          __attribute__((unused)) int world_size,              \
                          __attribute__((unused)) int port)

#define TEST(test_name) MULTI_TEST(test_name, 1, 30)

#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) {                                              \
            check_failed(__FILE__, __LINE__, "%s is false", #condition); \
        }                                                                \
    } while (0)
#define CHECK_INT(got, expected) \
    check_int(__FILE__, __LINE__, #got, (int64_t)(got), (int64_t)(expected))
#define CHECK_DOUBLE(got, expected, tolerance) \
    check_double(__FILE__, __LINE__, #got, (got), (expected), (tolerance))
#define CHECK_TEXT(got, expected) check_text(__FILE__, __LINE__, #got, (got), (expected))
#define CHECK_CONTAINS(got, part) check_contains(__FILE__, __LINE__, #got, (got), (part))
#define CHECK_STATUS(got, expected) check_status(__FILE__, __LINE__, #got, (got), (expected))
#define CHECK_OK(got) check_status(__FILE__, __LINE__, #got, (got), TDDP_OK)

#endif
