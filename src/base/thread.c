/*
 * Threads and timed waits. Every thread of the library starts here, with all signals blocked: the
 * host language handles signals on its own threads, and a signal must not interrupt our waits.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "base/base.h"

tddp_status tddp_thread_start(pthread_t *thread, const char *name, void *(*body)(void *),
                              void *data)
{
    return tddp_thread_start_sized(thread, name, body, data, 0);
}

/* With every signal blocked; the new thread inherits that. */
static int create_blocked(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *data)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error == 0) {
        error = pthread_create(thread, attributes, body, data);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return error;
}

tddp_status tddp_thread_start_sized(pthread_t *thread, const char *name, void *(*body)(void *),
                                    void *data, size_t stack_bytes)
{
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error == 0) {
        if (stack_bytes > 0) {
            error = pthread_attr_setstacksize(&attributes, stack_bytes);
        }
        if (error == 0) {
            error = create_blocked(thread, &attributes, body, data);
        }
        (void)pthread_attr_destroy(&attributes);
    }
    if (error) {
        return tddp_fail(TDDP_SYSTEM, "cannot start thread %s: %s", name, strerror(error));
    }
    (void)pthread_setname_np(*thread, name);
    return TDDP_OK;
}

tddp_status tddp_cond_init(pthread_cond_t *cond)
{
    int error = pthread_cond_init(cond, NULL);
    return error ? tddp_fail(TDDP_SYSTEM, "pthread_cond_init: %s", strerror(error)) : TDDP_OK;
}

bool tddp_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline_ns)
{
    struct timespec until = {
        .tv_sec = (time_t)(deadline_ns / TDDP_NS_PER_S),
        .tv_nsec = (long)(deadline_ns % TDDP_NS_PER_S),
    };
    return pthread_cond_clockwait(cond, mutex, CLOCK_MONOTONIC, &until) != ETIMEDOUT;
}
