/* Threads that are lent to calls: as many as there are calls under way, and none for long after. */
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/blocking.h"
#include "base/base.h"
#include "events.h"

enum { ALL, GO, DONE }; /* events */
enum { MANY = 200 };

static const char name[] = "tddp-blocking";

static void signal_all(void *context, void *data)
{
    CHECK(context == data);
    check_signal(DONE);
}

/* Waits for all others, and then to be allowed to end. */
static void wait_for_all(void *context, void *data)
{
    (void)context;
    (void)data;
    CHECK_MEET(ALL, MANY);
    CHECK_AWAIT(GO, 1);
    check_signal(DONE);
}

TEST(no_call_waits_for_another_ones_thread)
{
    static tddp_blocking_call calls[MANY];
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(tddp_blocking_reserve());
        calls[i] = (tddp_blocking_call){.run = wait_for_all};
        tddp_blocking_start(&calls[i]);
    }
    CHECK_AWAIT(ALL, MANY);
    CHECK_INT(check_threads_named(name), MANY);
    check_signal(GO);
    CHECK_AWAIT(DONE, MANY);
    CHECK_UNTIL(check_threads_named(name) == 0);
}

static void tell_thread(void *context, void *data)
{
    (void)data;
    *(pid_t *)context = (pid_t)syscall(SYS_gettid);
    check_signal(DONE);
}

/* Also one that was started for a reservation that was given back. */
TEST(a_thread_serves_again)
{
    pid_t first = 0;
    tddp_blocking_idle_ms = 60000;
    CHECK_OK(tddp_blocking_reserve());
    tddp_blocking_release();
    for (int i = 1; i <= 100; i++) {
        pid_t thread = 0;
        tddp_blocking_call call = {.run = tell_thread, .context = &thread};
        CHECK_OK(tddp_blocking_reserve());
        tddp_blocking_start(&call);
        CHECK_AWAIT(DONE, i);
        first = first ? first : thread;
        CHECK_INT(thread, first);
        CHECK_AWAIT_ASLEEP(thread); /* it waits for the next call */
    }
    CHECK_INT(check_threads_named(name), 1);
}

/* It stays for what it is reserved for, however long that takes. */
TEST(a_reserved_thread_does_not_end)
{
    tddp_blocking_idle_ms = 1;
    CHECK_OK(tddp_blocking_reserve());
    CHECK_OK(tddp_blocking_reserve());
    tddp_blocking_release();
    CHECK_UNTIL(check_threads_named(name) == 1);
    tddp_blocking_call call = {.run = signal_all};
    tddp_blocking_start(&call);
    CHECK_AWAIT(DONE, 1);
    CHECK_UNTIL(check_threads_named(name) == 0);
}

#ifndef __SANITIZE_THREAD__ /* which allows no threads after a fork beside others */
static void sleep_for_ever(void *context, void *data)
{
    (void)context;
    (void)data;
    check_signal(GO);
    check_will_block(ALL);
    for (;;) {
        (void)pause();
    }
}

/* A child has none of its parent's threads and calls; and the parent may end beside a call. */
TEST(a_forked_child_has_its_own)
{
    static tddp_blocking_call blocked = {.run = sleep_for_ever};
    tddp_blocking_call waiting = {.run = signal_all};
    CHECK_OK(tddp_blocking_reserve());
    tddp_blocking_start(&blocked);
    CHECK_OK(tddp_blocking_reserve());
    tddp_blocking_start(&waiting);
    CHECK_AWAIT(DONE, 1);
    CHECK_AWAIT_BLOCKED(ALL);
    pid_t child = CHECK_FORK();
    if (child == 0) {
        tddp_blocking_call call = {.run = signal_all};
        CHECK_OK(tddp_blocking_reserve());
        CHECK_INT(check_threads_named(name), 1);
        tddp_blocking_start(&call);
        CHECK_AWAIT(DONE, 2);
        _exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
}
#endif

typedef struct caller {
    pthread_t thread;
    tddp_blocking_call calls[20];
    atomic_int ran;
} caller;

static void count(void *context, void *data)
{
    (void)data;
    atomic_fetch_add(&((caller *)context)->ran, 1);
    (void)sched_yield();
}

static void *call_often(void *data)
{
    caller *self = data;
    for (int round = 0; round < 50; round++) {
        atomic_store(&self->ran, 0);
        for (int i = 0; i < 20; i++) {
            CHECK_OK(tddp_blocking_reserve());
            if (i % 3 == 0) {
                tddp_blocking_release();
                CHECK_OK(tddp_blocking_reserve());
            }
            self->calls[i] = (tddp_blocking_call){.run = count, .context = self};
            tddp_blocking_start(&self->calls[i]);
        }
        while (atomic_load(&self->ran) < 20) {
            (void)sched_yield();
        }
    }
    return NULL;
}

TEST(many_callers)
{
    static caller callers[4];
    tddp_blocking_idle_ms = 2; /* threads come and go */
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(callers[i].thread, NULL);
    }
    CHECK_UNTIL(check_threads_named(name) == 0);
}
