/*
 * Small helpers round system calls and numbers in text; the process id, which a forked child
 * updates before fork(2) returns there.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

/* 0: not known yet, or no fork handler could be registered. */
static _Atomic pid_t process_id;
static pthread_once_t process_asked = PTHREAD_ONCE_INIT;

static void ask_process_id(void)
{
    atomic_store(&process_id, getpid());
}

static void keep_process_id(void)
{
    if (pthread_atfork(NULL, NULL, ask_process_id) == 0) {
        ask_process_id();
    }
}

pid_t tddp_process_id(void)
{
    pid_t known = atomic_load_explicit(&process_id, memory_order_relaxed);
    if (known == 0) {
        (void)pthread_once(&process_asked, keep_process_id);
        known = atomic_load_explicit(&process_id, memory_order_relaxed);
    }
    return known ? known : getpid();
}

tddp_status tddp_fail_errno(const char *what)
{
    return tddp_fail(TDDP_SYSTEM, "%s: %s", what, strerror(errno));
}

void tddp_close(int fd)
{
    if (fd >= 0) {
        int saved = errno;
        /* Linux releases the descriptor also when close is interrupted: never try again. */
        (void)close(fd);
        errno = saved;
    }
}

bool tddp_parse_int(const char *text, int64_t min, int64_t max, int64_t *out)
{
    if (!text || !(*text == '-' || (*text >= '0' && *text <= '9'))) {
        return false;
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || *end != '\0' || value < min || value > max) {
        return false;
    }
    *out = value;
    return true;
}
