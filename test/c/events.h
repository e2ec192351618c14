/*
 * Events between the processes of a test, and states of processes that can be seen: what a test
 * waits for instead of sleeping. Each wait ends the test as failed, with its place, shortly before
 * the test's time limit.
 */
#ifndef TDDP_CHECK_EVENTS_H
#define TDDP_CHECK_EVENTS_H

#include <sys/types.h>

#include "check.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counters that all processes of a test share; 0 when it starts. A test numbers its own. */
enum { CHECK_EVENTS = 64 };

/* Adds one and wakes those who wait. */
void check_signal(int event);

int check_signals(int event);

/* Leaves a number (more than 0) there instead. */
void check_post(int event, int number);

/* Clears the table, for tests that start ranks again and again. */
void check_events_clear(void);

/* Waits until the counter is at least `count`. */
void check_await_at(const char *file, int line, int event, int count);
#define CHECK_AWAIT(event, count) check_await_at(__FILE__, __LINE__, event, count)

/* Waits until `count` processes (or threads) have come here; each event serves one meeting. */
#define CHECK_MEET(event, count)   \
    do {                           \
        check_signal(event);       \
        CHECK_AWAIT(event, count); \
    } while (0)

/* Waits until a condition holds that other threads or processes bring about. */
#define CHECK_UNTIL(condition)                                        \
    do {                                                              \
        for (int looks_ = 0; !(condition); looks_++) {                \
            check_look_again(__FILE__, __LINE__, #condition, looks_); \
        }                                                             \
    } while (0)
void check_look_again(const char *file, int line, const char *what, int looks);

/* The process of a rank; waits until it has started. */
pid_t check_rank_pid(int rank);

/* Waits until a rank's process has ended, with all its threads, so that its descriptors are closed.
 */
void check_await_end_at(const char *file, int line, int rank);
#define CHECK_AWAIT_END(rank) check_await_end_at(__FILE__, __LINE__, rank)

/* For those that start ranks: the runner, and tests that fork ranks themselves. */
void check_rank_started(int rank, pid_t pid);
void check_rank_ended(int rank);

/* The calling thread is about to block; for CHECK_AWAIT_BLOCKED. */
void check_will_block(int event);

/* Waits until the thread that said so sleeps. What it sleeps for cannot be seen, and its call may
 * not have come to that yet: a test must end alike in either case. */
void check_await_blocked_at(const char *file, int line, int event);
#define CHECK_AWAIT_BLOCKED(event) check_await_blocked_at(__FILE__, __LINE__, event)

/* The same of any thread; a process's first thread has the process's id. */
void check_await_asleep_at(const char *file, int line, pid_t thread);
#define CHECK_AWAIT_ASLEEP(thread) check_await_asleep_at(__FILE__, __LINE__, thread)

/* How many threads of this process have a name that begins so. The system forgets a thread a moment
 * after it was joined. */
int check_threads_named(const char *name);

/* fork() beside threads that block; waits until they do. A thread that starts holds locks of
 * AddressSanitizer's allocator, which GCC before 14 leaves locked in the child. Beside threads that
 * poll a test waits for its own sign that they have started. */
pid_t check_fork_at(const char *file, int line);
#define CHECK_FORK() check_fork_at(__FILE__, __LINE__)

/* Waits until a process is stopped (SIGSTOP). */
void check_await_stopped_at(const char *file, int line, pid_t pid);
#define CHECK_AWAIT_STOPPED(pid) check_await_stopped_at(__FILE__, __LINE__, pid)

#ifdef __cplusplus
}
#endif

#endif
