/*
 * The table that all processes of a test share is mapped before the first test starts and cleared
 * between tests. Its counters are futexes, so that waiting costs nothing; conditions are polled.
 */
#include <dirent.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "events.h"
#include "runner.h"

enum {
    MOST_RANKS = 32,
    MS = 1000 * 1000,
    IN_A_ROW = 3 /* looks at a thread that sleeps, until it is taken to block */
};

static struct shared {
    atomic_int events[CHECK_EVENTS];
    atomic_int pids[MOST_RANKS];
    atomic_int ended[MOST_RANKS];
    double limit; /* on the monotonic clock */
} * shared;

double check_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Sanitizers take their time; so do machines with much else to do. */
double check_timeout_multiplier(void)
{
    const char *text = getenv("TDDP_TEST_TIMEOUT_MULTIPLIER");
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    const double of_build = 4;
#else
    const double of_build = 1;
#endif
    double factor = text ? atof(text) : 1;
    return (factor > 0 ? factor : 1) * of_build;
}

void check_events_begin(double seconds)
{
    if (!shared) {
        shared =
            mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(shared != MAP_FAILED);
    }
    check_events_clear();
    shared->limit = check_now() + seconds;
}

void check_events_clear(void)
{
    memset(shared->events, 0, sizeof shared->events);
    memset(shared->pids, 0, sizeof shared->pids);
    memset(shared->ended, 0, sizeof shared->ended);
}

/* --- waiting --------------------------------------------------------------------------------- */

static void fail_when_late(const char *file, int line, const char *what)
{
    if (check_now() > shared->limit) {
        check_failed(file, line, "the test's time is nearly over and still not: %s", what);
    }
}

void check_look_again(const char *file, int line, const char *what, int looks)
{
    fail_when_late(file, line, what);
    if (looks < 20) {
        sched_yield();
        return;
    }
    int pause_us = looks < 60 ? 100 : 1000;
    nanosleep(&(struct timespec){.tv_nsec = pause_us * 1000L}, NULL);
}

static void await_word(const char *file, int line, const char *what, atomic_int *word, int least)
{
    int value;
    while ((value = atomic_load(word)) < least) {
        fail_when_late(file, line, what);
        struct timespec moment = {.tv_nsec = 200 * MS};
        (void)syscall(SYS_futex, word, FUTEX_WAIT, value, &moment, NULL, 0);
    }
}

static void raise_word(atomic_int *word, int value)
{
    atomic_store(word, value);
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* --- counters -------------------------------------------------------------------------------- */

static atomic_int *word_of(int event)
{
    CHECK(event >= 0 && event < CHECK_EVENTS);
    return &shared->events[event];
}

void check_signal(int event)
{
    atomic_int *word = word_of(event);
    atomic_fetch_add(word, 1);
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void check_post(int event, int number)
{
    raise_word(word_of(event), number);
}

int check_signals(int event)
{
    return atomic_load(word_of(event));
}

void check_await_at(const char *file, int line, int event, int count)
{
    char what[64];
    (void)snprintf(what, sizeof what, "event %d has been signalled %d times", event, count);
    await_word(file, line, what, word_of(event), count);
}

/* --- processes and threads ------------------------------------------------------------------- */

static int checked_rank(int rank)
{
    CHECK(rank >= 0 && rank < MOST_RANKS);
    return rank;
}

void check_rank_started(int rank, pid_t pid)
{
    atomic_store(&shared->ended[checked_rank(rank)], 0);
    raise_word(&shared->pids[rank], pid);
}

void check_rank_ended(int rank)
{
    raise_word(&shared->ended[checked_rank(rank)], 1);
}

pid_t check_rank_pid(int rank)
{
    await_word(__FILE__, __LINE__, "the rank has started", &shared->pids[checked_rank(rank)], 1);
    return atomic_load(&shared->pids[rank]);
}

void check_await_end_at(const char *file, int line, int rank)
{
    char what[32];
    (void)snprintf(what, sizeof what, "rank %d has ended", rank);
    await_word(file, line, what, &shared->ended[checked_rank(rank)], 1);
}

/* The letter of proc(5); 0 if there is no such thread. */
static char state_of(pid_t thread)
{
    char path[64];
    char text[256];
    (void)snprintf(path, sizeof path, "/proc/%d/task/%d/stat", (int)thread, (int)thread);
    FILE *file = fopen(path, "re");
    if (!file) {
        return 0;
    }
    size_t size = fread(text, 1, sizeof text - 1, file);
    (void)fclose(file);
    text[size] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' ? name_end[2] : 0;
}

void check_will_block(int event)
{
    check_post(event, (int)syscall(SYS_gettid));
}

void check_await_blocked_at(const char *file, int line, int event)
{
    check_await_at(file, line, event, 1);
    check_await_asleep_at(file, line, check_signals(event));
}

void check_await_asleep_at(const char *file, int line, pid_t thread)
{
    for (int looks = 0, asleep = 0; asleep < IN_A_ROW; looks++) {
        asleep = state_of(thread) == 'S' ? asleep + 1 : 0;
        check_look_again(file, line, "the thread sleeps", looks + 20);
    }
}

/* Calls back with the number of each thread of this process. */
static void each_thread(void (*visit)(pid_t thread, void *context), void *context)
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *each = readdir(tasks); each; each = readdir(tasks)) {
        if (each->d_name[0] != '.') {
            visit((pid_t)atoi(each->d_name), context);
        }
    }
    (void)closedir(tasks);
}

typedef struct named {
    const char *name;
    int found;
} named;

static void count_named(pid_t thread, void *context)
{
    named *it = context;
    char path[64];
    char text[32] = "";
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/comm", (int)thread);
    FILE *file = fopen(path, "re");
    if (file) {
        it->found +=
            fgets(text, sizeof text, file) && strncmp(text, it->name, strlen(it->name)) == 0;
        (void)fclose(file);
    }
}

int check_threads_named(const char *name)
{
    named it = {.name = name};
    each_thread(count_named, &it);
    return it.found;
}

static void note_awake(pid_t thread, void *found)
{
    char state = thread == (pid_t)syscall(SYS_gettid) ? 0 : state_of(thread);
    *(bool *)found |= state != 0 && state != 'S';
}

pid_t check_fork_at(const char *file, int line)
{
    for (int looks = 0, asleep = 0; asleep < IN_A_ROW; looks++) {
        bool awake = false;
        each_thread(note_awake, &awake);
        asleep = awake ? 0 : asleep + 1;
        check_look_again(file, line, "the other threads sleep", looks + 20);
    }
    return fork();
}

void check_await_stopped_at(const char *file, int line, pid_t pid)
{
    for (int looks = 0; state_of(pid) != 'T'; looks++) {
        check_look_again(file, line, "the process is stopped", looks);
    }
}
